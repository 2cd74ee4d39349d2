"""Checks whether this machine can run what is installed on it, without starting anything. `trinity-sync doctor` prints
the findings.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import socket
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
from packaging.requirements import Requirement
from xxhash import xxh3_128_digest

from trinity_sync.backends.option import accelerator_count
from trinity_sync.config.lora_settings import adapter_of
from trinity_sync.config.model_checks import parameters, read_fields
from trinity_sync.config.schema import Config, retention_policies
from trinity_sync.errors import ConfigError, TrinityError
from trinity_sync.host.locks import own_name
from trinity_sync.host.package_source import installed_version
from trinity_sync.models.files import cached_folder
from trinity_sync.protocol.retention import most_at_once
from trinity_sync.trainer.algorithms.base import algorithm_of
from trinity_sync.weights import native
from trinity_sync.weights.shard_file import DigestedFile
from trinity_sync.weights.slots import remove_stale
from trinity_sync.weights.tensor_rows import rows_digest

OURS = "trinity-sync"
_GIB = 2**30
_LEAST_DISK, _LEAST_MEMORY, _LEAST_SHARED = _GIB, 4 * _GIB, _GIB
_LEAST_FILES = 1024
SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
_CONNECT_S = 5.0
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str  # in a word or two
    told: str  # the observation; if bad, also what to do
    state: Literal["ok", "warning", "error"] = "ok"  # ``error`` would stop every run, ``warning`` may stop some


def findings(installed: Callable[[str], str | None] | None = None) -> Iterator[Finding]:
    """Check this machine, one thing after another. Leaves no open port and no file. `installed` returns the version of
    a package; for tests.
    """
    version = installed or installed_version
    yield from _packages(version)
    yield Finding("native library", native.state(), "ok" if native.library() else "warning")
    yield _gpus(accelerator_count(), version("torch") or "")
    yield _shared_memory(Path("/dev/shm"))
    yield _memory()
    yield _folder("disk", Path.cwd(), "start runs elsewhere, or give hydra.run.dir")
    temp = Path(tempfile.gettempdir())
    yield _folder("temporary files", temp, "set TMPDIR or cluster.temp_dir")
    yield _sockets(temp)
    yield _ports()
    yield _open_files()


def _packages(version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Check each required package against the versions that are known to work."""
    try:
        needed = [Requirement(text) for text in metadata.requires(OURS) or ()]
    except metadata.PackageNotFoundError:
        yield Finding("packages", f"{OURS} itself is not installed, so its packages are not known", "warning")
        return
    fit = 0
    for one in needed:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found = version(one.name)
        if found is None:
            yield Finding(one.name, f"is not installed; pip install '{one}'", "error")
        elif not one.specifier.contains(found, prereleases=True):
            yield Finding(one.name, f"{found} is installed, and {one.specifier} is known to work", "warning")
        else:
            fit += 1
    yield Finding("packages", f"{fit} as they are known to work, Python {sys.version.split()[0]}")


def _gpus(count: int, torch: str) -> Finding:
    if not count:
        return Finding("GPUs", "none: ranks and explorers use the CPUs")
    if torch.endswith("+cpu"):
        return Finding("GPUs", f"{count}, but torch {torch} is built without them; install a build for GPUs", "error")
    return Finding("GPUs", f"{count}, for as many ranks and explorers")


def _shared_memory(folder: Path) -> Finding:
    if not os.access(folder, os.W_OK):
        return Finding(
            "shared memory", f"{folder} cannot be written; versions would be files in the run's folder", "warning"
        )
    free = shutil.disk_usage(folder).free
    told = f"{_gib(free)} free in {folder}"
    if free < _LEAST_SHARED:
        return Finding("shared memory", f"{told}; a container gets more by --shm-size", "warning")
    return Finding("shared memory", f"{told}, for sync.slots versions of the weights")


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    told = f"{_gib(free)} free, {os.cpu_count()} cores"
    return Finding("memory", told, "warning" if free < _LEAST_MEMORY else "ok")


def _folder(subject: str, folder: Path, instead: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        return Finding(subject, f"nothing can be written in {folder} ({error.strerror}); {instead}", "error")
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK:
        return Finding(subject, f"{_gib(free)} free in {folder}; {instead}", "warning")
    return Finding(subject, f"{_gib(free)} free in {folder}")


def socket_room() -> int:
    """Return the longest path, in bytes, of a folder for Ray's sessions, below which its sockets lie."""
    longest = (
        f"/{own_name('trinity-ray')}-12345678/session_2026-01-31_14-05-00_123456_{os.getpid()}/sockets/plasma_store"
    )
    return SOCKET_BYTES - len(longest)


def _sockets(temp: Path) -> Finding:
    if len(os.fsencode(temp)) > socket_room():
        return Finding("sockets", f"{temp} is too long a path for Ray's; give another cluster.temp_dir", "error")
    return Finding("sockets", f"Ray's fit below {temp}")


def _ports() -> Finding:
    """Check that this machine accepts a connection at its own address, as Ray and the trainer's group need it."""
    address = "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("8.8.8.8", 53))  # sends nothing; shows the address that would be used
        address = outward.getsockname()[0]
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname()[:2], _CONNECT_S).close()
    except OSError as error:
        return Finding("ports", f"no connection to {address}, this machine ({error}); see its firewall", "error")
    return Finding("ports", f"free ones at {address} can be used")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _LEAST_FILES:
        return Finding("open files", f"{soft} at most; allow more: ulimit -n {_LEAST_FILES * 64}", "warning")
    return Finding("open files", f"{soft if soft >= 0 else 'any number'} at most")


_PROBE_BYTES, _PIECE_BYTES = 64 << 20, 4 << 20


def speeds(folder: Path) -> dict[str, float]:
    """Measure constants of `trinity-sync plan`, in bytes a second, each the best of three. OSError: the folder cannot
    be written.
    """
    source, target = np.ones(_PROBE_BYTES, np.uint8), np.zeros(_PROBE_BYTES, np.uint8)
    with tempfile.TemporaryDirectory(dir=folder) as name:

        def write() -> None:
            with DigestedFile(Path(name) / "probe", durable=True) as file:
                file.write(source.data)
                file.finish()

        works: dict[str, Callable[[], object]] = {
            "copy": lambda: np.copyto(target, source),
            "digest": lambda: rows_digest(source.reshape(-1, 8192)),
            "tcp": lambda: _through_tcp(source.data, target.data),
            "disk": write,
        }
        return {what: _PROBE_BYTES / min(timeit.repeat(work, number=1, repeat=3)) for what, work in works.items()}


def _through_tcp(source: memoryview, target: memoryview) -> None:
    """Send pieces over the loopback and digest them at both ends, as node agents do."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), _CONNECT_S) as sender,
        server.accept()[0] as receiver,
        ThreadPoolExecutor(1) as sending,
    ):
        pieces = [slice(start, start + _PIECE_BYTES) for start in range(0, len(source), _PIECE_BYTES)]

        def send() -> None:
            for at in pieces:
                xxh3_128_digest(source[at])
                sender.sendall(source[at])

        sent = sending.submit(send)
        for at in pieces:
            receiver.recv_into(target[at], 0, socket.MSG_WAITALL)
            xxh3_128_digest(target[at])
        sent.result()


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


# -- room for one run


_TIGHT = 1.25
_MOST_SAVES = 200
_STATES = 2


def check_room(cfg: Config, run_dir: Path, checkpoints: Path, start: int = 0) -> Iterator[str]:
    """Check that this machine has room for the slots and the checkpoints of a new run whose model is here, by the
    least that they need. Yields warnings. Raises ConfigError if there certainly is none: for the first two checkpoints,
    since later ones may be moved away, or the run stopped before. `start`: the step after which the run begins.
    """
    here = cfg.model.path is not None and cfg.cluster.address is None and adapter_of(cfg.model.lora) is None
    folder = cached_folder(cfg.model.path) if here and cfg.model.path is not None else None
    count = 0 if folder is None else parameters(folder)
    if not count or folder is None or "text_config" in read_fields(folder):  # a part of these is not trained
        return
    slots, shared, disk = cfg.sync.slots * count * _BYTES[cfg.sync.wire_dtype], _free(cfg.sync.shm_dir), _free(run_dir)
    size = 3 * count * _BYTES[getattr(cfg.backend, "master_dtype", "fp32")]  # weights and two averages of Adam
    states = _STATES * size if cfg.checkpoint.memory_interval else 0
    if slots + states > shared:  # perhaps by what killed runs have left, which the start would remove as well
        with contextlib.suppress(TrinityError, OSError):
            remove_stale(cfg.sync.shm_dir)
        shared = _free(cfg.sync.shm_dir)
    if states > shared:
        raise ConfigError(
            f"checkpoint.memory_interval: {cfg.sync.shm_dir} (sync.shm_dir) has {_gib(shared)} for {_STATES} states of "
            f"at least {_gib(size)} (the newest, and the next one); set 0, or give the machine more shared memory"
        )
    shared -= states
    if algorithm_of(cfg.algorithm).explores and slots > shared:
        text = f"sync.slots={cfg.sync.slots} need {_gib(slots)}, {cfg.sync.shm_dir} (sync.shm_dir) has {_gib(shared)}"
        if slots > disk:
            raise ConfigError(f"{text}, the run's folder {_gib(disk)}; make room, or lower sync.slots (at least 2)")
        yield f"{text}: they will be files in the run's folder, which is slower; a container gets more by --shm-size"
    interval, steps = cfg.checkpoint.interval or cfg.trainer.steps, cfg.trainer.steps
    saves = sorted({*range(start - start % interval + interval, steps + 1, interval)[:_MOST_SAVES], steps})
    number, free = most_at_once(retention_policies(cfg), saves, size), _free(checkpoints)
    if (first := min(number, 2)) * size > free:
        raise ConfigError(f"{_lack(first, size, checkpoints, free)} free; name another place")
    if number * size * _TIGHT > free:
        yield f"{_lack(number, size, checkpoints, free)} free; to keep fewer, see retention and checkpoint.interval"


def _lack(number: int, size: int, folder: Path, free: float) -> str:
    needed = f"{number} checkpoint{'s' * (number > 1)} of at least {_gib(size)} need {_gib(number * size)}"
    return f"checkpoint.dir: {needed}, and {folder} has {_gib(free)}"


def _free(folder: str | Path) -> float:
    """Return the free bytes where a folder is or will be; infinity: its file system does not say."""
    place = Path(folder).absolute()
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(next(one for one in (place, *place.parents) if os.access(one, os.F_OK)))
        return usage.free if usage.total else math.inf
    return math.inf
