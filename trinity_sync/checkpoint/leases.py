"""Pins of users and leases of readers: small files that keep a checkpoint from being deleted or replaced.

A pin stays until it is taken away. A lease ends by itself, so a reader that dies holds nothing up for long. Both belong
to (step, attempt), so what a resume writes under the same step number later is not held by them.

How a holder and one who takes a checkpoint away stay out of each other's way: each writes first and looks then. The
holder writes its lease, waits until nobody has a *claim*, and looks whether the checkpoint is still there. The other
one writes a claim into the same folder, and looks for leases and pins: for one of them it gives up. So what is held
never moves, not for an instant, and no lock is needed, which some network file systems do not have. A pin is written
under a lease. The claim of one that died ends by itself. A commit that only adds to a checkpoint (`Manifest.extends`)
takes nothing from a reader and asks nobody; like any other it claims, until it is known to stay, but does without where
it cannot.

Readers may be other users than the one who writes: who may write in the checkpoint folder may write in that of the
leases, whoever of them makes it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trinity_sync.checkpoint.layout import (
    LEASES,
    PINS,
    Manifest,
    ManifestError,
    read_manifest,
    step_dir,
    write_atomic,
)
from trinity_sync.errors import RunError
from trinity_sync.host.durable import make_folder

#: Who takes a checkpoint away is done in milliseconds. After so many seconds it is taken for dead.
_CLAIM_S = 30.0
#: Readers wait for longer than any claim lasts, the end of which is a whole second.
_CLAIM_ENDS_S = 2.0
_POLL_S = 0.01
_LEASE, _CLAIM = ".json", ".claim"
#: A pin or a lease is written in milliseconds. What is older and has not got its name was left by a writer that died.
_TORN_S = 600.0


def pin(root: Path, step: int, *, note: str = "", clock: Callable[[], float] = time.time) -> None:
    """Keep the checkpoint of this step whatever the policies say. Pinning it again changes the note.

    Raises:
        ManifestError: there is no such checkpoint.
        RunError: it was deleted just now.
    """
    with lease_checkpoint(root, step, holder="a pin", seconds=_CLAIM_S, clock=clock) as lease:
        path = _pin_path(root, step, lease.attempt)
        make_folder(path.parent)
        new = not path.exists()
        body = {"step": step, "attempt": lease.attempt, "note": note, "created": clock()}
        write_atomic(path, json.dumps(body))
        try:
            lease.renew(_CLAIM_S)  # which fails if it ran out before the pin was there
        except RunError:
            if new:
                path.unlink(missing_ok=True)
            raise


def unpin(root: Path, step: int) -> bool:
    """Take the pin away; False where there was none."""
    manifest = read_manifest(step_dir(root, step))
    path = _pin_path(root, step, manifest.attempt)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def pinned(root: Path) -> set[tuple[int, int]]:
    """(step, attempt) of all pins."""
    return {held for path in _files(root / PINS, _LEASE) if (held := _held(path.stem)) is not None}


def leased(root: Path, *, now: float) -> set[tuple[int, int]]:
    """(step, attempt) of all leases that have not expired; expired ones are removed on the way."""
    return {note.held for note in _leases(root, now)}


def holders(root: Path, manifest: Manifest, *, now: float, successor: Manifest | None = None) -> list[str]:
    """Who holds a checkpoint, for people; empty: nobody.

    Args:
        successor: has taken its place just now; leases that were taken on that one are not counted.
    """
    held = (manifest.step, manifest.attempt)
    # Leases first: a pin is written under one, so that which is not seen among the leases is seen among the pins.
    readers = {
        note.holder
        for note in _leases(root, now)
        if note.held == held and (successor is None or note.manifest != successor.own_digest)
    }
    return [*(["a pin"] if held in pinned(root) else []), *sorted(readers)]


@contextmanager
def claimed(root: Path, manifest: Manifest, *, now: float) -> Iterator[bool]:
    """Whether nobody holds the checkpoint; if so, nobody gets a hold on it before the block ends. See `claim`."""
    with claim(root, manifest, now=now):
        yield not holders(root, manifest, now=now)


@contextmanager
def claim(root: Path, manifest: Manifest, *, now: float) -> Iterator[None]:
    """Within the block nobody gets a hold on the checkpoint; who has one, the caller has to look at.

    For who deletes or replaces it, which has to be done in `_CLAIM_S` seconds: a claim that lasts longer counts for
    nothing, so look at `holders` again before what cannot be taken back.

    Args:
        now: Unix seconds.

    Raises:
        OSError: nothing can be written to the folder of the leases.
    """
    folder = root / LEASES
    name = f"{manifest.step}-{manifest.attempt}-{math.ceil(now + _CLAIM_S)}-{secrets.token_hex(8)}{_CLAIM}"
    try:
        try:
            make_leases_folder(root)
            (folder / name).touch()
        except OSError as error:
            reason = f"{error.strerror}, so readers cannot be kept from the checkpoint of step {manifest.step}"
            raise OSError(error.errno, reason, str(folder)) from error
        yield
    finally:
        _remove(folder / name)


def make_leases_folder(root: Path) -> None:
    """Make the folder of leases and claims, for all who may write in the checkpoint folder, whatever our umask.

    Raises:
        OSError: it cannot be made.
    """
    folder = root / LEASES
    folder.mkdir(exist_ok=True)
    with suppress(OSError):  # somebody else's, which may not be looked into, or a link
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _share(descriptor, root.stat())
        finally:
            os.close(descriptor)


def _share(descriptor: int, above: os.stat_result) -> None:
    """Let a folder of ours be open to those to whom the one above it is."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        return
    allowed = above.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISGID | stat.S_ISVTX)
    if found.st_gid != above.st_gid:
        try:
            os.fchown(descriptor, -1, above.st_gid)
        except OSError:  # we are not of that group; to ours the folder above is open as it is to others
            allowed = allowed & ~(stat.S_IRWXG | stat.S_ISGID) | (allowed & stat.S_IRWXO) << 3
    mode = stat.S_IMODE(found.st_mode)
    if allowed & ~mode:
        os.fchmod(descriptor, mode | allowed)


def _remove(path: Path) -> None:
    """Remove what has ended. Where that is refused, as for what belongs to another user, it stays and means nothing."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def clean_claims(root: Path, *, now: float) -> None:
    """Remove what programs that died had claimed. Those that may live keep their claim until it ends."""
    for path in _files(root / LEASES, _CLAIM):
        if _ends(path) < now:
            _remove(path)


def _ends(claim: Path) -> float:
    expires = claim.stem.rpartition("-")[0].rpartition("-")[2]
    return int(expires) if expires.isdecimal() else 0.0


@dataclass(frozen=True, slots=True)
class _Note:
    """What a lease says. `manifest`: the own digest of what it was taken on, None where it does not say."""

    held: tuple[int, int]
    holder: str
    manifest: str | None


def _clean_torn(root: Path, now: float) -> None:
    """Remove what those left who died while they wrote a pin or a lease."""
    for path in (*(root / PINS).glob(".*.tmp"), *(root / LEASES).glob(".*.tmp")):
        with suppress(OSError):
            if path.stat().st_mtime < now - _TORN_S:
                path.unlink()


def _leases(root: Path, now: float) -> Iterator[_Note]:
    _clean_torn(root, now)
    for path in _files(root / LEASES, _LEASE):
        held = _held(path.stem.rpartition("-")[0])
        body: dict[str, object] = {}
        try:
            body, expires = _read_lease(path)
        except FileNotFoundError:
            continue
        except OSError:
            expires = now  # it cannot be read now, which is no reason to take it for less than it is
        if expires < now:
            _remove(path)
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
    _manifest: Manifest
    _holder: str
    _clock: Callable[[], float]
    _file: Path | None = None
    _expires: float = -math.inf

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self._manifest.step

    @property
    def attempt(self) -> int:
        """Of the checkpoint."""
        return self._manifest.attempt

    def renew(self, seconds: float) -> None:
        """Hold it for so long from now.

        Raises:
            RunError: it had run out, and the checkpoint was deleted meanwhile.
        """
        if self._file is not None and self._clock() <= self._expires:
            self._write(self._file, seconds)
        else:
            self._take(seconds)

    def release(self) -> None:
        """Let it go; more than once does no harm."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _take(self, seconds: float) -> None:
        # Under a new name: whoever saw the old one run out may be about to remove it.
        self.release()
        name = f"{self.step}-{self.attempt}-{secrets.token_hex(8)}{_LEASE}"
        self._file = self.path.parent / LEASES / name
        try:
            make_leases_folder(self.path.parent)
            self._write(self._file, seconds)
            self._wait_for_claims()
            self._look()
        except BaseException:
            self.release()
            raise

    def _write(self, file: Path, seconds: float) -> None:
        expires = self._clock() + seconds
        manifest = self._manifest.own_digest
        body = {"holder": self._holder, "pid": os.getpid(), "manifest": manifest, "expires": expires}
        write_atomic(file, json.dumps(body), durable=False)
        self._expires = expires

    def _wait_for_claims(self) -> None:
        limit_s = _CLAIM_S + _CLAIM_ENDS_S
        deadline = time.monotonic() + limit_s
        while self._is_claimed():
            if time.monotonic() > deadline:
                raise RunError(
                    f"somebody has been about to delete the checkpoint of step {self.step} for {limit_s:.0f} s, so "
                    f"{self._holder} cannot have it"
                )
            time.sleep(_POLL_S)

    def _is_claimed(self) -> bool:
        now = self._clock()
        for path in _files(self.path.parent / LEASES, _CLAIM):
            if _ends(path) < now:
                _remove(path)
            elif _held(path.stem.rpartition("-")[0].rpartition("-")[0]) == (self.step, self.attempt):
                return True
        return False

    def _look(self) -> None:
        try:
            current = read_manifest(self.path)
        except ManifestError as error:
            if self.path.exists():
                raise
            fate = f"the checkpoint of step {self.step} was deleted while {self._holder} was about to hold it"
            raise RunError(fate) from error
        if not current.extends(self._manifest):
            raise RunError(f"the checkpoint of step {self.step} was replaced while {self._holder} was about to hold it")

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
    lease = CheckpointLease(target, read_manifest(target), holder, clock)
    lease.renew(seconds)
    return lease


def _pin_path(root: Path, step: int, attempt: int) -> Path:
    return root / PINS / f"{step}-{attempt}{_LEASE}"


def _read_lease(path: Path) -> tuple[dict[str, object], float]:
    """What it says, and when it ends."""
    try:
        body = dict(json.loads(path.read_text(encoding="utf-8")))
        return body, float(body["expires"])
    except (ValueError, KeyError, TypeError):
        # A lease is written in one step, so this is no reader of ours; let it go with its age.
        return {}, path.stat().st_mtime


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return sorted(path for path in paths if path.suffix == suffix and not path.name.startswith("."))


def _held(stem: str) -> tuple[int, int] | None:
    step, _, attempt = stem.partition("-")
    return (int(step), int(attempt)) if step.isdecimal() and attempt.isdecimal() else None
