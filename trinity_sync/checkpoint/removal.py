"""Taking a checkpoint out of its place, such that one that somebody holds after all is put back and never lost.

Its folder leaves its place under a name that nobody deletes (``.condemned-...``). Only when it is seen to be what was
meant, and held by nobody, it becomes trash. A program that dies in between leaves the condemned folder and its claim to
`undo_unfinished`; retention decides again about what is back.

What was taken out is noted in ``.pruned``, for a resume that misses it: whoever deletes may be unable to tell the run.
"""

from __future__ import annotations

import errno
import secrets
from contextlib import suppress
from pathlib import Path

from trinity_sync.checkpoint import holds
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
from trinity_sync.protocol.parts import FULL

#: Notes of what was deleted, of the newest steps: a resume asks only for what is newer than what it found.
_MOST_NOTES = 1000


def remove_checkpoint(root: Path, manifest: Manifest, *, now: float) -> bool:
    """Put a checkpoint out of sight, for `store.purge`. False where somebody holds it, or it is another one by now.

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
            if holds.holders(root, manifest, now=now) or not _is(condemned, manifest):
                put_back(root, condemned)
                return False
            _note(root, manifest)
            condemned.rename(root / f"{TRASH_PREFIX}{target.name}-{secrets.token_hex(4)}")
        except FileNotFoundError:
            return False  # a monitor that started just now has put it back
        except BaseException:
            put_back(root, condemned)
            raise
    return True


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
    return set(_notes(root))


def forget_deletion(root: Path, step: int, attempt: int) -> None:
    """The step is committed again."""
    with suppress(OSError):
        (root / PRUNED / f"{step}-{attempt}").unlink()


def _note(root: Path, manifest: Manifest) -> None:
    """Note a deletion. It goes on where that cannot be done: a disk may be full, which the deletion mends."""
    if manifest.kind != FULL:
        return
    with suppress(OSError):
        (root / PRUNED).mkdir(exist_ok=True)
        (root / PRUNED / f"{manifest.step}-{manifest.attempt}").touch()
    for step, attempt in _notes(root)[:-_MOST_NOTES]:
        forget_deletion(root, step, attempt)


def _notes(root: Path) -> list[tuple[int, int]]:
    try:
        names = [path.name.partition("-") for path in (root / PRUNED).iterdir()]
    except OSError:
        return []
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
