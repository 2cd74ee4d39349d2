"""What was deleted on purpose, noted in ``.pruned``: whoever deletes may be unable to tell the run.

For a resume that misses a checkpoint, and for who asks how its commit went when the monitor has forgotten it. A
checkpoint that is committed again has no note any more.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trinity_sync.checkpoint.layout import PRUNED, Manifest, key_of
from trinity_sync.checkpoint.manifest_fields import Base
from trinity_sync.host.durable import replace_file
from trinity_sync.host.locks import check_no_link
from trinity_sync.protocol.parts import FULL, KINDS, STATE_DICT, Kind, covers

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
