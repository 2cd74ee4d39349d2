"""Makes a step visible as a checkpoint. The monitor calls it, through `disk`.

The commit of a folder, in this order, so that a crash leaves either the old checkpoint or all of the new one:

1. check the files that the parts reported (there, of that size); digest those that they did not report;
2. hard-link the files of an earlier commit of the step (its weights) into the folder;
3. fsync all files and folders, then write and fsync the manifest;
4. make the folder visible with one rename; a step that is visible already is replaced.

Trackers move after that, and old checkpoints are deleted last. Files that were written straight into the step folder,
as verl does, are committed there: writing the manifest is the commit.

Weights whose place has a checkpoint that they must not replace are committed next to it (`contents.versions_dir`), for
the readers of their run.

Files that no manifest lists belong to other programs: a full commit takes in those that are there with its attempt's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint.folder import catalog, contents, leases
from trinity_sync.checkpoint.folder.catalog import check_ours, committed_manifest, files_of, look_at, places
from trinity_sync.checkpoint.folder.contents import (
    Manifest,
    ManifestError,
    NoManifestError,
    UnreadableError,
    read_manifest,
    write_manifest,
)
from trinity_sync.checkpoint.folder.deletion import delete_folder, delete_trashed, move_to_trash, unlink_note
from trinity_sync.errors import RunError, take_back
from trinity_sync.host.durable import digest_file, sync_folder, sync_tree, walk
from trinity_sync.protocol.parts import FULL, STATE_DICT, FileEntry, covers

# Files up to this size are copied, not linked, while parts are still being written: a writer that rewrites a small
# common file (a config) must not change the committed one.
_COPY_BELOW = 1 << 20

# States of folders that a commit never replaces, leased or not.
_NOT_OURS = ("newer", "verl", "unreadable", "foreign")


def prepare_staging(root: Path, step: int, attempt: int) -> Path:
    """Create and return the folder into which the parts of a step are written."""
    folder = contents.staging_dir(root, step, attempt)
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
    """Make a step visible; see the module's docstring for the order. May be called again after a crash. Raises
    RunError, OSError. Returns the manifest that was written, with all files. Times are Unix seconds.
    """
    place = contents.versions_dir(root, draft.attempt) if beside else root
    target = contents.step_dir(place, draft.step)
    staging = contents.staging_dir(root, draft.step, draft.attempt)
    if not beside:
        unlink_note(root, draft.step, draft.attempt)
    if not any(files_of(staging)):
        if beside:
            raise RunError(
                f"weights of step {draft.step} were not written to {staging}, and they must not take the place of the "
                f"checkpoint in {contents.step_dir(root, draft.step)}"
            )
        return _commit_in_place(target, draft, partial, durable, clock)
    place.mkdir(parents=True, exist_ok=True)
    if target.exists():
        check_ours([look_at(place, draft.step)], _NOT_OURS)
    source = _link_reported(root, staging, draft) if partial else staging
    adopted = _adopt(root, target, source, draft, partial)
    manifest = _whole(source, replace(draft, files=_collect(source, draft.files, adopted, everything=not partial)))
    check_replaces(place, target, manifest, clock)
    if durable:
        sync_tree(source)
    write_manifest(source, manifest, durable=durable)
    publish(place, source, target, manifest, clock)
    return manifest


def taken(root: Path, step: int, attempt: int) -> bool:
    """Return whether the place of staged weights has a checkpoint that this program must not replace."""
    target = contents.step_dir(root, step)
    staged = target.exists() and any(files_of(contents.staging_dir(root, step, attempt)))
    return staged and look_at(root, step).state in _NOT_OURS


def keep_weights(folder: Path, target: Path, *, durable: bool) -> None:
    """Make another folder the weights-only checkpoint of a committed step, with links to its files. It stays when the
    step is replaced, set aside or deleted. What is there of an earlier call is replaced.
    """
    try:
        _link_weights(folder, target, durable)
    except (FileNotFoundError, NoManifestError):  # without an atomic exchange, while a full checkpoint replaces it
        time.sleep(1.0)
        _link_weights(folder, target, durable)


def _link_weights(folder: Path, target: Path, durable: bool) -> None:
    manifest = read_manifest(folder)
    files = tuple(entry for entry in manifest.files if entry.path.startswith(contents.WEIGHTS))
    draft = target.with_name(f".{target.name}")
    for earlier in (draft, target):
        shutil.rmtree(earlier, ignore_errors=True)
    for entry in files:
        contents.link_or_copy(folder / entry.path, draft / entry.path)
    if durable:
        sync_tree(draft)
    write_manifest(draft, replace(manifest, kind=STATE_DICT, files=files))
    draft.rename(target)
    if durable:
        sync_folder(target.parent)


def adopt_folder(root: Path, source: Path, step: int) -> None:
    """Make a complete folder from elsewhere the checkpoint of a step, durably. An existing one becomes
    ``abandoned-*``.
    """
    for parent, _ in walk(source):
        sync_folder(parent)
    target = contents.step_dir(root, step)
    if target.exists():
        info = look_at(root, step)
        check_ours([info], ("newer", "foreign"))
        target.rename(contents.abandoned_dir(root, step, info.attempt))
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
    if (target / contents.MANIFEST).exists():
        read_manifest(target)  # an unreadable manifest is not overwritten
        check_ours([look_at(target.parent, draft.step)], ("foreign",))
    check_replaces(target.parent, target, manifest, clock)
    if durable:
        sync_tree(target)
        sync_folder(target.parent)
    with replacing(target.parent, target, manifest, clock) as replaced:
        try:
            write_manifest(target, manifest, durable=durable)
            check_unblocked(target.parent, target, replaced, manifest, clock)
        except Exception as error:
            take_back(error, lambda: _take_manifest_back(target, replaced, durable))
            raise
    return manifest


def _take_manifest_back(target: Path, replaced: Manifest | None, durable: bool) -> None:
    """Restore the manifest that a commit in place has replaced; None: there was none."""
    if replaced is None:
        (target / contents.MANIFEST).unlink(missing_ok=True)
        if durable:
            sync_folder(target)
    elif committed_manifest(target) != replaced:
        write_manifest(target, replaced, durable=durable)


def _link_reported(root: Path, staging: Path, draft: Manifest) -> Path:
    """Make a folder of links to the reported files, next to the staging folder, and return it."""
    folder = contents.partial_staging_dir(root, draft.step, draft.attempt)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for entry in draft.files:
        source = staging / entry.path
        if source.exists():
            contents.link_or_copy(source, folder / entry.path, copy=entry.bytes < _COPY_BELOW)
    return folder


def _adopt(root: Path, target: Path, source: Path, draft: Manifest, partial: bool) -> dict[str, FileEntry]:
    """Link the files that an earlier commit of the step has and the new one does not bring into `source`.

    Return the entries of the files that an earlier commit of this attempt has digested; it may be in `versions_dir`. A
    folder without a manifest has files of parts that write to verl's own paths. Other programs' files in a folder with
    a manifest are moved by the replacement, as they may still be written.
    """
    earlier: dict[str, FileEntry] = {}
    wanted = {entry.path for entry in draft.files}
    base = target
    ours = not (target / contents.MANIFEST).exists()
    for folder in (target, contents.step_dir(contents.versions_dir(root, draft.attempt), draft.step)):
        found = committed_manifest(folder)
        if found is not None and found.attempt == draft.attempt:
            earlier, base, ours = {entry.path: entry for entry in found.files}, folder, False
            break
    if ours and not partial:
        wanted |= set(files_of(base))
    adopted = {}
    for path in earlier.keys() | wanted:
        if not (source / path).exists() and (base / path).is_file():
            contents.link_or_copy(base / path, source / path)
            if path in earlier:
                adopted[path] = earlier[path]
    return adopted


def _whole(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest. Raises RunError if a rank's file is neither reported nor in the folder."""
    missing = catalog.missing_files(folder, [entry.path for entry in manifest.files])
    if missing:
        raise RunError(f"{missing[0]} is missing from {folder}: a checkpoint needs the files of all ranks")
    return manifest


def _collect(
    folder: Path, reported: Collection[FileEntry], adopted: Mapping[str, FileEntry], *, everything: bool
) -> tuple[FileEntry, ...]:
    """Return the entries of all files of the commit. Raises RunError if one is not there as reported."""
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


# Replacing a visible checkpoint: all of the old or all of the new one is there at any time.


def publish(place: Path, source: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Make `source` visible as `target`, in place of an earlier checkpoint, unless that is pinned or leased. Raises
    RunError, OSError. Times are Unix seconds.
    """
    if (target / contents.MANIFEST).exists() and committed_manifest(target) is None:
        # It cannot be read, so its worth is not known.
        target.rename(contents.abandoned_dir(place, manifest.step, None))
    with replacing(place, target, manifest, clock):
        aside = _change_places(place, source, target)
        trash = None
        try:
            if aside is None:
                sync_folder(place)
            else:
                check_unblocked(place, target, _replaced(aside), manifest, clock)
                trash = _trash_or_abandon(place, aside, manifest)
        except Exception as error:
            take_back(error, partial(_put_back, source, target, aside, manifest))
            raise
    delete_trashed(trash)


def check_replaces(place: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Check that a commit may replace the checkpoint at `target`. Raises RunError if not, or not now."""
    visible = committed_manifest(target)
    if visible is None or manifest.extends(visible):
        return
    if not covers(manifest.kind, visible.kind):
        raise _refused(target, visible, manifest, "which weights alone do not replace")
    if names := leases.blockers(place, visible, now=clock()):
        raise _refused(target, visible, manifest, f"held by {', '.join(names)}")


@contextmanager
def replacing(place: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> Iterator[Manifest | None]:
    """Yield the manifest of the checkpoint that a commit replaces; None: there is none.

    Inside the block neither the old nor the new checkpoint can be pinned or leased, as the new one may have to be
    removed again. If that cannot be ensured, only a commit that extends the old checkpoint goes on. Raises RunError,
    UnreadableError, OSError.
    """
    visible = _replaced(target)
    takes = visible is not None and not manifest.extends(visible)
    now = clock()
    with ExitStack() as claims:
        for claimed in {of.attempt: of for of in (visible, manifest) if of is not None}.values():
            try:
                claims.enter_context(leases.claim(place, claimed, now=now))
            except OSError:
                if takes:
                    raise
        check_replaces(place, target, manifest, clock)
        yield visible


def check_unblocked(
    place: Path, target: Path, replaced: Manifest | None, manifest: Manifest, clock: Callable[[], float]
) -> None:
    """Check again that the replaced checkpoint is not pinned or leased: our claim may have expired while this program
    was stopped. Raises RunError.
    """
    if replaced is not None and (names := _blockers_of(place, replaced, manifest, clock)):
        raise _refused(target, replaced, manifest, f"held by {', '.join(names)} since just now")


def finish_renames(root: Path, aside: Path, clock: Callable[[], float]) -> None:
    """Finish a replacement by two renames after a crash. It is undone if the second rename is missing, or if the old
    checkpoint is leased or pinned.
    """
    target = root / aside.name.removeprefix(contents.REPLACED_PREFIX)
    replaced, manifest = committed_manifest(aside), committed_manifest(target)
    if replaced is not None and manifest is not None and _blockers_of(root, replaced, manifest, clock):
        _bring_others(target, manifest.paths, aside)
        delete_folder(root, target)
    if not target.exists():
        aside.rename(target)
    elif manifest is not None:
        delete_trashed(_trash_or_abandon(root, aside, manifest))
    else:  # its worth is not known
        step = contents.step_of(target.name)
        assert step is not None, aside
        aside.rename(contents.abandoned_dir(root, step, None))


def finish_exchange(root: Path, staging: Path, clock: Callable[[], float]) -> None:
    """Finish a replacement by an exchange after a crash.

    It is undone if the old checkpoint is leased or pinned; else the old one is deleted. One that cannot be read now may
    be leased, and is set aside.
    """
    try:
        staged = read_manifest(staging)
    except UnreadableError:
        step = staging.name.partition("-")[0]
        if step.isdecimal():
            staging.rename(contents.abandoned_dir(root, int(step), None))
        return
    except ManifestError:
        return
    for place in places(root):
        target = contents.step_dir(place, staged.step)
        visible = committed_manifest(target)
        if visible is None:
            continue
        if staging not in [
            of(root, visible.step, visible.attempt) for of in (contents.staging_dir, contents.partial_staging_dir)
        ]:
            continue
        if (staged.attempt, staged.created) >= (visible.attempt, visible.created):
            continue
        if _blockers_of(place, staged, visible, clock):
            contents.exchange(staging, target)
            _bring_others(staging, visible.paths, target)
        else:
            delete_trashed(_trash_or_abandon(place, staging, visible))
        return


def _change_places(place: Path, source: Path, target: Path) -> Path | None:
    """Make `source` visible as `target`; return the new path of the old folder; None: there was none."""
    if not target.exists():
        source.rename(target)
        return None
    if contents.exchange(source, target):
        return source
    aside = place / f"{contents.REPLACED_PREFIX}{target.name}"
    target.rename(aside)
    try:
        source.rename(target)
    except Exception as error:
        take_back(error, partial(aside.rename, target))
        raise
    return aside


def _put_back(source: Path, target: Path, aside: Path | None, manifest: Manifest) -> None:
    """Undo `_change_places`. Other programs' files stay with the step."""
    if aside == source:
        contents.exchange(source, target)
    else:
        target.rename(source)
        if aside is not None:
            aside.rename(target)
    _bring_others(source, manifest.paths, target)
    sync_folder(target.parent)


def _trash_or_abandon(place: Path, aside: Path, successor: Manifest) -> Path | None:
    """Move a replaced checkpoint to the trash, or set it aside as ``abandoned-*``: a full checkpoint with files that
    the new one lacks, or one that cannot be read. Other programs' files stay with the step. Returns the trashed folder,
    to be deleted; None: it was set aside.
    """
    # Before the old checkpoint is deleted, or a power cut could bring back its name without its files. This happens
    # within the claim, although it may be slow: while it can fail, the new checkpoint may have to be removed, so it
    # must not be leased yet. If it outlasts the claim, readers get the new one and lose it only if the disk then fails
    # too.
    sync_folder(place)
    replaced = committed_manifest(aside)
    if replaced is None and (aside / contents.MANIFEST).exists():
        aside.rename(contents.abandoned_dir(place, successor.step, None))
        return None
    target = contents.step_dir(place, successor.step)
    listed = replaced.paths if replaced is not None else set()
    _bring_others(aside, listed, target)
    if replaced is not None and replaced.kind == FULL and not listed <= successor.paths:
        aside.rename(contents.abandoned_dir(place, successor.step, replaced.attempt))
        return None
    return move_to_trash(place, aside)


def _bring_others(source: Path, listed: Collection[str], target: Path) -> None:
    """Move other programs' files, which the manifest of `source` does not list, to `target`. They are linked; where
    that is not possible they move, since a copy would miss later writes. Files behind a link are left alone.
    """
    if source.is_symlink() or target.is_symlink():
        return
    for path in set(files_of(source)).difference(listed):
        if not (source / path).is_file() or (target / path).exists():
            continue
        if not contents.link(source / path, target / path):
            (source / path).rename(target / path)


def _replaced(aside: Path) -> Manifest | None:
    """Read the manifest of a replaced folder; None: it was no checkpoint. Raises UnreadableError if that cannot be told
    now.
    """
    try:
        return read_manifest(aside)
    except UnreadableError:
        raise
    except ManifestError:
        return None


def _blockers_of(place: Path, replaced: Manifest, manifest: Manifest, clock: Callable[[], float]) -> list[str]:
    """Return the pins and leases of a replaced checkpoint that the replacement violates."""
    extended = manifest.extends(replaced)
    return [] if extended else leases.blockers(place, replaced, now=clock(), successor=manifest)


def _refused(target: Path, visible: Manifest, manifest: Manifest, reason: str) -> RunError:
    return RunError(
        f"step {manifest.step} cannot be committed as {manifest.kind} by attempt {manifest.attempt}: {target} is a "
        f"{visible.kind} checkpoint of attempt {visible.attempt}, {reason}"
    )
