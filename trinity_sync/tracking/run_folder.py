"""The folder of one run: who may write it, and where things are in it. The launcher opens it first of all.

A run has an flock on `.lock` for as long as it lives. The kernel drops it with the process, so "in use" cannot go
stale as a status in a file would.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import make_folder, write_all
from trinity_sync.host.locks import open_lock, try_lock

_PROBE_BYTES = 64 * 1024


class RunFolderInUse(ConfigError):  # noqa: N818 - a public name, and a state more than a fault
    """Another process is running in the folder."""


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """The process that has locked a run folder, as it wrote itself down; None where that could not be read."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid} on {self.host}"


class RunFolder:
    """A run folder that this process has locked. Use it as a context manager; leaving it unlocks the folder.

    ::

        with RunFolder.open("outputs/copy/2026-01-31_14-05", resume=False) as folder:
            ...  # folder.metrics, folder.logs, ...

    Attributes:
        path: the folder, absolute.
        resumed: whether it was opened to go on with the run in it.
        run_json: status and origin of the run.
        metrics: one line per trainer step.
        events: one line per publish, load, commit, prune and fault.
        samples: samples of some steps, one per line.
        summary: figures of the whole run.
        report: the report of the run.
        logs: the folder of the processes' logs.
        model: the folder of the initial model, where it is made here.
        checkpoints: the folder of checkpoints, unless `checkpoint.dir` names another.
        slots: the folder of slots as files, where shared memory is too small for them. Gone when the run has ended.
        tensorboard: the folder of TensorBoard's event files.
    """

    def __init__(self, path: Path, lock: int, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self._lock: int | None = lock
        self.run_json = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.samples = path / "samples.jsonl"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.logs = path / "logs"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.slots = path / "slots"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, resume: bool) -> RunFolder:
        """Lock the folder for this process.

        Args:
            path: the folder. Created for a fresh run; must have a run for a resume.
            resume: whether the run in the folder is to go on.

        Raises:
            RunFolderInUse: another process has locked it.
            ConfigError: a fresh run in a folder that has one, a resume where there is none, or no writes taken.
        """
        path = Path(path).absolute()
        run_json = path / "run.json"
        held = _held.pop(path.resolve(), None)
        if resume and not run_json.exists():
            raise ConfigError(f"{path} holds no run to resume: there is no run.json in it; name the folder of a run")
        lock = _locked(path) if held is None else held
        try:
            if not resume and run_json.exists():
                raise ConfigError(
                    f"{path} already holds a run; go on with it by `trinity-sync resume {path}`, or choose another "
                    "folder by hydra.run.dir"
                )
            try:
                _try_writing(path)
                (path / "logs").mkdir(exist_ok=True)
            except OSError as error:
                raise _unwritable(path, error) from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock, resumed=resume)

    def close(self) -> None:
        """Unlock the folder; closing twice is fine."""
        lock, self._lock = self._lock, None
        if lock is not None:
            # The file stays: unlinking it would let two processes have "the" lock on two different files.
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
            os.close(lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_held: dict[Path, int] = {}
"""Folders that are locked for a run of this process that is about to begin."""


def hold(path: str | os.PathLike[str]) -> None:
    """Make and lock the folder of a run that is about to begin, before anything is written to it; `RunFolder.open`
    takes that over, and `let_go` gives it up.

    Raises:
        RunFolderInUse: another process has locked it.
        ConfigError: it takes no writes.
    """
    path = Path(path).absolute()
    lock = _locked(path)
    _held[path.resolve()] = lock


def let_go(path: str | os.PathLike[str]) -> None:
    """Unlock a folder that `hold` has locked, where no run has begun in it."""
    lock = _held.pop(Path(path).resolve(), None)
    if lock is not None:
        os.close(lock)


def _locked(path: Path) -> int:
    """Make a folder, lock it and sign that."""
    try:
        make_folder(path)
        lock = open_lock(path / ".lock", mode=0o644)  # for all to read who runs here
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        _take(lock, path)
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)
        except OSError as error:
            raise _unwritable(path, error) from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def holds_run(path: str | os.PathLike[str]) -> bool:
    """Whether there is a run in a folder, begun or ended."""
    return (Path(path) / "run.json").exists()


def lock_owner(path: str | os.PathLike[str]) -> LockOwner | None:
    """Return who is running in a folder right now; None if nobody. Looks without disturbing."""
    try:
        lock = open_lock(Path(path) / ".lock", create=False, writable=False)
    except OSError:
        return None
    try:
        return None if try_lock(lock, shared=True) else _read_owner(lock)
    except OSError:
        return None
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    for _ in range(5):
        try:
            if try_lock(lock):
                return
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be locked ({error.strerror or error}); choose a folder on a file system that has flock"
            ) from error
        owner = _read_owner(lock)
        if owner.pid is not None:
            break
        # Nobody signed: a look by `lock_owner`, over in microseconds, or a run about to sign.
        time.sleep(0.02)
    raise RunFolderInUse(f"{path} is in use by {owner}; stop that run or choose another folder")


def _read_owner(lock: int) -> LockOwner:
    try:
        signed = json.loads(os.pread(lock, 4096, 0))
        return LockOwner(pid=int(signed["pid"]), host=str(signed["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return LockOwner(pid=None, host=None)


def _try_writing(path: Path) -> None:
    probe = path / f".probe-{os.getpid()}"
    handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(handle, bytes(_PROBE_BYTES))
        os.fsync(handle)
    finally:
        os.close(handle)
        probe.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} does not take writes: {error.strerror or error}; free space there, or choose another folder "
        "by hydra.run.dir"
    )
