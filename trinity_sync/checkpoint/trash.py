"""Deleting folders: with one rename out of sight (``.trash-...``), and piece by piece after that.

One word for each: to *prune* is to delete what no retention policy keeps (`prune`); to *trash* is to put out of sight,
and the trash is *emptied* to free the bytes; to *delete* is both; to *clean* is to delete what is left over of
something unfinished or over (`recovery`); to *unlink* is to remove a file. A checkpoint that somebody may read or have
pinned is trashed by `deletion`, once nobody does.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from trinity_sync.checkpoint.layout import TRASH_PREFIX
from trinity_sync.host.durable import sync_folder


def delete_folder(root: Path, path: Path) -> None:
    """Delete a folder that nobody else uses."""
    delete_trashed(move_to_trash(root, path))


def move_to_trash(root: Path, path: Path, *, name: str | None = None) -> Path:
    """Put a folder out of sight; return where it is now.

    Args:
        path: the folder.
        name: the name of what is in it, for people; None: the folder's own.
    """
    trash = root / f"{TRASH_PREFIX}{name or path.name}-{secrets.token_hex(4)}"
    path.rename(trash)
    return trash


def delete_trashed(trash: Path | None) -> None:
    """Free the bytes of one folder that is out of sight, where there is one; what resists is left to `empty_trash`."""
    if trash is not None:
        with suppress(OSError):
            _free(trash)


def empty_trash(root: Path) -> list[str]:
    """Free the bytes of all that is out of sight; a folder that resists does not stop the others.

    Returns:
        What went wrong.
    """
    problems: list[str] = []
    trash = list(root.glob(f"{TRASH_PREFIX}*"))
    if trash:
        sync_folder(root)  # else a power cut could bring back the name of a checkpoint without its files
    for path in trash:
        try:
            _free(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} could not be removed: {error}")
    return problems


def _free(trash: Path) -> None:
    if trash.is_symlink():  # to an archived checkpoint, which stays where it is
        trash.unlink()
    else:
        shutil.rmtree(trash)
