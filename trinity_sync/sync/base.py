"""The seam between the sync modes and the rest: what a mode does on the trainer's side and on an explorer's.

A version arrives *sealed* (all ranks staged, digests known). Then

1. driver: `SyncMode.publish(sealed)` makes the bytes available and commits the version at the synchronizer;
2. driver: `SyncMode.deliver(explorers, version)` has the explorers load it and returns their reports;
3. explorer: `Transport.buckets(lease, broadcast, find_room)` yields the buckets of the parts, or other pieces, one
   after another; `sync.loading` checks and applies them.

Whatever fails raises; the version before stays in force.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from trinity_sync.actors.agent import AgentClient
from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.actors.calls import ANSWER_S, results
from trinity_sync.actors.explorer import ExplorerClient, LoadReport
from trinity_sync.actors.rank import RankClient
from trinity_sync.actors.synchronizer import Sealed, SynchronizerClient
from trinity_sync.errors import WaitTimeout
from trinity_sync.protocol.versions import Lease, Version


@dataclass(frozen=True, kw_only=True)
class TrainerSide:
    """What the modes may ask of the trainer's side, passed in so that rooms stay apart.

    Attributes:
        synchronizer: the run's synchronizer.
        agents: Ray node id -> agent.
        ranks: of the trainer, in order.
        timeout_s: limit of each wait (`sync.timeout_s`).
    """

    synchronizer: SynchronizerClient
    agents: Mapping[str, AgentClient]
    ranks: Sequence[RankClient]
    timeout_s: float


@dataclass
class Delivery:
    """The outcome of having explorers load a version: reports of those that did, and the error of each that is gone,
    whose leases the caller ends.
    """

    reports: list[LoadReport] = field(default_factory=list)
    lost: dict[str, Exception] = field(default_factory=dict)


class Bucket(NamedTuple):
    """What a transport hands out.

    Attributes:
        layout: `PartLayout` of the part.
        number: of the piece.
        data: its bytes, valid until the next one is asked for; None where they are in their place already.
        digest: what they digest to, None where only the whole version is checked, or nothing.
        cut: what pieces the part is in, see `PartLayout.pieces`.
    """

    layout: Any
    number: int
    data: Any
    digest: bytes | None
    cut: Any = "bucket"


FindRoom = Callable[[Any, int, Any], Any]
"""`Receiver.room`: where a piece (layout, number, cut) may be received without a copy afterwards, or None."""


class SyncMode(Protocol):
    """The driver's half of a sync mode."""

    name: str

    def publish(self, sealed: Sealed) -> None:
        """Make the version available to explorers and commit it. Blocks until it is."""
        ...

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        """Have the explorers (by name) load the version."""
        ...


class Transport(Protocol):
    """The explorer's half of a sync mode: where the bytes of a leased version come from."""

    def buckets(self, lease: Lease, broadcast: Broadcast | None, find_room: FindRoom) -> Generator[Bucket, None, None]:
        """Every piece of every part once. Once the generator is closed nothing is written any more."""
        ...


def deliver_each(side: TrainerSide, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
    """Have all explorers load side by side, each at its own pace: for modes in which loads do not depend on each
    other.
    """
    calls = [explorer.load(version) for explorer in explorers.values()]
    try:
        return Delivery(reports=results(calls, side.timeout_s + ANSWER_S))
    except WaitTimeout as late:
        if calls and late.what == calls[0].what:  # an explorer's own word says more
            _check_synchronizer(side.synchronizer, late)
        raise


def _check_synchronizer(synchronizer: SynchronizerClient, late: WaitTimeout) -> None:
    """Say so where it is the synchronizer for whom somebody who is late waits."""
    try:
        synchronizer.newest().result(ANSWER_S)
    except WaitTimeout:
        what = f"answer while {late.who} was to {late.what}"
        raise WaitTimeout("the synchronizer", what, late.seconds) from late
