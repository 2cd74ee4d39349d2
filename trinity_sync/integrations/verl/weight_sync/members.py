"""Who takes part in a sync: what each member says of itself beforehand, and what it is told of the others.

Imports no torch: `place` runs in verl's driver.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.settings import Settings


class Node(NamedTuple):
    """Where memory can be shared: one kernel, and one space of process numbers in it.

    Attributes:
        host: the host's name, for messages.
        boot: what tells this kernel's run from all others.
        pids: what tells the space of process numbers (a container has one of its own).
    """

    host: str
    boot: str
    pids: int


class Address(NamedTuple):
    """Where a sender is reached, and what one has to know to be let in."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True)
class Ready:
    """What a member says when it is prepared.

    Attributes:
        node: where it runs.
        pid: its process.
        settings: its own.
        address: where receivers reach it, where it can send; else None.
        meeting: what the mode has receivers know of a sender: for nccl the port of the store where the group meets,
            for checkpoint the folder of the version's lease.
    """

    node: Node
    pid: int
    settings: Settings
    address: Address | None = None
    meeting: int | str | None = None


@dataclass(frozen=True)
class Sender:
    """A sender as receivers have to know it."""

    name: str
    address: Address
    meeting: int | str | None


@dataclass(frozen=True)
class Place:
    """What a member is told.

    Attributes:
        role: ``sender``; ``receiver``; ``gatherer``: takes part in the trainer's gathers, and sends nothing.
        index: its place among those of its role.
        name: its own, for messages to others.
        senders, receivers: all of them.
    """

    role: Literal["sender", "receiver", "gatherer"]
    index: int
    name: str
    senders: tuple[Sender, ...]
    receivers: tuple[str, ...]


def this_node() -> Node:
    """Return the node of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Node(socket.gethostname(), boot, Path("/proc/self/ns/pid").stat().st_ino)


def this_process(settings: Settings, address: Address | None, meeting: int | str | None) -> Ready:
    """Return what this process says of itself."""
    return Ready(this_node(), os.getpid(), settings, address, meeting)


def place(ranks: Sequence[Ready], rollout: Sequence[Ready], *, all_send: bool) -> tuple[list[Place], list[Place]]:
    """Give every member its place.

    Args:
        ranks: the trainer's, in the order of their ranks.
        rollout: the receivers.
        all_send: whether each trainer rank sends what it holds; else rank 0 sends all, and the others gather.

    Returns:
        The places of the trainer's ranks and of the receivers.

    Raises:
        RunError: there is nobody to send or to receive, the settings differ, or memory is not shared by all.
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
    of_ranks = [
        Place("sender", number, name, senders, receivers)
        if number < sending
        else Place("gatherer", number - sending, name, senders, receivers)
        for number, name in enumerate(names)
    ]
    return of_ranks, [Place("receiver", number, name, senders, receivers) for number, name in enumerate(receivers)]


def _named(kind: str, number: int, ready: Ready) -> str:
    return f"{kind} {number} (pid {ready.pid} on {ready.node.host})"


def _sender(name: str, ready: Ready) -> Sender:
    if ready.address is None:
        raise RunError(f"{name} was not made as the trainer's first rank, so nobody can reach it to get weights")
    return Sender(name, ready.address, ready.meeting)


def _check_alike(members: Sequence[Ready], names: Sequence[str]) -> None:
    for ready, name in zip(members, names, strict=True):
        if ready.settings != members[0].settings:
            raise RunError(f"{name} has {ready.settings}, {names[0]} has {members[0].settings}: they must be equal")


def _check_one_node(members: Sequence[Ready], names: Sequence[str]) -> None:
    for ready, name in zip(members, names, strict=True):
        if (ready.node.boot, ready.node.pids) != (members[0].node.boot, members[0].node.pids):
            raise RunError(
                f"{name} shares no memory with {names[0]}: they run on different nodes, or in different containers. "
                "Set engine_kwargs' mode to nccl (over the network) or to checkpoint (through a shared folder)"
            )
