"""The members of a sync: their settings, the data that each of them announces, and the places that they get.

A member's engine `read`s the user's keys and announces a `MemberReady`; the driver gives each member its `MemberPlace`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from trinity_sync.errors import ConfigError, RunError, near
from trinity_sync.sync.links import SenderAddress
from trinity_sync.weights import shards

_FLOATING = tuple(name for name in shards.NAMES if shards.is_floating(name))
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("memory", "nccl", "checkpoint"),
    "transport": ("auto", "nccl", "gloo"),
    "encoding": ("full", "delta"),
    "verify": ("full", "bucket"),
    "wire_dtype": (None, *_FLOATING),
}
_LONGEST_S = 7 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class WeightSyncSettings:
    """The keys of ``engine_kwargs.<backend>``, equal on all members."""

    mode: str = "memory"  # memory: shared memory of the node; nccl: a process group; checkpoint: a shared folder
    timeout_s: float = 600.0  # of every wait for another member, besides the time for the buckets under way
    min_rate_mbps: float | None = 100.0  # slowest rate at which these may move, Mbit/s; None: they get no time
    bucket_mb: int = 64  # MiB, at most verl's ``update_weights_bucket_megabytes``
    wire_dtype: str | None = None  # of floating tensors, such as ``BF16``; None: the trainer's dtype
    verify: str = "full"  # full: the digests of each bucket and of the version; bucket: of each bucket
    transport: str = "auto"  # in mode nccl: nccl between GPUs, gloo between CPUs, auto: nccl where there are GPUs
    dir: str | None = None  # in mode checkpoint: the folder
    encoding: str = "full"  # in mode nccl: delta: what has changed since the version before, over copies in CPU memory


def read(given: Mapping[str, object], backend: str) -> WeightSyncSettings:
    """Return the settings of the keys that verl hands over for a backend; ConfigError: names the wrong key."""
    for key, value in given.items():
        if problem := _problem(key, value):
            raise ConfigError(f"{_place(backend)}{key}={value}: {problem}")
    settings = WeightSyncSettings(**given)  # type: ignore[arg-type]  # each was checked
    if settings.mode == "checkpoint" and settings.dir is None:
        raise ConfigError(f"{_place(backend)}dir is needed for mode=checkpoint: name a folder that all nodes share")
    if settings.mode != "checkpoint" and settings.dir is not None:
        raise ConfigError(f"{_place(backend)}dir={settings.dir} has no effect with mode={settings.mode}; leave it out")
    for key, usual in (("transport", "auto"), ("encoding", "full")):
        if settings.mode != "nccl" and (value := given.get(key, usual)) != usual:
            raise ConfigError(f"{_place(backend)}{key}={value} has no effect with mode={settings.mode}; leave it out")
    return settings


def _place(backend: str) -> str:
    return f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{backend}."


def _problem(key: str, value: object) -> str | None:
    known = [field.name for field in dataclasses.fields(WeightSyncSettings)]
    if key not in known:
        return f"there is no such key{near(key, known)}; the keys are {', '.join(known)}"
    if key in _CHOICES:
        choices = _CHOICES[key]
        return None if value in choices else f"expected one of {', '.join(str(one or 'null') for one in choices)}"
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if key == "timeout_s":
        return None if 0 < number <= _LONGEST_S else "expected seconds, above 0 and at most a week"
    if key == "min_rate_mbps":
        fine = value is None or 0 < number < math.inf
        return None if fine else "expected a number of Mbit/s above 0, or null"
    if key == "bucket_mb":
        fine = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if fine else "expected a whole number of MiB, at least 1"
    fine = value is None or (isinstance(value, str) and Path(value).is_absolute())
    return None if fine else "expected an absolute path, since members work in different folders"


# ---- members and places


class Node(NamedTuple):
    """A place where memory can be shared: one kernel and one PID namespace."""

    host: str  # for messages
    boot: str  # the id of the kernel's boot
    pids: int  # the inode of the PID namespace: a container has its own


@dataclass(frozen=True)
class MemberReady:
    """A member's data, once it is prepared."""

    node: Node
    pid: int
    settings: WeightSyncSettings
    address: SenderAddress | None = None  # of a sender
    meeting: str | None = None  # of a sender: `BucketSender.meeting`
    held: str | None = None  # the version that it has a copy of: `MemberPlace.version` of that sync


@dataclass(frozen=True)
class Sender:
    """A sender's data for its receivers."""

    name: str
    address: SenderAddress
    meeting: str | None


@dataclass(frozen=True)
class MemberPlace:
    """A member's role in a sync. A gatherer takes part in the trainer's gathers, and sends nothing."""

    role: Literal["sender", "receiver", "gatherer"]
    index: int  # among the members of its role
    name: str  # for the errors of other members
    senders: tuple[Sender, ...]
    receivers: tuple[str, ...]
    version: str  # drawn anew for each sync
    follows: bool  # all senders and receivers have a copy of one version: this one may travel as deltas over it


def this_process(
    settings: WeightSyncSettings, address: SenderAddress | None, meeting: str | None, held: str | None = None
) -> MemberReady:
    """Return this process's data."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = Node(socket.gethostname(), boot, Path("/proc/self/ns/pid").stat().st_ino)
    return MemberReady(node, os.getpid(), settings, address, meeting, held)


def place(
    ranks: Sequence[MemberReady], rollout: Sequence[MemberReady], *, all_send: bool
) -> tuple[list[MemberPlace], list[MemberPlace]]:
    """Give every member its place. `ranks`: the trainer's, in order. Returns the places of the trainer's ranks and of
    the receivers.
    """
    if not ranks or not rollout:
        raise RunError(f"weights cannot be sent from {len(ranks)} trainer ranks to {len(rollout)} receivers")
    names = [_named("trainer rank", number, ready) for number, ready in enumerate(ranks)]
    receivers = tuple(_named("rollout worker", number, ready) for number, ready in enumerate(rollout))
    _check_alike([*ranks, *rollout], [*names, *receivers])
    sending = len(ranks) if all_send else 1
    if ranks[0].settings.mode == "memory":
        _check_one_node([*ranks[:sending], *rollout], [*names[:sending], *receivers])
    senders = tuple(_sender(name, ready) for name, ready in zip(names[:sending], ranks[:sending], strict=True))
    held = {ready.held for ready in (*ranks[:sending], *rollout)}
    shared = senders, receivers, secrets.token_hex(8), len(held) == 1 and None not in held
    of_ranks = [
        MemberPlace("sender", number, name, *shared)
        if number < sending
        else MemberPlace("gatherer", number - sending, name, *shared)
        for number, name in enumerate(names)
    ]
    return of_ranks, [MemberPlace("receiver", number, name, *shared) for number, name in enumerate(receivers)]


def _named(kind: str, number: int, ready: MemberReady) -> str:
    return f"{kind} {number} (pid {ready.pid} on {ready.node.host})"


def _sender(name: str, ready: MemberReady) -> Sender:
    if ready.address is None:
        raise RunError(f"{name} was not made as the trainer's first rank, so receivers cannot connect to it")
    return Sender(name, ready.address, ready.meeting)


def _check_alike(members: Sequence[MemberReady], names: Sequence[str]) -> None:
    for ready, name in zip(members, names, strict=True):
        if ready.settings != members[0].settings:
            raise RunError(f"{name} has {ready.settings}, {names[0]} has {members[0].settings}: they must be equal")


def _check_one_node(members: Sequence[MemberReady], names: Sequence[str]) -> None:
    for ready, name in zip(members, names, strict=True):
        if (ready.node.boot, ready.node.pids) != (members[0].node.boot, members[0].node.pids):
            raise RunError(
                f"{name} shares no memory with {names[0]}: they run on different nodes, or in different containers. "
                "Set engine_kwargs' mode to nccl (over the network) or to checkpoint (through a shared folder)"
            )
