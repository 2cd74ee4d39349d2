"""Puts a checkpoint folder in order after a crash: finishes or undoes half-done work, and removes leftovers.

To *clean* a part of the folder is to delete files in it that are not needed any more: staged files, or weights next to
the step folders. `deletion` and `commits` undo their own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from trinity_sync.checkpoint.folder import catalog, contents
from trinity_sync.checkpoint.folder.catalog import places, scan
from trinity_sync.checkpoint.folder.commits import finish_exchange, finish_renames
from trinity_sync.checkpoint.folder.deletion import delete_folder, empty_trash, trash_checkpoint, undo_deletions
from trinity_sync.errors import RunError


def recover(
    root: Path,
    *,
    keep: Collection[tuple[int, int]] = (),
    attempt: int | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Finish or undo deletions and replacements, and clean staged files. Raises RunError if one of our folders is a
    link. Nothing has been changed then. `attempt`: the one that goes on, whose deltas stay; None: none does. `clock`:
    Unix seconds, for the expiry of leases.
    """
    if not root.is_dir():
        return
    _check_links(root)
    undo_deletions(root, now=clock())
    for place in places(root):
        for path in place.glob(f"{contents.REPLACED_PREFIX}*"):
            finish_renames(place, path, clock)
    kept = {contents.staging_dir(root, step, attempt).name for step, attempt in keep}
    for path in (root / contents.STAGING).iterdir() if (root / contents.STAGING).is_dir() else ():
        if path.is_dir():
            finish_exchange(root, path, clock)
        if path.is_dir() and path.name not in kept:
            delete_folder(root, path)
        elif path.is_file() and path.stem not in kept:
            path.unlink(missing_ok=True)
    clean_versions(root, attempt=attempt, now=clock())
    if attempt is None:
        _clean_deltas(root)
    for name in (*contents.TRACKERS.values(), contents.COMMITTED):
        for path in root.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)
    empty_trash(root)


def _clean_deltas(root: Path) -> None:
    """Delete the deltas of ended attempts, whose versions no explorer holds. The history of a run stays."""
    deltas, kept = root / contents.DELTAS, catalog.history(root)
    if deltas.is_dir() and not kept:
        delete_folder(root, deltas)
    for path in deltas.glob("*"):
        if path.is_dir() and contents.key_of(path.name) not in kept:
            delete_folder(root, path)
        for inner in path.glob("full-*"):  # of killed explorers
            delete_folder(root, inner)


def _check_links(root: Path) -> None:
    """Refuse links in place of our folders: deleting behind one would delete another folder's files."""
    folders = [root / name for name in (contents.STAGING, contents.VERSIONS, contents.DELTAS)]
    inner = [path for folder in folders for path in folder.glob("*")]
    for path in [*folders, *inner, root / contents.LEASES, root / contents.PRUNED]:
        if path.is_symlink():
            raise RunError(f"{path} is a link, and its target would be deleted; delete the link")


def finish_replacements(root: Path) -> None:
    """Put back checkpoints that a crash left out of their place during a replacement or a deletion. Deletes nothing.
    The caller has locked the folder.
    """
    undo_deletions(root, now=time.time())
    for path in root.glob(f"{contents.REPLACED_PREFIX}*"):
        target = root / path.name.removeprefix(contents.REPLACED_PREFIX)
        if not target.exists():
            path.rename(target)


def clean_staging(root: Path, step: int, attempt: int, *, clock: Callable[[], float] = time.time) -> None:
    """Delete the staged files of a step, except those that a failed commit has put there."""
    for path in (contents.staging_dir(root, step, attempt), contents.partial_staging_dir(root, step, attempt)):
        if path.is_dir():
            finish_exchange(root, path, clock)
        if path.is_dir():
            delete_folder(root, path)
    contents.journal_path(root, step, attempt).unlink(missing_ok=True)


def clean_versions(
    root: Path, *, attempt: int | None = None, keep: Callable[[int], bool] = lambda step: True, now: float
) -> None:
    """Delete weights next to the step folders; leased ones stay until the next call. Raises RunError: see `recover`.
    Times are Unix seconds.
    """
    _check_links(root)
    running = contents.versions_dir(root, attempt) if attempt is not None else None
    for place in sorted((root / contents.VERSIONS).iterdir()) if (root / contents.VERSIONS).is_dir() else ():
        for info in scan(place):
            if info.manifest is None:
                delete_folder(place, info.path)
            elif place != running or not keep(info.step):
                trash_checkpoint(place, info.manifest, now=now)
        empty_trash(place)
        if place != running and not scan(place):
            delete_folder(root, place)
    with suppress(OSError):  # not empty, or missing
        (root / contents.VERSIONS).rmdir()
