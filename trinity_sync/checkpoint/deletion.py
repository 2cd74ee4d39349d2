"""Taking a checkpoint out of its place, such that one that somebody needs after all is put back and never lost.

Its folder leaves its place under a name that nobody deletes (``.condemned-...``). Only when it is seen to be what was
meant, and neither pinned nor leased, it becomes trash. A program that dies in between leaves the condemned folder and
its claim to `undo_deletions`; retention decides again about what is back.
"""

from __future__ import annotations

import errno
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint import leases, verl_folders
from trinity_sync.checkpoint.catalog import committed_manifest
from trinity_sync.checkpoint.deletion_notes import note_deletion
from trinity_sync.checkpoint.layout import CONDEMNED_PREFIX, Manifest, abandoned_dir, step_dir, step_of
from trinity_sync.checkpoint.trash import move_to_trash
from trinity_sync.errors import take_back
from trinity_sync.protocol.parts import STATE_DICT


def trash_checkpoint(root: Path, manifest: Manifest, *, now: float) -> bool:
    """Put a checkpoint out of sight; `trash.empty_trash` then frees its bytes.

    Args:
        root: the checkpoint folder, or a folder of weights beside it.
        manifest: the checkpoint that is to go.
        now: Unix seconds.

    Returns:
        False where it stays: somebody has pinned or leased it, or another one is in its place by now, or verl's own.
    """
    target = step_dir(root, manifest.step)
    with leases.claimed(root, manifest, now=now) as free:
        if not free:
            return False
        condemned = root / f"{CONDEMNED_PREFIX}{secrets.token_hex(4)}-{target.name}"
        try:
            target.rename(condemned)
        except FileNotFoundError:
            return False
        try:
            # Needed after all: our claim had run out, because this program was stopped for a while.
            if leases.blockers(root, manifest, now=now) or not _is(condemned, manifest) or of_verl(condemned, manifest):
                _put_back(root, condemned)
                return False
            note_deletion(root, manifest)
            move_to_trash(root, condemned, name=target.name)
        except FileNotFoundError:
            return False  # a monitor that started just now has put it back
        except BaseException as error:
            take_back(error, partial(_put_back, root, condemned))
            raise
    return True


def of_verl(folder: Path, manifest: Manifest) -> bool:
    """Return whether verl has saved in full, or has begun to, where these weights had been committed alone."""
    return manifest.kind == STATE_DICT and verl_folders.wrote_over(folder, manifest.paths)


def _put_back(root: Path, condemned: Path) -> None:
    """Let a condemned checkpoint be in its place again; where its place is taken by now, as an ``abandoned-*`` one."""
    name = condemned.name.removeprefix(CONDEMNED_PREFIX).partition("-")[2]
    step = step_of(name)
    try:
        condemned.rename(root / name)
    except FileNotFoundError:
        return  # somebody else has put it back
    except OSError as error:
        if step is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with suppress(FileNotFoundError):
            manifest = committed_manifest(condemned)
            condemned.rename(abandoned_dir(root, step, manifest.attempt if manifest is not None else None))


def undo_deletions(root: Path, *, now: float) -> None:
    """Put back what programs that died had condemned. One that lives finds it put back, or looks again."""
    leases.clean_claims(root, now=now)
    for path in root.glob(f"{CONDEMNED_PREFIX}*"):
        _put_back(root, path)


def _is(folder: Path, manifest: Manifest) -> bool:
    found = committed_manifest(folder)
    return found is not None and found.own_digest == manifest.own_digest
