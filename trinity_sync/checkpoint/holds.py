"""Pins of users and leases of readers: small files that keep a checkpoint from being deleted.

A pin stays until it is taken away. A lease ends by itself, so a reader that dies holds nothing up for long. Both belong
to (step, attempt), so what a resume writes under the same step number later is not held by them.

How a reader and a deletion stay out of each other's way: the reader writes its lease and *then* looks whether the
checkpoint is still there; the deletion renames the folder and *then* looks for leases, and renames it back for one.
A commit that puts another checkpoint in its place goes the same way; one that only adds to it (`Manifest.extends`)
takes nothing from a reader and asks nobody.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trinity_sync.checkpoint.layout import LEASES, PINS, Manifest, read_manifest, step_dir, write_atomic
from trinity_sync.errors import RunError


def pin(root: Path, step: int, *, note: str = "", clock: Callable[[], float] = time.time) -> None:
    """Keep the checkpoint of this step whatever the policies say. Pinning it again changes the note.

    Raises:
        ManifestError: there is no such checkpoint.
    """
    manifest = read_manifest(step_dir(root, step))
    folder = root / PINS
    folder.mkdir(exist_ok=True)
    body = {"step": step, "attempt": manifest.attempt, "note": note, "created": clock()}
    write_atomic(folder / f"{step}-{manifest.attempt}.json", json.dumps(body))


def unpin(root: Path, step: int) -> bool:
    """Take the pin away; False where there was none."""
    manifest = read_manifest(step_dir(root, step))
    path = root / PINS / f"{step}-{manifest.attempt}.json"
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def pinned(root: Path) -> set[tuple[int, int]]:
    """(step, attempt) of all pins."""
    return {held for path in _files(root / PINS) if (held := _held(path.stem)) is not None}


def leased(root: Path, *, now: float) -> set[tuple[int, int]]:
    """(step, attempt) of all leases that have not expired; expired ones are removed on the way."""
    return {note.held for note in _leases(root, now)}


def holders(root: Path, manifest: Manifest, *, now: float, successor: Manifest | None = None) -> list[str]:
    """Who holds a checkpoint, for people; empty: nobody.

    Args:
        successor: has taken its place just now; leases that were taken on that one are not counted.
    """
    held = (manifest.step, manifest.attempt)
    readers = {
        note.holder
        for note in _leases(root, now)
        if note.held == held and (successor is None or note.manifest != successor.own_digest)
    }
    return [*(["a pin"] if held in pinned(root) else []), *sorted(readers)]


@dataclass(frozen=True, slots=True)
class _Note:
    """What a lease says. `manifest`: the own digest of what it was taken on, None where it does not say."""

    held: tuple[int, int]
    holder: str
    manifest: str | None


def _leases(root: Path, now: float) -> Iterator[_Note]:
    for path in _files(root / LEASES):
        held = _held(path.stem.rpartition("-")[0])
        body: dict[str, object] = {}
        try:
            body = dict(json.loads(path.read_text(encoding="utf-8")))
            expires = float(str(body["expires"]))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            # A lease is written in one step, so this is no reader of ours; let it go with its age.
            expires = path.stat().st_mtime if path.exists() else 0.0
        if expires < now:
            path.unlink(missing_ok=True)
        elif held is not None:
            manifest = body.get("manifest")
            yield _Note(held, str(body.get("holder", "a reader")), None if manifest is None else str(manifest))


@dataclass(slots=True)
class CheckpointLease:
    """A reader's hold on one checkpoint; usable as a context manager, which releases it at the end.

    Args:
        path: the checkpoint's folder. It may be replaced by one that extends it, and by no other.
    """

    path: Path
    step: int
    attempt: int
    _file: Path
    _holder: str
    _manifest: str
    _clock: Callable[[], float]

    def renew(self, seconds: float) -> None:
        """Hold it for so long from now."""
        expires = self._clock() + seconds
        body = {"holder": self._holder, "pid": os.getpid(), "manifest": self._manifest, "expires": expires}
        write_atomic(self._file, json.dumps(body), durable=False)

    def release(self) -> None:
        """Let it go; more than once does no harm."""
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> CheckpointLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lease_checkpoint(
    root: Path, step: int, *, holder: str, seconds: float, clock: Callable[[], float] = time.time
) -> CheckpointLease:
    """Hold the checkpoint of a step for reading.

    Args:
        holder: who reads, for people who look into the folder.
        seconds: the hold ends by itself after so long; `CheckpointLease.renew` prolongs it.

    Raises:
        RunError: there is no such checkpoint, or it was deleted just now.
    """
    target = step_dir(root, step)
    manifest = read_manifest(target)
    (root / LEASES).mkdir(exist_ok=True)
    file = root / LEASES / f"{step}-{manifest.attempt}-{secrets.token_hex(8)}.json"
    lease = CheckpointLease(target, step, manifest.attempt, file, holder, manifest.own_digest, clock)
    lease.renew(seconds)
    try:
        current = read_manifest(target)
    except RunError as error:
        lease.release()
        raise RunError(f"the checkpoint of step {step} was deleted while {holder} was about to read it") from error
    if not current.extends(manifest):
        lease.release()
        raise RunError(f"the checkpoint of step {step} was replaced while {holder} was about to read it")
    return lease


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith(".")) if folder.is_dir() else []


def _held(stem: str) -> tuple[int, int] | None:
    step, _, attempt = stem.partition("-")
    return (int(step), int(attempt)) if step.isdecimal() and attempt.isdecimal() else None
