"""Pins, leases and claims: small files that protect a checkpoint in use from deletion and replacement.

A user's *pin* stays until it is removed. A reader's *lease* expires, so a dead reader does not block deletion for long.
Both belong to (step, attempt), so they do not protect a later checkpoint of the same step number. A *claim* belongs to
a program that is about to delete or replace the checkpoint.

Each side writes first and then looks. A reader writes its lease, waits until there is no claim, and checks that the
checkpoint is still there. A deleting program writes its claim into the same folder, looks for leases and pins, and
gives up if there is one. So a leased or pinned checkpoint never moves, and no lock is needed, which some network file
systems do not have. A pin is written under a lease. The claim of a dead program expires. A commit that only adds to a
checkpoint (`Manifest.extends`) does not affect readers: it claims too, but goes on without a claim if it has to.

Readers may be other users: whoever may write in the checkpoint folder may write in that of the leases.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trinity_sync.checkpoint.folder import contents
from trinity_sync.checkpoint.folder.contents import Manifest, ManifestError, read_manifest
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import make_folder, replace_file
from trinity_sync.host.locks import check_no_link
from trinity_sync.weights import lora

# Expiry of a claim, seconds: a checkpoint is moved in milliseconds, so the owner of an older claim has died.
_CLAIM_S = 30.0
# Readers wait longer than any claim lasts, whose expiry is in whole seconds.
_CLAIM_ENDS_S = 2.0
_POLL_S = 0.01
_LEASE, _CLAIM = ".json", ".claim"
# A pin or lease is written in milliseconds; an older temporary file is of a writer that has died.
_TORN_S = 600.0


def pin(root: Path, step: int, *, note: str = "", clock: Callable[[], float] = time.time) -> None:
    """Keep the checkpoint of a step regardless of retention. Pinning it again changes the note. `clock`: Unix seconds.
    Raises ManifestError: there is no such checkpoint.
    """
    with lease_checkpoint(root, step, reader="a pin", seconds=_CLAIM_S, clock=clock) as lease:
        path = _pin_path(root, step, lease.attempt)
        make_folder(path.parent)
        new = not path.exists()
        body = {"step": step, "attempt": lease.attempt, "note": note, "created": clock()}
        replace_file(path, json.dumps(body))
        try:
            lease.renew(_CLAIM_S)  # fails if it expired before the pin was written
        except RunError:
            if new:
                path.unlink(missing_ok=True)
            raise


def unpin(root: Path, step: int) -> bool:
    """Remove the pin of a step's checkpoint; return whether there was one. Raises ManifestError: there is no such
    checkpoint.
    """
    manifest = read_manifest(contents.step_dir(root, step))
    path = _pin_path(root, step, manifest.attempt)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def pinned(root: Path) -> set[tuple[int, int]]:
    """Return (step, attempt) of all pins."""
    return {key for path in _files(root / contents.PINS, _LEASE) if (key := contents.key_of(path.stem)) is not None}


def leased(root: Path, *, now: float) -> set[tuple[int, int]]:
    """Return (step, attempt) of all leases that are valid at `now` (Unix seconds); delete expired ones."""
    return {lease.key for lease in _leases(root, now)}


def blockers(root: Path, manifest: Manifest, *, now: float, successor: Manifest | None = None) -> list[str]:
    """Return the reasons why a checkpoint has to stay, for people: "a pin" and the readers with a lease. Times are Unix
    seconds.
    """
    key = (manifest.step, manifest.attempt)
    # Leases first: a pin is written under a lease, so one of the two is seen.
    readers = {
        lease.reader
        for lease in _leases(root, now)
        if lease.key == key and (successor is None or lease.manifest != successor.own_digest)
    }
    return [*(["a pin"] if key in pinned(root) else []), *sorted(readers)]


@contextmanager
def claimed(root: Path, manifest: Manifest, *, now: float) -> Iterator[bool]:
    """Claim a checkpoint inside the block, see `claim`; yield whether it has neither pins nor leases."""
    with claim(root, manifest, now=now):
        yield not blockers(root, manifest, now=now)


@contextmanager
def claim(root: Path, manifest: Manifest, *, now: float) -> Iterator[None]:
    """Keep new pins and leases off a checkpoint inside the block. Ask `blockers` for earlier ones. Times are Unix
    seconds.

    The work has to be done in `_CLAIM_S` seconds: an older claim does not count, so ask `blockers` again before a step
    that cannot be undone. Raises OSError if the folder of leases cannot be written.
    """
    folder = root / contents.LEASES
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
    """Make the folder of leases and claims, writable for all who may write in the checkpoint folder, whatever our
    umask. Raises OSError if it cannot be made or is a link.
    """
    folder = check_no_link(root / contents.LEASES)
    folder.mkdir(exist_ok=True)
    with suppress(OSError):  # another user's folder may be closed to us
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _share(descriptor, root.stat())
        finally:
            os.close(descriptor)


def _share(descriptor: int, above: os.stat_result) -> None:
    """Give a folder of ours the permissions of the one above it."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        return
    allowed = above.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISGID | stat.S_ISVTX)
    if found.st_gid != above.st_gid:
        try:
            os.fchown(descriptor, -1, above.st_gid)
        except OSError:  # we are not in that group; other users keep the access of the folder above
            allowed = allowed & ~(stat.S_IRWXG | stat.S_ISGID) | (allowed & stat.S_IRWXO) << 3
    mode = stat.S_IMODE(found.st_mode)
    if allowed & ~mode:
        os.fchmod(descriptor, mode | allowed)


def _unlink(path: Path) -> None:
    """Delete an expired file. If that is refused, as for another user's file, it stays without effect. Nothing is
    deleted behind a link in place of our folder.
    """
    with suppress(OSError):
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)


def clean_claims(root: Path, *, now: float) -> set[tuple[int, int]]:
    """Delete claims that have expired at `now` (Unix seconds); return (step, attempt) of the others."""
    found = set()
    for path in _files(root / contents.LEASES, _CLAIM):
        name, _, ends = path.stem.rpartition("-")[0].rpartition("-")
        if (key := contents.key_of(name)) is None:
            continue
        if ends.isdecimal() and int(ends) >= now:
            found.add(key)
        else:
            _unlink(path)
    return found


@dataclass(frozen=True, slots=True)
class _LeaseFile:
    """The contents of a lease's file."""

    key: tuple[int, int]
    reader: str
    manifest: str | None


def _clean_torn(root: Path, now: float) -> None:
    """Delete the files of programs that died while they wrote a pin or a lease."""
    for path in (*(root / contents.PINS).glob(".*.tmp"), *(root / contents.LEASES).glob(".*.tmp")):
        with suppress(OSError):
            if path.stat().st_mtime < now - _TORN_S:
                _unlink(path)


def _leases(root: Path, now: float) -> Iterator[_LeaseFile]:
    _clean_torn(root, now)
    for path in _files(root / contents.LEASES, _LEASE):
        if (key := contents.key_of(path.stem.rpartition("-")[0])) is None:
            continue
        body: Mapping[str, object] = {}
        try:
            body, expires = _read_lease(path)
        except FileNotFoundError:
            continue
        except OSError:
            expires = now  # it cannot be read now, so it counts as valid
        if expires < now:
            _unlink(path)
        else:
            manifest = body.get("manifest")
            yield _LeaseFile(key, str(body.get("holder", "a reader")), None if manifest is None else str(manifest))


@dataclass(slots=True)
class CheckpointLease:
    """A reader's lease of one checkpoint; as a context manager, it is released at the end."""

    path: Path  # the checkpoint's folder. It may be replaced only by a checkpoint that extends it
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
        """The attempt that made the checkpoint."""
        return self._manifest.attempt

    @property
    def nbytes(self) -> int:
        """Size of the checkpoint's files."""
        return self._manifest.bytes

    def renew(self, seconds: float) -> None:
        """Set the expiry to so many seconds from now."""
        if self._file is not None and self._clock() <= self._expires:
            self._write(self._file, seconds)
        else:
            self._take(seconds)

    def keep(self, seconds: float, *, renew_s: float) -> None:
        """Renew the lease if the last renewal is `renew_s` ago. Call it repeatedly while reading."""
        if self._clock() > self._expires - seconds + renew_s:
            self.renew(seconds)

    def release(self) -> None:
        """End the lease; may be called again."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _take(self, seconds: float) -> None:
        # Under a new name: a program that saw the old lease expire may be about to delete its file.
        self.release()
        name = f"{self.step}-{self.attempt}-{secrets.token_hex(8)}{_LEASE}"
        self._file = self.path.parent / contents.LEASES / name
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
                    f"another program has been deleting the checkpoint of step {self.step} for {limit_s:.0f} s, so "
                    f"{self._reader} cannot read it"
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
    """Lease the checkpoint of a step, so that it is neither deleted nor replaced while it is read. `seconds`: expiry;
    `CheckpointLease.renew` prolongs it. `clock`: Unix seconds.
    """
    target = contents.step_dir(root, step)
    lease = CheckpointLease(target, read_manifest(target), reader, clock)
    lease.renew(seconds)
    return lease


def _pin_path(root: Path, step: int, attempt: int) -> Path:
    folder = root / contents.PINS
    if folder.is_symlink():
        raise RunError(f"{folder} is a link, and its target would be changed; delete the link")
    return folder / f"{step}-{attempt}{_LEASE}"


def _read_lease(path: Path) -> tuple[Mapping[str, object], float]:
    """Return the contents of a lease's file, and its expiry in Unix seconds."""
    try:
        body = dict(json.loads(path.read_text(encoding="utf-8")))
        return body, float(body["expires"])
    except (ValueError, KeyError, TypeError):
        # Leases are written atomically, so this file is none; it is deleted by its age.
        return {}, path.stat().st_mtime


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return sorted(path for path in paths if path.suffix == suffix and not path.name.startswith("."))


# Where weights and a model's config are read from, and where an export may be written. Needs no torch.


_CONFIG = "config.json"


def weights_folder(folder: Path) -> Path:
    """Return the folder with the files of weights: ``actor`` of a step folder, else the folder itself."""
    return folder / "actor" if (folder / "actor").is_dir() else folder


def find_config(folder: Path) -> Path | None:
    """Find the folder with the model's config and tokenizer; None: there is none. A weights-only checkpoint has none of
    its own: then it is that of the nearest other step, or of the run's initial model.
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
    """Return the run's folder of a step, and ``actor`` of its other steps, the nearest first; (None, []) for a place in
    no step.
    """
    step = place.parent if place.name == "actor" else place
    number = contents.step_of(step.name)
    if number is None:
        return None, []
    run_checkpoints = step.parent.parent
    beside = run_checkpoints.name in (contents.VERSIONS, contents.DELTAS)
    root = run_checkpoints.parent if beside else step.parent
    others = {
        of: path for path in root.glob(f"{contents.STEP_PREFIX}*") if (of := contents.step_of(path.name)) is not None
    }
    nearest = sorted(others, key=lambda of: (abs(of - number), of))
    return root.parent, [others[of] / "actor" for of in nearest]


def check_free(output: Path) -> None:
    """Check that a folder may be written at this place: it is missing or empty, and the folder above is writable.
    Raises ConfigError.
    """
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; name a folder that is not there yet")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; name a folder that is not there yet")
    above = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{output} cannot be created: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{output} cannot be created: {above} is not writable")
