"""Taking a checkpoint out of its place, such that one that somebody needs after all is put back and never lost.

Its folder leaves its place under a name that nobody deletes (``.condemned-...``). Only when it is seen to be what was
meant, and neither pinned nor leased, it becomes trash. A program that dies in between leaves the condemned folder and
its claim to `undo_deletions`; retention decides again about what is back.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trinity_sync.checkpoint.folder import catalog, leases
from trinity_sync.checkpoint.folder.catalog import committed_manifest
from trinity_sync.checkpoint.folder.contents import (
    CONDEMNED_PREFIX,
    PRUNED,
    TRASH_PREFIX,
    Base,
    Manifest,
    abandoned_dir,
    key_of,
    step_dir,
    step_of,
)
from trinity_sync.errors import take_back
from trinity_sync.host.durable import replace_file, sync_folder
from trinity_sync.host.locks import check_no_link
from trinity_sync.protocol.parts import FULL, KINDS, STATE_DICT, Kind, covers


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
    return manifest.kind == STATE_DICT and catalog.wrote_over(folder, manifest.paths)


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


# What was deleted on purpose, noted in ``.pruned``: whoever deletes may be unable to tell the run.


#: Notes of the newest steps of each kind are kept: a resume asks only for what is newer than what it found.
_MOST_NOTES = 1000
_SUFFIX: dict[Kind, str] = {FULL: "", STATE_DICT: ".weights"}


class Deletion(NamedTuple):
    """What is noted of a deleted checkpoint: its kind, the version digest of its weights, its size in bytes, and of an
    adapter its base.
    """

    kind: Kind
    digest: str | None
    nbytes: int
    base: Base | None


def note_deletion(root: Path, manifest: Manifest) -> None:
    """Note a deletion. It goes on where that cannot be done: a disk may be full, which the deletion mends."""
    with suppress(OSError):
        check_no_link(root / PRUNED).mkdir(exist_ok=True)
        path = _note_path(root, manifest.step, manifest.attempt, manifest.kind)
        noted: dict[str, object] = {"digest": manifest.digest, "bytes": manifest.bytes}
        if manifest.base is not None:
            noted["base"] = manifest.base.to_json()
        try:
            replace_file(path, json.dumps(noted), durable=False)
        except OSError:
            path.touch(exist_ok=False)  # its name says the most, and has room on a full disk
    for step, attempt in _notes(root, manifest.kind)[:-_MOST_NOTES]:
        _unlink(root, step, attempt, manifest.kind)


def noted_deletions(root: Path) -> set[tuple[int, int]]:
    """Return (step, attempt) of the newest full checkpoints that were deleted on purpose and not committed again."""
    return set(_notes(root, FULL))


def read_deletion(root: Path, step: int, attempt: int, kind: Kind) -> Deletion | None:
    """Read what is noted of a checkpoint of at least this kind that was deleted and not committed again; else None."""
    for of in KINDS:
        if covers(of, kind):
            with suppress(OSError, ValueError, KeyError, TypeError):
                noted = json.loads(_note_path(root, step, attempt, of).read_text(encoding="utf-8"))
                base = Base.from_json(noted["base"]) if "base" in noted else None
                return Deletion(of, noted["digest"], int(noted["bytes"]), base)
    return None


def unlink_note(root: Path, step: int, attempt: int) -> None:
    """Remove what is noted of a checkpoint's deletion, because it is committed again."""
    for kind in KINDS:
        _unlink(root, step, attempt, kind)


def unlink_notes(root: Path, attempt: int) -> None:
    """Remove what is noted of this attempt or a later one, when the attempt begins: it is of an earlier run."""
    for kind in KINDS:
        for step, of in _notes(root, kind):
            if of >= attempt:
                _unlink(root, step, of, kind)


def _note_path(root: Path, step: int, attempt: int, kind: Kind) -> Path:
    return root / PRUNED / f"{step}-{attempt}{_SUFFIX[kind]}"


def _unlink(root: Path, step: int, attempt: int, kind: Kind) -> None:
    with suppress(OSError):
        check_no_link(root / PRUNED)
        _note_path(root, step, attempt, kind).unlink()


def _notes(root: Path, kind: Kind) -> list[tuple[int, int]]:
    try:
        paths = [path for path in (root / PRUNED).iterdir() if path.suffix == _SUFFIX[kind]]
    except OSError:
        return []
    return sorted(key for path in paths if (key := key_of(path.stem)) is not None)


# Deleting folders: with one rename out of sight (``.trash-...``), and piece by piece after that.


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
