"""Making a step visible, as the checkpoint that it is from then on. Called by the monitor, through `disk`.

The commit of a folder, in this order, so that a crash at any point leaves what was there before or all of the new:

1. the files that the parts reported are checked (there, of that size); those they did not report are digested;
2. of an earlier commit of the step (its weights) the files are hard-linked in;
3. all files and folders are fsynced, the manifest is written last and fsynced;
4. one rename makes the folder visible; where the step is visible already, see `replacement`.

Trackers move after that, and only then is anything old deleted. Files written straight into the step folder (verl's own
way) are committed there: then the manifest, replaced in one step, is the commit.

Weights that find their place taken by what they must not replace are committed beside it (`layout.versions_dir`), for
the readers of their run.

Files that no manifest lists belong to others: a full commit takes in those that are there with its attempt's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trinity_sync.checkpoint import folders, replacement, verl_folders
from trinity_sync.checkpoint.catalog import check_ours, committed_manifest, files_of, look_at
from trinity_sync.checkpoint.deletion_notes import unlink_note
from trinity_sync.checkpoint.layout import (
    MANIFEST,
    Manifest,
    abandoned_dir,
    partial_staging_dir,
    read_manifest,
    staging_dir,
    step_dir,
    versions_dir,
    write_manifest,
)
from trinity_sync.errors import RunError, take_back
from trinity_sync.host.durable import sync_folder, sync_tree
from trinity_sync.host.file_digest import digest_file
from trinity_sync.host.listing import walk
from trinity_sync.protocol.files import FileEntry

#: Files up to this size are copied, not linked, while parts of the step are still being written: a writer that writes
#: a small common file (a config) again must not change the committed one under its readers.
_COPY_BELOW = 1 << 20

#: What a commit does not take the place of, leased or not.
_NOT_OURS = ("newer", "verl", "unreadable", "foreign")


def prepare_staging(root: Path, step: int, attempt: int) -> Path:
    """Create the folder into which the parts of a step are written, and return it."""
    folder = staging_dir(root, step, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def commit_folder(
    root: Path,
    draft: Manifest,
    *,
    partial: bool = False,
    durable: bool = True,
    beside: bool = False,
    clock: Callable[[], float] = time.time,
) -> Manifest:
    """Make a step visible; see the module's text for the order of things. May be called again after a crash.

    Args:
        draft: the manifest to write; its `files` are those that the parts reported.
        partial: other parts of the step are still being written. Only the reported files are committed, from a
            folder of links, and the staging folder stays for the rest.
        durable: fsync. Without it a commit survives the death of every process, but not a power cut.
        beside: the step's place is taken; commit these weights in `layout.versions_dir`.
        clock: Unix seconds, by which leases end.

    Returns:
        The manifest that was written, with all files.

    Raises:
        RunError: a reported file or that of a rank is missing, or one has another size; or what is visible must not be
            replaced by this.
        OSError: the disk refused; nothing became visible.
    """
    place = versions_dir(root, draft.attempt) if beside else root
    target = step_dir(place, draft.step)
    staging = staging_dir(root, draft.step, draft.attempt)
    if not beside:
        unlink_note(root, draft.step, draft.attempt)
    if not any(files_of(staging)):
        if beside:
            raise RunError(
                f"weights of step {draft.step} were not written to {staging}, and they must not take the place of the "
                f"checkpoint in {step_dir(root, draft.step)}"
            )
        return _commit_in_place(target, draft, partial, durable, clock)
    place.mkdir(parents=True, exist_ok=True)
    if target.exists():
        check_ours([look_at(place, draft.step)], _NOT_OURS)
    source = _link_reported(root, staging, draft) if partial else staging
    adopted = _adopt(root, target, source, draft, partial)
    manifest = _whole(source, replace(draft, files=_collect(source, draft.files, adopted, everything=not partial)))
    replacement.check_replaces(place, target, manifest, clock)
    if durable:
        sync_tree(source)
    write_manifest(source, manifest, durable=durable)
    replacement.publish(place, source, target, manifest, clock)
    return manifest


def taken(root: Path, step: int, attempt: int) -> bool:
    """Return whether staged weights find what this program must not replace in the place of their step."""
    target = step_dir(root, step)
    staged = target.exists() and any(files_of(staging_dir(root, step, attempt)))
    return staged and look_at(root, step).state in _NOT_OURS


def adopt_folder(root: Path, source: Path, step: int) -> None:
    """Make a folder that came from elsewhere, with its manifest, the checkpoint of a step; durable.

    What is there under that step is renamed to ``abandoned-*`` first.

    Args:
        source: on the same file system. Its files have been fsynced.
    """
    for parent, _ in walk(source):
        sync_folder(parent)
    target = step_dir(root, step)
    if target.exists():
        info = look_at(root, step)
        check_ours([info], ("newer", "foreign"))
        target.rename(abandoned_dir(root, step, info.attempt))
    source.rename(target)
    sync_folder(root)


def _commit_in_place(
    target: Path, draft: Manifest, partial: bool, durable: bool, clock: Callable[[], float]
) -> Manifest:
    target.mkdir(parents=True, exist_ok=True)
    try:
        manifest = _whole(target, replace(draft, files=_collect(target, draft.files, {}, everything=not partial)))
    except RunError:
        with suppress(OSError):  # not empty
            target.rmdir()
        raise
    if (target / MANIFEST).exists():
        read_manifest(target)  # one that cannot be read is not written over
        check_ours([look_at(target.parent, draft.step)], ("foreign",))
    replacement.check_replaces(target.parent, target, manifest, clock)
    if durable:
        sync_tree(target)
        sync_folder(target.parent)
    with replacement.replacing(target.parent, target, manifest, clock) as replaced:
        try:
            write_manifest(target, manifest, durable=durable)
            replacement.check_unblocked(target.parent, target, replaced, manifest, clock)
        except Exception as error:
            take_back(error, lambda: _take_manifest_back(target, replaced, durable))
            raise
    return manifest


def _take_manifest_back(target: Path, replaced: Manifest | None, durable: bool) -> None:
    """Let the manifest be the one again that a commit in place has replaced; None: there was none."""
    if replaced is None:
        (target / MANIFEST).unlink(missing_ok=True)
        if durable:
            sync_folder(target)
    elif committed_manifest(target) != replaced:
        write_manifest(target, replaced, durable=durable)


def _link_reported(root: Path, staging: Path, draft: Manifest) -> Path:
    """Make a folder of links to the reported files, beside the staging folder, and return it."""
    folder = partial_staging_dir(root, draft.step, draft.attempt)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for entry in draft.files:
        source = staging / entry.path
        if source.exists():
            folders.link_or_copy(source, folder / entry.path, copy=entry.bytes < _COPY_BELOW)
    return folder


def _adopt(root: Path, target: Path, source: Path, draft: Manifest, partial: bool) -> dict[str, FileEntry]:
    """Link into `source` what an earlier commit of the step has and the new one does not bring.

    Returns the entries of the files that an earlier commit of this attempt had digested; it may lie beside. A folder
    without a manifest was written by parts that use verl's own paths. What others write into one with a manifest is
    left to `replacement`: they may not have done yet.
    """
    earlier: dict[str, FileEntry] = {}
    wanted = {entry.path for entry in draft.files}
    base = target
    ours = not (target / MANIFEST).exists()
    for folder in (target, step_dir(versions_dir(root, draft.attempt), draft.step)):
        found = committed_manifest(folder)
        if found is not None and found.attempt == draft.attempt:
            earlier, base, ours = {entry.path: entry for entry in found.files}, folder, False
            break
    if ours and not partial:
        wanted |= set(files_of(base))
    adopted = {}
    for path in earlier.keys() | wanted:
        if not (source / path).exists() and (base / path).is_file():
            folders.link_or_copy(base / path, source / path)
            if path in earlier:
                adopted[path] = earlier[path]
    return adopted


def _whole(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest. RunError: the file of a rank is neither reported nor in the folder."""
    missing = verl_folders.missing_files(folder, [entry.path for entry in manifest.files])
    if missing:
        raise RunError(f"{missing[0]} is missing from {folder}: a checkpoint needs the files of all ranks")
    return manifest


def _collect(
    folder: Path, reported: Collection[FileEntry], adopted: Mapping[str, FileEntry], *, everything: bool
) -> tuple[FileEntry, ...]:
    """Return the entries of all files that go into the commit. RunError where one is not there as reported."""
    entries = dict(adopted) | {entry.path: entry for entry in reported}
    for entry in entries.values():
        path = folder / entry.path
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "is not there" if size is None else f"has {size} bytes"
            raise RunError(f"{entry.path} was reported with {entry.bytes} bytes, but {found} in {folder}")
    for name in files_of(folder) if everything else ():
        if name not in entries:
            entries[name] = FileEntry(name, *digest_file(folder / name))
    return tuple(sorted(entries.values()))
