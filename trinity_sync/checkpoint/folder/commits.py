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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint.folder import catalog, contents, leases
from trinity_sync.checkpoint.folder.catalog import check_ours, committed_manifest, files_of, look_at, places
from trinity_sync.checkpoint.folder.contents import (
    MANIFEST,
    REPLACED_PREFIX,
    Manifest,
    ManifestError,
    UnreadableError,
    abandoned_dir,
    partial_staging_dir,
    read_manifest,
    staging_dir,
    step_dir,
    step_of,
    versions_dir,
    write_manifest,
)
from trinity_sync.checkpoint.folder.deletion import delete_folder, delete_trashed, move_to_trash, unlink_note
from trinity_sync.errors import RunError, take_back
from trinity_sync.host.durable import digest_file, sync_folder, sync_tree, walk
from trinity_sync.protocol.parts import FULL, FileEntry, covers

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
    check_replaces(place, target, manifest, clock)
    if durable:
        sync_tree(source)
    write_manifest(source, manifest, durable=durable)
    publish(place, source, target, manifest, clock)
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
            contents.link_or_copy(source, folder / entry.path, copy=entry.bytes < _COPY_BELOW)
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
            contents.link_or_copy(base / path, source / path)
            if path in earlier:
                adopted[path] = earlier[path]
    return adopted


def _whole(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest. RunError: the file of a rank is neither reported nor in the folder."""
    missing = catalog.missing_files(folder, [entry.path for entry in manifest.files])
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


# What may take the place of a checkpoint, and how it does: all of the old or all of the new is there at any time.


def publish(place: Path, source: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Make `source` visible as `target`. What is there goes, unless somebody has pinned or leased it.

    Args:
        place: the checkpoint folder, or the one for weights beside it.
        source: the folder to be made visible.
        target: the step folder.
        manifest: what the manifest in `source` says.
        clock: Unix seconds.

    Raises:
        RunError: as `check_replaces`; or somebody has come to pin or lease what was there. It is in its place again.
        OSError: the disk refused; likewise.
    """
    if (target / MANIFEST).exists() and committed_manifest(target) is None:
        # It cannot be read, or not now: nobody knows what it is worth.
        target.rename(abandoned_dir(place, manifest.step, None))
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
    """Check that a commit may take the place of what is visible at `target`.

    Raises:
        RunError: it may not take the place of this, or not now.
    """
    visible = committed_manifest(target)
    if visible is None or manifest.extends(visible):
        return
    if not covers(manifest.kind, visible.kind):
        raise _refused(target, visible, manifest, "which weights alone do not replace")
    if names := leases.blockers(place, visible, now=clock()):
        raise _refused(target, visible, manifest, f"held by {', '.join(names)}")


@contextmanager
def replacing(place: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> Iterator[Manifest | None]:
    """Yield what a commit takes the place of; None: nothing that was a checkpoint.

    Within the block nobody comes to pin or lease that, nor the new one, which may have to go again. Where that cannot
    be ensured, only what takes nothing from anybody goes on.

    Raises:
        RunError: as `check_replaces`.
        UnreadableError: nobody knows what is there.
        OSError: readers cannot be kept from what goes.
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
    """Check that nobody has pinned or leased what a commit has taken the place of.

    Our claim may have run out, because this program was stopped for a while.

    Raises:
        RunError: somebody has.
    """
    if replaced is not None and (names := _blockers_of(place, replaced, manifest, clock)):
        raise _refused(target, replaced, manifest, f"held by {', '.join(names)} since just now")


def finish_renames(root: Path, aside: Path, clock: Callable[[], float]) -> None:
    """End a replacement by two renames.

    It is taken back where the second had not happened, or where what was to go is leased or pinned.
    """
    target = root / aside.name.removeprefix(REPLACED_PREFIX)
    replaced, manifest = committed_manifest(aside), committed_manifest(target)
    if replaced is not None and manifest is not None and _blockers_of(root, replaced, manifest, clock):
        _bring_others(target, manifest.paths, aside)
        delete_folder(root, target)
    if not target.exists():
        aside.rename(target)
    elif manifest is not None:
        delete_trashed(_trash_or_abandon(root, aside, manifest))
    else:  # nobody knows what it is worth
        step = step_of(target.name)
        assert step is not None, aside
        aside.rename(abandoned_dir(root, step, None))


def finish_exchange(root: Path, staging: Path, clock: Callable[[], float]) -> None:
    """Do what a crash right after an exchange has left undone.

    The exchange is taken back where what was to go is leased or pinned; else that goes. What cannot be read now may be
    that, too, and is set aside.
    """
    try:
        staged = read_manifest(staging)
    except UnreadableError:
        step = staging.name.partition("-")[0]
        if step.isdecimal():
            staging.rename(abandoned_dir(root, int(step), None))
        return
    except ManifestError:
        return
    for place in places(root):
        target = step_dir(place, staged.step)
        visible = committed_manifest(target)
        if visible is None:
            continue
        if staging not in [of(root, visible.step, visible.attempt) for of in (staging_dir, partial_staging_dir)]:
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
    """Make `source` visible as `target`; return where that is now which was there; None: nothing was."""
    if not target.exists():
        source.rename(target)
        return None
    if contents.exchange(source, target):
        return source
    aside = place / f"{REPLACED_PREFIX}{target.name}"
    target.rename(aside)
    try:
        source.rename(target)
    except Exception as error:
        take_back(error, partial(aside.rename, target))
        raise
    return aside


def _put_back(source: Path, target: Path, aside: Path | None, manifest: Manifest) -> None:
    """Undo `_change_places`. What others wrote stays with the step."""
    if aside == source:
        contents.exchange(source, target)
    else:
        target.rename(source)
        if aside is not None:
            aside.rename(target)
    _bring_others(source, manifest.paths, target)
    sync_folder(target.parent)


def _trash_or_abandon(place: Path, aside: Path, successor: Manifest) -> Path | None:
    """Trash what a commit has taken the place of, or set it aside.

    Files of others stay with the step. A full checkpoint that has files which the new one lacks, and what cannot be
    read, are set aside as ``abandoned-*``.

    Returns:
        What is in the trash now, to be deleted; None: it was set aside.
    """
    # Before the old one goes, else a power cut could bring back its name without its files. A commit does this within
    # its claim, though it may be slow: while it can fail the new one may have to go again, so nobody is to lease that
    # yet. Should it last longer than the claim, readers get the new one, and lose it only if the disk then fails, too.
    sync_folder(place)
    replaced = committed_manifest(aside)
    if replaced is None and (aside / MANIFEST).exists():
        aside.rename(abandoned_dir(place, successor.step, None))
        return None
    target = step_dir(place, successor.step)
    listed = replaced.paths if replaced is not None else set()
    _bring_others(aside, listed, target)
    if replaced is not None and replaced.kind == FULL and not listed <= successor.paths:
        aside.rename(abandoned_dir(place, successor.step, replaced.attempt))
        return None
    return move_to_trash(place, aside)


def _bring_others(source: Path, listed: Collection[str], target: Path) -> None:
    """Let what others wrote into `source`, which its manifest does not list, be in `target`. Where it cannot be linked
    it moves: a copy would take its time, and miss what they write after it. Files behind a link are not ours to move.
    """
    if source.is_symlink() or target.is_symlink():
        return
    for path in set(files_of(source)).difference(listed):
        if not (source / path).is_file() or (target / path).exists():
            continue
        if not contents.link(source / path, target / path):
            (source / path).rename(target / path)


def _replaced(aside: Path) -> Manifest | None:
    """Read the manifest of what a commit has taken the place of; None: it was no checkpoint.

    Raises:
        UnreadableError: it cannot be read now, so nobody knows whose leases and pins it has.
    """
    try:
        return read_manifest(aside)
    except UnreadableError:
        raise
    except ManifestError:
        return None


def _blockers_of(place: Path, replaced: Manifest, manifest: Manifest, clock: Callable[[], float]) -> list[str]:
    """Name those who have pinned or leased a checkpoint whose place another one has taken, and lose by it."""
    extended = manifest.extends(replaced)
    return [] if extended else leases.blockers(place, replaced, now=clock(), successor=manifest)


def _refused(target: Path, visible: Manifest, manifest: Manifest, reason: str) -> RunError:
    return RunError(
        f"step {manifest.step} cannot be committed as {manifest.kind} by attempt {manifest.attempt}: {target} is a "
        f"{visible.kind} checkpoint of attempt {visible.attempt}, {reason}"
    )
