"""A run without a driver of ours: its ranks open it themselves, with a checkpoint monitor in a process of its own."""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.pending import CallTransport
from trinity_sync.checkpoint.daemon import service
from trinity_sync.checkpoint.daemon.service import connect, wait_until_ended
from trinity_sync.checkpoint.folder.contents import step_of
from trinity_sync.checkpoint.monitor import ACTOR_NAME, MonitorConfig
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.vendor import say
from trinity_sync.protocol.retention import Policy

if TYPE_CHECKING:
    from ray.actor import ActorHandle


ANSWER_S = 30.0
"""What a process without an engine gives the monitor for an answer, seconds: it is there when a save has returned."""

_SHARED_S = 5.0
"""A network file system may show a new file so many seconds late."""
_POLL_S = 0.1

COMMIT_S = MonitorConfig().timeout_s
"""What such a process gives a commit, seconds."""

_CHECKPOINTS = "trinity-sync-checkpoints-"
"""Key of the checkpoint folder in Ray's store, before the word of the program."""


def join_alone(root: str | os.PathLike[str], timeout_s: float) -> RunMonitor:
    """Connect a process of a program under Ray that has no engine, such as its driver, to the monitor that the engines
    have started. Any one process.

    Args:
        root: the checkpoint folder, by the same path as the engines.
        timeout_s: limit of each wait, seconds.

    Raises:
        ConfigError, RunError, WaitTimeout: as `checkpoint.daemon.connecting.connect`.
    """
    program = this_program()
    handle = connect(root, program=program.word, may_start=False, timeout_s=timeout_s, address=program.address)
    return RunMonitor.of(handle, timeout_s)


def finish_saves_of_workers(timeout_s: float) -> None:
    """Wait until the saves under way of the engines of a program under Ray are committed. For its driver, without an
    engine; returns at once where no engine has saved through us.

    Args:
        timeout_s: limit of each wait, seconds.

    Raises:
        RunError: one failed.
        WaitTimeout: one is not committed.
    """
    said = internal_kv()._internal_kv_get(_CHECKPOINTS + this_program().word) if under_ray() else None
    if said is not None:
        wait_until_ended(said.decode(), timeout_s=timeout_s, on_wait=say)
        if service.find(Path(said.decode())) is not None:
            join_alone(said.decode(), timeout_s).client.finish_saves(timeout_s).result(timeout_s + ANSWER_S)


def internal_kv() -> Any:
    """Return the module of Ray, which runs in this process."""
    return importlib.import_module("ray.experimental.internal_kv")


def join_run(
    root: str | os.PathLike[str],
    *,
    resume_step: int | None,
    timeout_s: float,
    save_strategy: str = "unrestricted",
    config: MonitorConfig | None = None,
) -> RunMonitor:
    """Connect this rank to the run's checkpoint monitor, which rank 0 starts where there is none. Collective, over the
    default group.

    Several groups of one program (actor and critic, under Ray) have one monitor; what the first one says of it holds.
    See `checkpoint.daemon.connecting.connect` for how long it lives, and what becomes of the folder.

    Args:
        root: the checkpoint folder, by the same path on all nodes.
        resume_step: the step whose checkpoint the program has loaded, 0: none. None: the newest is gone on from.
        timeout_s: limit of each wait, seconds.
        save_strategy, config: of a monitor that is started; attempt and writer are filled in.

    Raises:
        RunError: on every rank, with the rank and its error, such as that another program writes in the folder, or
            that the ranks do not share it.
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
            save_strategy=save_strategy,
            config=config,
            address=program.address,
        )
        found.append(RunMonitor.of(handle, timeout_s))
        if first and under_ray():
            internal_kv()._internal_kv_put(_CHECKPOINTS + program.word, str(Path(root).absolute()))

    mark = Path(root, f".shared-{secrets.token_hex(8)}")

    def begin() -> str:
        join()
        mark.touch()
        return mark.name

    # Rank 0 before the others: where it fails they have nothing to wait for.
    seen = together("open the checkpoint folder", begin if first else str)[0]
    try:
        together("see the checkpoint folder of rank 0", lambda: None if first else _check_shared(Path(root), seen))
    finally:
        if first:
            with suppress(OSError):  # the others would wait for rank 0
                mark.unlink()
    together("find the checkpoint monitor", join if not first else lambda: None)
    return found[0]


def _check_shared(root: Path, mark: str) -> None:
    deadline = time.monotonic() + _SHARED_S
    while not (root / mark).exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{root} on {socket.gethostname()} is not the checkpoint folder of rank 0: a file that rank 0 wrote is "
                f"not there after {_SHARED_S:.0f} s. Name a folder that all nodes share"
            )
        time.sleep(_POLL_S)


# Opening the checkpoint monitor of a verl program that knows nothing of us: its first save says where it writes.


def open_monitor(
    local_path: str, loaded: str | None, timeout_s: float, *, policies: Sequence[Policy] = ()
) -> RunMonitor:
    """Find the program's monitor for the folder that a save goes to, or start it: a process that ends with the program.
    Collective. For its arguments and errors see `interfaces.OpensMonitor` and `join_run`; `policies` are the retention
    of one that is started.

    Checkpoints of later steps than the one that was loaded from the folder become ``abandoned-*``: all of them where
    what was loaded is a step of another folder, or a copy by another name.

    Raises:
        ConfigError: `local_path` is in no folder ``global_step_N``; further as `join_run`.
    """
    saved = _split(local_path)
    if saved is None:
        raise ConfigError(f"{local_path} is in no folder global_step_N, as checkpoints of verl's trainers are")
    root, _ = saved
    place, step = (_split(loaded) if loaded is not None else None) or (None, 0)
    resume_step = step if place is not None and _same(place, root) else 0
    config = MonitorConfig(timeout_s=timeout_s, policies=policies)
    return join_run(root, resume_step=resume_step, timeout_s=timeout_s, config=config)


def _same(one: Path, other: Path) -> bool:
    """Whether both are the same folder, by whatever path."""
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _split(local_path: str) -> tuple[Path, int] | None:
    """Return the checkpoint folder and the step of a place in it; None: it is in no folder of a step's name."""
    path = Path(local_path).absolute()
    for folder in (path, *path.parents):
        step = step_of(folder.name)
        if step is not None:
            return folder.parent, step
    return None


# Which program this process belongs to, and by which address its other processes reach this machine.


_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What `checkpoint.daemon.connecting.connect` is told of the program.

    Attributes:
        word: tells it from all others, also from an earlier start of the same job.
        address: where a server on this machine is to listen, so that all processes of the program reach it.
    """

    word: str
    address: str


def this_program() -> Program:
    """Name the program. Collective where there is a default group.

    Under Ray, it is Ray's job, of which a process without a group may ask, too, such as the driver. Else the group is
    the program, and its rank 0 draws the word: the ids of a launcher come again when it starts its processes again.

    Raises:
        RunError: on every rank, where a rank is gone; there is neither a group nor Ray; or no address is known.
    """
    grouped = dist.is_available() and dist.is_initialized()
    mine = (_drawn(os.getpid()), _machine(), socket.gethostname(), _job())
    said = together("name the program", lambda: mine) if grouped else [mine]
    job = said[0][3]
    if job is not None and all(other == job for *_, other in said):  # not where some use Ray for things of their own
        return Program(word=job, address=sys.modules["ray"].util.get_node_ip_address())
    if not grouped:
        raise RunError("this process belongs to no program: it has no process group, and does not run under Ray")
    elsewhere = [host for _, machine, host, _ in said if machine != _machine()]
    master = os.environ.get("MASTER_ADDR")
    address = _reached_by([*([master] if master else []), *elsewhere]) if elsewhere else _LOOPBACK
    return Program(word=said[0][0], address=address)


def under_ray() -> bool:
    """Whether Ray runs in this process; it is not imported for that."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _job() -> str | None:
    """Ray's job that this process belongs to; None: Ray does not run in it."""
    if not under_ray():
        return None
    context = sys.modules["ray"].get_runtime_context()
    return f"{context.get_session_name()}-{context.get_job_id()}"


@functools.cache
def _drawn(pid: int) -> str:
    """Draw the word of one process; a fork, which inherits the drawn ones, has another number."""
    return secrets.token_hex(16)


def _machine() -> str:
    """Tell what shares a loopback from what does not: the machine's start, and the network of the container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"


def _reached_by(others: Sequence[str]) -> str:
    """Return the address of this machine from which packets go to one of the others.

    Args:
        others: names or addresses; the first that is reached by more than a loopback counts.
    """
    for other in dict.fromkeys(others):
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as looking:  # nothing is sent
                looking.connect(place)
                address: str = looking.getsockname()[0]
        except OSError:
            continue
        if not address.startswith("127.") and address != "::1":
            return address
    raise RunError(
        f"no address is known by which {', '.join(dict.fromkeys(others))} reach {socket.gethostname()}; set MASTER_ADDR"
    )


# The checkpoint monitor of a verl program, and what a manager has to know of it: one of Ray's actors, or a process.


@dataclass(frozen=True, kw_only=True)
class RunMonitor:
    """A run's checkpoint monitor.

    Attributes:
        handle: of the monitor, for a `CheckpointCoordinator`.
        client: for the calls of a checkpoint.
        root: the checkpoint folder; None: nothing is written.
        attempt: the run's attempt.
        roles: places in a step's folder without which no full checkpoint is committed; empty: what is announced is all.
        durable: whether commits survive a power cut.
    """

    handle: ActorHandle | CallTransport
    client: MonitorClient
    root: Path | None
    attempt: int
    roles: Sequence[str]
    durable: bool

    @classmethod
    def of(cls, handle: ActorHandle | CallTransport, timeout_s: float) -> RunMonitor:
        """Ask a monitor, Ray's or one of `checkpoint.daemon.connecting.connect`, what it was made with.

        Args:
            timeout_s: limit for its answer, seconds.

        Raises:
            RunError: it is gone.
            WaitTimeout: it did not answer.
        """
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
        """Find the one that `open_run` has started.

        Args:
            ray_namespace: the run's; empty: Ray's own for this process.

        Raises:
            RunError: there is none; further as `of`.
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
