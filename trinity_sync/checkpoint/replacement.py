"""What may take the place of a checkpoint, and how it does: all of the old or all of the new is there at any time.

What may, whoever made it: one that extends it (`Manifest.extends`), always; another one where nobody has pinned or
leased it; weights alone never that of a full one.

The two folders change places in one call, or by two renames where the file system cannot. What was there goes then: it
is trashed, or set aside as ``abandoned-*`` where it has more than the new one does. After a crash in between `recovery`
has it finished here, or taken back.

Files that no manifest lists belong to others (verl writes ``data.pt`` into the step folder when it comes to it). They
stay with the step: what was written since the new folder was made is linked into it before the old one goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint import folders, leases
from trinity_sync.checkpoint.catalog import committed_manifest, files_of, places
from trinity_sync.checkpoint.layout import (
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
)
from trinity_sync.checkpoint.trash import delete_folder, delete_trashed, move_to_trash
from trinity_sync.errors import RunError, take_back
from trinity_sync.host.durable import sync_folder
from trinity_sync.protocol.parts import FULL, covers


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
            folders.exchange(staging, target)
            _bring_others(staging, visible.paths, target)
        else:
            delete_trashed(_trash_or_abandon(place, staging, visible))
        return


def _change_places(place: Path, source: Path, target: Path) -> Path | None:
    """Make `source` visible as `target`; return where that is now which was there; None: nothing was."""
    if not target.exists():
        source.rename(target)
        return None
    if folders.exchange(source, target):
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
        folders.exchange(source, target)
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
        if not folders.link(source / path, target / path):
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
