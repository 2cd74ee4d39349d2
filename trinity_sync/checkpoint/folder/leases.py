"""Pins, leases and claims: small files by which those who need a checkpoint and those who delete it avoid each other.

A *pin* of a user stays until it is taken away. A *lease* of a reader ends by itself, so a reader that dies is in
nobody's way for long. Both belong to (step, attempt), so they do not protect what a resume writes under the same step
number later. A *claim* is of a program that is about to delete or replace the checkpoint.

Each side writes first and looks then. A reader writes its lease, waits until nobody has a claim, and looks whether the
checkpoint is still there. Who deletes writes a claim into the same folder, looks for leases and pins, and gives up
where there is one. So what is leased or pinned never moves, not for an instant, and no lock is needed, which some
network file systems do not have. A pin is written under a lease. The claim of a program that died ends by itself. A
commit that only adds to a checkpoint (`Manifest.extends`) takes nothing from a reader and asks nobody; like any other
it claims, until it is known to stay, but does without where it cannot.

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

from trinity_sync.checkpoint.folder.contents import (
    LEASES,
    PINS,
    STEP_PREFIX,
    VERSIONS,
    Manifest,
    ManifestError,
    key_of,
    read_manifest,
    step_dir,
    step_of,
)
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import make_folder, replace_file
from trinity_sync.host.locks import check_no_link
from trinity_sync.weights import lora

#: A checkpoint is moved in milliseconds. Who claimed one so many seconds ago is taken for dead.
_CLAIM_S = 30.0
#: Readers wait for longer than any claim lasts, the end of which is a whole second.
_CLAIM_ENDS_S = 2.0
_POLL_S = 0.01
_LEASE, _CLAIM = ".json", ".claim"
#: A pin or a lease is written in milliseconds. What is older and has not got its name was left by a writer that died.
_TORN_S = 600.0


def pin(root: Path, step: int, *, note: str = "", clock: Callable[[], float] = time.time) -> None:
    """Keep the checkpoint of a step whatever the retention policies say. Pinning it again changes the note.

    Args:
        root: the checkpoint folder.
        note: why it is kept, for people who look into the folder.
        clock: Unix seconds.

    Raises:
        ManifestError: there is no such checkpoint.
        RunError: it was deleted just now, or a link is in the place of the pins.
    """
    with lease_checkpoint(root, step, reader="a pin", seconds=_CLAIM_S, clock=clock) as lease:
        path = _pin_path(root, step, lease.attempt)
        make_folder(path.parent)
        new = not path.exists()
        body = {"step": step, "attempt": lease.attempt, "note": note, "created": clock()}
        replace_file(path, json.dumps(body))
        try:
            lease.renew(_CLAIM_S)  # which fails if it ran out before the pin was there
        except RunError:
            if new:
                path.unlink(missing_ok=True)
            raise


def unpin(root: Path, step: int) -> bool:
    """Remove the pin of a step's checkpoint; return whether there was one.

    Raises:
        ManifestError: there is no such checkpoint.
        RunError: a link is in the place of the pins.
    """
    manifest = read_manifest(step_dir(root, step))
    path = _pin_path(root, step, manifest.attempt)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def pinned(root: Path) -> set[tuple[int, int]]:
    """Return (step, attempt) of all pins."""
    return {key for path in _files(root / PINS, _LEASE) if (key := key_of(path.stem)) is not None}


def leased(root: Path, *, now: float) -> set[tuple[int, int]]:
    """Return (step, attempt) of all leases that have not expired, by Unix seconds; unlink those that have."""
    return {lease.key for lease in _leases(root, now)}


def blockers(root: Path, manifest: Manifest, *, now: float, successor: Manifest | None = None) -> list[str]:
    """Name those for whom a checkpoint has to stay, for people: "a pin" and the readers with a lease. Empty: nobody.

    Args:
        now: Unix seconds.
        successor: the checkpoint that has taken its place just now; leases that were taken on that are not counted.
    """
    key = (manifest.step, manifest.attempt)
    # Leases first: a pin is written under one, so that which is not seen among the leases is seen among the pins.
    readers = {
        lease.reader
        for lease in _leases(root, now)
        if lease.key == key and (successor is None or lease.manifest != successor.own_digest)
    }
    return [*(["a pin"] if key in pinned(root) else []), *sorted(readers)]


@contextmanager
def claimed(root: Path, manifest: Manifest, *, now: float) -> Iterator[bool]:
    """Claim a checkpoint for the length of the block, see `claim`; yield whether nobody has a pin or a lease on it."""
    with claim(root, manifest, now=now):
        yield not blockers(root, manifest, now=now)


@contextmanager
def claim(root: Path, manifest: Manifest, *, now: float) -> Iterator[None]:
    """Let nobody pin or lease a checkpoint within the block. Who has done so before, the caller asks `blockers`.

    For who deletes or replaces it, which has to be done in `_CLAIM_S` seconds: a claim that lasts longer counts for
    nothing, so ask `blockers` again before what cannot be taken back.

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
        _unlink(folder / name)


def make_leases_folder(root: Path) -> None:
    """Make the folder of leases and claims, for all who may write in the checkpoint folder, whatever our umask.

    Raises:
        OSError: it cannot be made, or is a link.
    """
    folder = check_no_link(root / LEASES)
    folder.mkdir(exist_ok=True)
    with suppress(OSError):  # the folder may be another user's, and closed to us
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


def _unlink(path: Path) -> None:
    """Unlink what has ended. Where that is refused, as for what belongs to another user, it stays and means nothing.
    Behind a link in the place of our folder are files of somebody else.
    """
    with suppress(OSError):
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)


def clean_claims(root: Path, *, now: float) -> set[tuple[int, int]]:
    """Unlink the claims that have ended by now (Unix seconds), those of programs that died; return (step, attempt) of
    the others.
    """
    found = set()
    for path in _files(root / LEASES, _CLAIM):
        name, _, ends = path.stem.rpartition("-")[0].rpartition("-")
        if (key := key_of(name)) is None:
            continue
        if ends.isdecimal() and int(ends) >= now:
            found.add(key)
        else:
            _unlink(path)
    return found


@dataclass(frozen=True, slots=True)
class _LeaseFile:
    """What the file of a lease says.

    Args:
        key: step and attempt of the leased checkpoint.
        manifest: the manifest's digest of itself, when the lease was taken; None where the file does not say.
    """

    key: tuple[int, int]
    reader: str
    manifest: str | None


def _clean_torn(root: Path, now: float) -> None:
    """Unlink what those left who died while they wrote a pin or a lease."""
    for path in (*(root / PINS).glob(".*.tmp"), *(root / LEASES).glob(".*.tmp")):
        with suppress(OSError):
            if path.stat().st_mtime < now - _TORN_S:
                _unlink(path)


def _leases(root: Path, now: float) -> Iterator[_LeaseFile]:
    _clean_torn(root, now)
    for path in _files(root / LEASES, _LEASE):
        if (key := key_of(path.stem.rpartition("-")[0])) is None:
            continue
        body: dict[str, object] = {}
        try:
            body, expires = _read_lease(path)
        except FileNotFoundError:
            continue
        except OSError:
            expires = now  # it cannot be read now, which is no reason to take it for less than it is
        if expires < now:
            _unlink(path)
        else:
            manifest = body.get("manifest")
            yield _LeaseFile(key, str(body.get("holder", "a reader")), None if manifest is None else str(manifest))


@dataclass(slots=True)
class CheckpointLease:
    """A reader's lease of one checkpoint; usable as a context manager, which releases it at the end.

    Args:
        path: the checkpoint's folder. It may be replaced by one that extends it, and by no other.
    """

    path: Path
    _manifest: Manifest
    _reader: str
    _clock: Callable[[], float]
    _file: Path | None = None
    _expires: float = -math.inf

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return self._manifest.step

    @property
    def attempt(self) -> int:
        """The attempt of the run that made the checkpoint."""
        return self._manifest.attempt

    def renew(self, seconds: float) -> None:
        """Let the lease end so many seconds from now.

        Raises:
            RunError: it had run out, and the checkpoint was deleted or replaced meanwhile, or is about to be.
        """
        if self._file is not None and self._clock() <= self._expires:
            self._write(self._file, seconds)
        else:
            self._take(seconds)

    def keep(self, seconds: float, *, renew_s: float) -> None:
        """Renew the lease where that was last done `renew_s` ago. To be called now and then while somebody reads."""
        if self._clock() > self._expires - seconds + renew_s:
            self.renew(seconds)

    def release(self) -> None:
        """End the lease; more than once does no harm."""
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
        body = {"holder": self._reader, "pid": os.getpid(), "manifest": manifest, "expires": expires}
        replace_file(file, json.dumps(body), durable=False)
        self._expires = expires

    def _wait_for_claims(self) -> None:
        limit_s = _CLAIM_S + _CLAIM_ENDS_S
        deadline = time.monotonic() + limit_s
        while (self.step, self.attempt) in clean_claims(self.path.parent, now=self._clock()):
            if time.monotonic() > deadline:
                raise RunError(
                    f"somebody has been about to delete the checkpoint of step {self.step} for {limit_s:.0f} s, so "
                    f"{self._reader} cannot have it"
                )
            time.sleep(_POLL_S)

    def _look(self) -> None:
        try:
            current = read_manifest(self.path)
        except ManifestError as error:
            if self.path.exists():
                raise
            fate = f"the checkpoint of step {self.step} was deleted while {self._reader} was about to hold it"
            raise RunError(fate) from error
        if not current.extends(self._manifest):
            raise RunError(f"the checkpoint of step {self.step} was replaced while {self._reader} was about to hold it")

    def __enter__(self) -> CheckpointLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lease_checkpoint(
    root: Path, step: int, *, reader: str, seconds: float, clock: Callable[[], float] = time.time
) -> CheckpointLease:
    """Lease the checkpoint of a step, so that it is neither deleted nor replaced while it is read.

    Args:
        root: the checkpoint folder.
        reader: who reads, for people who look into the folder.
        seconds: the lease ends by itself after so long; `CheckpointLease.renew` prolongs it.
        clock: Unix seconds.

    Raises:
        RunError: there is no such checkpoint, or it was deleted or replaced just now.
    """
    target = step_dir(root, step)
    lease = CheckpointLease(target, read_manifest(target), reader, clock)
    lease.renew(seconds)
    return lease


def _pin_path(root: Path, step: int, attempt: int) -> Path:
    folder = root / PINS
    if folder.is_symlink():
        raise RunError(f"{folder} is a link, and what it leads to would be changed; delete the link")
    return folder / f"{step}-{attempt}{_LEASE}"


def _read_lease(path: Path) -> tuple[dict[str, object], float]:
    """Return what the file of a lease says, and when it ends, in Unix seconds."""
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


# Where weights and a model's config are read from, and where they may be written to. Needs no torch.


_CONFIG = "config.json"


def weights_folder(folder: Path) -> Path:
    """Return the folder that has the files of weights: ``actor`` of a step folder, else the folder itself."""
    return folder / "actor" if (folder / "actor").is_dir() else folder


def find_config(folder: Path) -> Path | None:
    """Find the folder with the model's config and tokenizer; None where there is none.

    Weights-only checkpoints have none of their own: then it is that of the nearest other step, or the model that the
    run made and started from.
    """
    place = weights_folder(folder).absolute()
    candidates = [place / "huggingface", place / "model" / "huggingface", place]
    run, others = _others(place)
    if run is not None:
        candidates += [other / below for other in others for below in ("huggingface", "model/huggingface")]
        candidates.append(run / "model")
    return next((path for path in candidates if (path / _CONFIG).is_file()), None)


def find_adapter_config(folder: Path) -> Path | None:
    """Find the ``adapter_config.json`` of a LoRA adapter: its own, or that of the nearest other step."""
    place = weights_folder(folder).absolute()
    candidates = [place, *_others(place)[1]]
    return next((path / lora.CONFIG_FILE for path in candidates if (path / lora.CONFIG_FILE).is_file()), None)


def _others(place: Path) -> tuple[Path | None, list[Path]]:
    """Return the folder of the run that has a step, and ``actor`` of its other steps, the nearest first.

    Args:
        place: the step's folder of weights. None, and none: it is in no step.
    """
    step = place.parent if place.name == "actor" else place
    number = step_of(step.name)
    if number is None:
        return None, []
    beside = step.parent.parent
    root = beside.parent if beside.name == VERSIONS else step.parent
    others = {of: path for path in root.glob(f"{STEP_PREFIX}*") if (of := step_of(path.name)) is not None}
    nearest = sorted(others, key=lambda of: (abs(of - number), of))
    return root.parent, [others[of] / "actor" for of in nearest]


def check_free(output: Path) -> None:
    """Check that a folder may be written at this place.

    Raises:
        ConfigError: something is there already, but for an empty folder, or the folder above may not be written to.
    """
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; name a folder that is not there yet")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; name a folder that is not there yet")
    above = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{output} cannot be made: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{output} cannot be made: nothing may be written to {above}")
