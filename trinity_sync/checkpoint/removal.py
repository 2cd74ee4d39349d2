"""Taking a checkpoint out of its place, such that one that somebody holds after all is put back and never lost.

Its folder leaves its place under a name that nobody deletes (``.condemned-...``). Only when it is seen to be what was
meant, and held by nobody, it becomes trash. A program that dies in between leaves the condemned folder and its claim to
`undo_unfinished`; retention decides again about what is back.

What was taken out is noted in ``.pruned``, for a resume that misses it, and for who asks how its commit went when the
monitor has forgotten it: whoever deletes may be unable to tell the run.
"""

from __future__ import annotations

import errno
import json
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trinity_sync.checkpoint import holds, verls
from trinity_sync.checkpoint.layout import (
    CONDEMNED_PREFIX,
    PRUNED,
    TRASH_PREFIX,
    Manifest,
    ManifestError,
    abandoned_dir,
    read_manifest,
    step_dir,
    step_of,
)
from trinity_sync.errors import take_back
from trinity_sync.protocol.parts import FULL, KINDS, STATE_DICT, Kind, covers

#: Notes of what was deleted, of the newest steps of each kind: a resume asks only for what is newer than what it found.
_MOST_NOTES = 1000
_SUFFIX: dict[Kind, str] = {FULL: "", STATE_DICT: ".weights"}


def remove_checkpoint(root: Path, manifest: Manifest, *, now: float) -> bool:
    """Put a checkpoint out of sight, for `store.purge`. False where somebody holds it, or it is another one by now, or
    verl's.

    Args:
        manifest: what is to go.
        now: Unix seconds.
    """
    target = step_dir(root, manifest.step)
    with holds.claimed(root, manifest, now=now) as free:
        if not free:
            return False
        condemned = root / f"{CONDEMNED_PREFIX}{secrets.token_hex(4)}-{target.name}"
        try:
            target.rename(condemned)
        except FileNotFoundError:
            return False
        try:
            # Held after all: our claim had run out, because this program was stopped for a while.
            if holds.holders(root, manifest, now=now) or not _is(condemned, manifest) or of_verl(condemned, manifest):
                put_back(root, condemned)
                return False
            _note(root, manifest)
            condemned.rename(root / f"{TRASH_PREFIX}{target.name}-{secrets.token_hex(4)}")
        except FileNotFoundError:
            return False  # a monitor that started just now has put it back
        except BaseException as error:
            take_back(error, partial(put_back, root, condemned))
            raise
    return True


def of_verl(folder: Path, manifest: Manifest) -> bool:
    """Whether verl has saved in full, or has begun to, where these weights had been committed alone."""
    return manifest.kind == STATE_DICT and verls.wrote_over(folder, manifest.paths)


def put_back(root: Path, condemned: Path) -> None:
    """Let a condemned checkpoint be one again; where its place is taken by now, as an ``abandoned-*`` one."""
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
            condemned.rename(abandoned_dir(root, step, _attempt(condemned)))


def undo_unfinished(root: Path, *, now: float) -> None:
    """Put back what programs that died had condemned. One that lives finds it put back, or looks again."""
    holds.drop_claims(root, now=now)
    for path in root.glob(f"{CONDEMNED_PREFIX}*"):
        put_back(root, path)


def deleted(root: Path) -> set[tuple[int, int]]:
    """(step, attempt) of the full checkpoints that were deleted on purpose and not committed again; of very many the
    newest.
    """
    return set(_notes(root, FULL))


def deletion(root: Path, step: int, attempt: int, kind: Kind) -> dict[str, Any] | None:
    """What is noted of a checkpoint of at least this kind that was deleted and not committed again: its `kind`,
    `digest` and `bytes`. None: nothing.
    """
    for of in KINDS:
        if covers(of, kind):
            with suppress(OSError, ValueError, KeyError, TypeError):
                noted = json.loads(_note_path(root, step, attempt, of).read_text(encoding="utf-8"))
                return {"kind": of, "digest": noted["digest"], "bytes": int(noted["bytes"])}
    return None


def forget_deletion(root: Path, step: int, attempt: int) -> None:
    """The step is committed again."""
    for kind in KINDS:
        _remove_note(root, step, attempt, kind)


def forget_deletions(root: Path, attempt: int) -> None:
    """An attempt begins: what is noted of one of its number, or of a later one, is of an earlier run."""
    for kind in KINDS:
        for step, of in _notes(root, kind):
            if of >= attempt:
                _remove_note(root, step, of, kind)


def _note(root: Path, manifest: Manifest) -> None:
    """Note a deletion. It goes on where that cannot be done: a disk may be full, which the deletion mends."""
    with suppress(OSError):
        (root / PRUNED).mkdir(exist_ok=True)
        path = _note_path(root, manifest.step, manifest.attempt, manifest.kind)
        path.write_text(json.dumps({"digest": manifest.digest, "bytes": manifest.bytes}), encoding="utf-8")
    for step, attempt in _notes(root, manifest.kind)[:-_MOST_NOTES]:
        _remove_note(root, step, attempt, manifest.kind)


def _note_path(root: Path, step: int, attempt: int, kind: Kind) -> Path:
    return root / PRUNED / f"{step}-{attempt}{_SUFFIX[kind]}"


def _remove_note(root: Path, step: int, attempt: int, kind: Kind) -> None:
    with suppress(OSError):
        _note_path(root, step, attempt, kind).unlink()


def _notes(root: Path, kind: Kind) -> list[tuple[int, int]]:
    try:
        paths = [path for path in (root / PRUNED).iterdir() if path.suffix == _SUFFIX[kind]]
    except OSError:
        return []
    names = [path.stem.partition("-") for path in paths]
    return sorted((int(step), int(attempt)) for step, _, attempt in names if step.isdecimal() and attempt.isdecimal())


def _is(folder: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder).own_digest == manifest.own_digest
    except ManifestError:
        return False


def _attempt(folder: Path) -> int | None:
    try:
        return read_manifest(folder).attempt
    except ManifestError:
        return None
