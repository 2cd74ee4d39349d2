"""The checkpoint monitor of a verl program without a driver of ours: the ranks start it in a process of its own."""

from __future__ import annotations

import functools
import importlib
import math
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch.distributed as dist

from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.pending import CallChannel
from trinity_sync.checkpoint import daemon
from trinity_sync.checkpoint.daemon import connect, wait_until_ended
from trinity_sync.checkpoint.folder.contents import step_dir, step_of
from trinity_sync.checkpoint.folder.owner import Owner, read_mark
from trinity_sync.checkpoint.memory_states import holds_states
from trinity_sync.checkpoint.monitor import ACTOR_NAME, MonitorConfig
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.threads import comes_true
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.vendor import say
from trinity_sync.protocol.retention import Policy

if TYPE_CHECKING:
    from ray.actor import ActorHandle


ANSWER_S = 30.0
"""Timeout of the monitor's answers in a process without an engine, seconds."""

_SHARED_S = 5.0
"""Time in which a network file system has to show a new file, seconds."""
_POLL_S = 0.1

COMMIT_S = MonitorConfig().timeout_s
"""Timeout of a commit in a process without an engine, seconds."""

_CHECKPOINTS = "trinity-sync-checkpoints-"
"""Key of the checkpoint folder in Ray's store, followed by the program's word."""


def join_alone(root: str | os.PathLike[str], timeout_s: float) -> RunMonitor:
    """Connect one process without an engine, such as a driver under Ray, to the monitor that the engines have started.
    Raises ConfigError, RunError, WaitTimeout: as `checkpoint.daemon.connect`. `timeout_s`: limit of each wait,
    seconds.
    """
    program = this_program()
    handle = connect(root, program=program.word, may_start=False, timeout_s=timeout_s, address=program.address)
    return RunMonitor.of(handle, timeout_s)


def finish_saves_of_workers(timeout_s: float, trainer_s: float = math.inf) -> None:
    """Wait until the engines' saves under way are committed, in the driver of a program under Ray. Returns at once if
    no engine has saved through us. `trainer_s`: as of `CheckpointMonitor.finish_saves`. Raises RunError, WaitTimeout.
    """
    root = internal_kv()._internal_kv_get(_CHECKPOINTS + this_program().word) if under_ray() else None
    if root is not None:
        wait_until_ended(root.decode(), timeout_s=timeout_s, on_wait=say)
        if daemon.find(Path(root.decode())) is not None:
            join_alone(root.decode(), timeout_s).client.finish_saves(timeout_s, trainer_s).result(timeout_s + ANSWER_S)


def internal_kv() -> ModuleType:
    """Return Ray's key-value module; Ray runs in this process."""
    return importlib.import_module("ray.experimental.internal_kv")


def join_run(
    root: str | os.PathLike[str],
    *,
    resume_step: int | None,
    timeout_s: float,
    config: MonitorConfig | None = None,
) -> RunMonitor:
    """Connect this rank to the run's checkpoint monitor, which rank 0 starts if there is none. Collective, over the
    default group.

    Several groups of one program (actor and critic, under Ray) share one monitor, with the settings of the first. See
    `checkpoint.daemon.connect` for the monitor's lifetime and its work on the folder. Raises RunError.
    `timeout_s`: limit of each wait, seconds.
    """
    program, first = this_program(), dist.get_rank() == 0
    found: list[RunMonitor] = []

    def join() -> None:
        handle = connect(
            root,
            program=program.word,
            may_start=first,
            timeout_s=timeout_s,
            resume_step=resume_step,
            config=config,
            address=program.address,
        )
        found.append(RunMonitor.of(handle, timeout_s))
        if first and under_ray() and not holds_states(Path(root)):
            internal_kv()._internal_kv_put(_CHECKPOINTS + program.word, str(Path(root).absolute()))

    mark = Path(root, f".shared-{secrets.token_hex(8)}")

    def begin() -> str:
        join()
        mark.touch()
        return mark.name

    # Rank 0 first: if it fails, the others have nothing to wait for.
    shared_mark = together("open the checkpoint folder", begin if first else str)[0]
    try:
        together(
            "see the checkpoint folder of rank 0", lambda: None if first else _check_shared(Path(root), shared_mark)
        )
    finally:
        if first:
            with suppress(OSError):  # else the others would wait for rank 0
                mark.unlink()
    together("find the checkpoint monitor", join if not first else lambda: None)
    return found[0]


def _check_shared(root: Path, mark: str) -> None:
    if not comes_true((root / mark).exists, _SHARED_S, _POLL_S):
        raise ConfigError(
            f"{root} on {socket.gethostname()} is not the checkpoint folder of rank 0: a file that rank 0 wrote is "
            f"not there after {_SHARED_S:.0f} s. Name a folder that all nodes share"
        )


# The monitor of a program that names its checkpoint folder with its first save.


def open_monitor(
    local_path: str, loaded: str | None, timeout_s: float, *, policies: Sequence[Policy] = ()
) -> RunMonitor:
    """Find or start the program's monitor for the folder of a first save; the monitor ends with the program.
    Collective.

    Checkpoints later than the loaded step become ``abandoned-*``: all of them if the loaded step is from another folder
    or a renamed copy. For a state in memory this is done in the checkpoint folder, whose attempt is that of the states.
    Raises ConfigError, RunError. `timeout_s`: limit of each wait, seconds.
    """
    saved = _split(local_path)
    if saved is None:
        raise ConfigError(f"{local_path} is in no folder global_step_N, as checkpoints of verl's trainers are")
    root, saved_step = saved
    if holds_states(root):
        mark = together("find the states in memory", lambda: _mark_of_states(root))[dist.get_rank()]
        beside = open_monitor(str(step_dir(Path(mark.folder), saved_step)), loaded, timeout_s, policies=policies)
        config = MonitorConfig(timeout_s=timeout_s, attempt=beside.attempt)
        return replace(join_run(root, resume_step=0, timeout_s=timeout_s, config=config), beside=beside)
    place, step = (_split(loaded) if loaded is not None else None) or (None, 0)
    resume_step = step if place is not None and _same(place, root) else 0
    config = MonitorConfig(timeout_s=timeout_s, policies=policies)
    return join_run(root, resume_step=resume_step, timeout_s=timeout_s, config=config)


def _mark_of_states(root: Path) -> Owner:
    mark = read_mark(root)
    if mark is None:
        raise ConfigError(
            f"{root}, where the trainer keeps states in memory, is not on {socket.gethostname()}: states in memory are "
            "for programs on one machine"
        )
    return mark


def is_in_memory(local_path: str) -> bool:
    """Return whether a place is that of a state in memory."""
    place = _split(local_path)
    return place is not None and holds_states(place[0])


def _same(one: Path, other: Path) -> bool:
    """Return whether both paths lead to the same folder."""
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _split(local_path: str) -> tuple[Path, int] | None:
    """Return the checkpoint folder and the step of a place in it; None: it is in no step folder."""
    path = Path(local_path).absolute()
    for folder in (path, *path.parents):
        step = step_of(folder.name)
        if step is not None:
            return folder.parent, step
    return None


# The name of this program, and the address by which its processes reach this machine.


_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Program:
    """The name and address of a program, for `checkpoint.daemon.connect`."""

    word: str  # unique to this start of the program
    address: str  # where a server on this machine has to listen to be reached by all processes of the program


def this_program() -> Program:
    """Name the program. Collective if there is a default group.

    Under Ray, the name is that of Ray's job, also in a process without a group, such as the driver. Otherwise rank 0 of
    the group draws a random word: a launcher uses its ids again when it restarts processes. Raises RunError.
    """
    grouped = dist.is_available() and dist.is_initialized()
    mine = (_drawn(os.getpid()), _machine(), socket.gethostname(), _job())
    answers = together("name the program", lambda: mine) if grouped else [mine]
    job = answers[0][3]
    if job is not None and all(other == job for *_, other in answers):  # not if some processes use Ray for other work
        return Program(word=job, address=sys.modules["ray"].util.get_node_ip_address())
    if not grouped:
        raise RunError("this process belongs to no program: it has no process group, and does not run under Ray")
    elsewhere = [host for _, machine, host, _ in answers if machine != _machine()]
    master = os.environ.get("MASTER_ADDR")
    address = _reached_by([*([master] if master else []), *elsewhere]) if elsewhere else _LOOPBACK
    return Program(word=answers[0][0], address=address)


def under_ray() -> bool:
    """Return whether Ray runs in this process, without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _job() -> str | None:
    """Return the Ray job of this process; None without Ray."""
    if not under_ray():
        return None
    context = sys.modules["ray"].get_runtime_context()
    return f"{context.get_session_name()}-{context.get_job_id()}"


@functools.cache
def _drawn(pid: int) -> str:
    """Draw the word of one process. A fork inherits the cache, but has another number."""
    return secrets.token_hex(16)


def _machine() -> str:
    """Identify what shares a loopback: the machine's boot and the container's network."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"


def _reached_by(others: Sequence[str]) -> str:
    """Return this machine's address from which packets go to the first of the others that is not on a loopback."""
    for other in dict.fromkeys(others):
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as looking:  # sends nothing
                looking.connect(place)
                address: str = looking.getsockname()[0]
        except OSError:
            continue
        if not address.startswith("127.") and address != "::1":
            return address
    raise RunError(
        f"no address is known at which {', '.join(dict.fromkeys(others))} reach {socket.gethostname()}; set MASTER_ADDR"
    )


@dataclass(frozen=True, kw_only=True)
class RunMonitor:
    """A run's checkpoint monitor, a Ray actor or a process, as checkpoint managers use it."""

    handle: ActorHandle | CallChannel  # of the monitor, for a `CheckpointCoordinator`
    client: MonitorClient  # for the calls of a checkpoint
    root: Path | None  # the checkpoint folder; None: nothing is written
    attempt: int  # the run's attempt
    # The places in a step's folder that a full checkpoint has to have; empty: the announced parts are enough.
    roles: Sequence[str]
    durable: bool  # whether commits are fsynced
    beside: RunMonitor | None = None  # of states in memory: the monitor of the checkpoint folder, which lives as long

    @classmethod
    def of(cls, handle: ActorHandle | CallChannel, timeout_s: float) -> RunMonitor:
        """Make it from a handle, of Ray or of `checkpoint.daemon.connect`. Raises RunError, WaitTimeout."""
        client = MonitorClient(handle)
        facts = client.describe().result(timeout_s)
        return cls(
            handle=handle,
            client=client,
            root=Path(facts["root"]) if facts["root"] is not None else None,
            attempt=facts["attempt"],
            roles=facts["roles"],
            durable=facts["fsync"],
        )

    @classmethod
    def in_namespace(cls, ray_namespace: str, timeout_s: float) -> RunMonitor:
        """Find the monitor that `open_run` has started in a Ray namespace; empty: Ray's own for this process. Raises
        RunError if there is none, or it is gone.
        """
        import ray

        try:
            handle = ray.get_actor(ACTOR_NAME, namespace=ray_namespace or None)
        except ValueError:
            raise RunError(
                f"there is no {ACTOR_NAME!r} in Ray namespace {ray_namespace!r}: let the driver start it with "
                "trinity_sync.integrations.verl.open_run before the workers"
            ) from None
        return cls.of(handle, timeout_s)
