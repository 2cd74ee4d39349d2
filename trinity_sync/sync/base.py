"""The seam between the sync modes and the rest: what a mode does in the driver, in a rank and in an explorer.

A mode is a `SyncMode`, the class that its option file under `conf/sync` names. A version arrives *sealed* (all ranks
staged, digests known). Then

1. driver: `Publisher.publish(sealed)` makes the bytes available and commits the version at the synchronizer;
2. driver: `Publisher.deliver(explorers, version)` has the explorers load it and returns their reports;
3. rank, of a mode in which `ranks_take_part`: `SyncMode.send(broadcast, ...)` sends what the rank has staged;
4. explorer: `Transport.buckets(lease, broadcast, find_destination)` yields the buckets of the parts, or other pieces,
   one after another; `sync.loading` checks and applies them. Or, where an explorer's processes read by themselves,
   `PartMaps.map(lease)` maps the parts where they lie.

Whatever fails raises; the version before stays in force.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import ANSWER_S, results
from trinity_sync.actors.explorer_client import ExplorerClient, LoadReport
from trinity_sync.actors.rank_client import Broadcast, RankClient
from trinity_sync.actors.synchronizer_client import Sealed, SynchronizerClient
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.weights.layout import Cut, PartLayout, Segment

if TYPE_CHECKING:
    import mmap

    import torch


class StateDictStore(Protocol):
    """The checkpoint package's side of a weights-only save, passed in."""

    def begin(self, version: Version, nodes: list[str]) -> Path:
        """A staging folder for the version; one part per node is expected."""
        ...

    def part_written(self, version: Version, node: str, files: list[tuple[str, int, str]]) -> None:
        """A node's files: (path relative to the folder, bytes, xxh3_128 hex)."""
        ...

    def commit(self, version: Version, digest: str | None) -> Path:
        """Wait until the version is committed and return its folder."""
        ...

    def fail(self, version: Version, error: str) -> None:
        """The version will not be completed; its staging folder goes."""
        ...


LeaseFolder = Callable[[Path, Version], AbstractContextManager[Callable[[], None]]]
"""Keeps the folder of a version from being deleted while the context is open; raises `RunError` where it is gone. Ends
by itself some time after the last call of what the context gives, so that who hangs holds nothing up for ever.
"""


@dataclass(frozen=True, kw_only=True)
class TrainerSide:
    """What the modes may ask of the trainer's side, passed in so that packages stay apart.

    Attributes:
        synchronizer: the run's synchronizer.
        agents: Ray node id -> agent.
        ranks: of the trainer, in order.
        timeout_s: limit of each wait (`sync.timeout_s`).
        use_gpu: the run trains and explores on GPUs.
        store: where weights-only checkpoints go; None: nowhere.
    """

    synchronizer: SynchronizerClient
    agents: Mapping[str, AgentClient]
    ranks: Sequence[RankClient]
    timeout_s: float
    use_gpu: bool = False
    store: StateDictStore | None = None


@dataclass(frozen=True, kw_only=True)
class ExplorerSide:
    """What the modes may ask of an explorer's side.

    Attributes:
        name: of the receiver: the explorer, or the process of it that receives.
        node: Ray id of the node that it is on.
        agents: Ray node id -> agent.
        layouts: layouts that were seen before.
        timeout_s: limit of each wait (`sync.timeout_s`).
        settings: the keys of `sync`, from which processes of the explorer build the mode for themselves.
        lease_folder: keeps a version's folder while it is read; None: nobody deletes folders.
        still_leased: tells whether a lease lasts still, by its id.
    """

    name: str
    node: str
    agents: Mapping[str, AgentClient]
    layouts: LayoutCache
    timeout_s: float
    settings: Mapping[str, object] = field(default_factory=dict)
    lease_folder: LeaseFolder | None = None
    still_leased: Callable[[int], bool] = lambda lease_id: True


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

    layout: PartLayout
    number: int
    data: Segment | None
    digest: bytes | None
    cut: Cut = "bucket"


FindDestination = Callable[[PartLayout, int, Cut], "torch.Tensor | None"]
"""`Receiver.destination`: where a piece (layout, number, cut) may be received without a copy afterwards, or None."""


class SyncMode(ABC):
    """A sync mode, as driver, ranks and explorers build it, each for itself.

    Args:
        settings: the keys of `sync` by name. A subclass names those that it needs, and its own, and leaves the rest to
            ``**settings``.

    Attributes:
        ranks_take_part: the trainer's ranks take part in a load, so explorers cannot load whenever they like.
    """

    ranks_take_part: ClassVar[bool] = False

    def __init__(self, **settings: object) -> None:
        super().__init__()

    @abstractmethod
    def publisher(self, side: TrainerSide) -> Publisher:
        """The driver's half."""

    @abstractmethod
    def transport(self, side: ExplorerSide) -> Transport:
        """The explorer's half."""

    def maps(self, side: ExplorerSide) -> PartMaps | None:
        """How processes of an explorer map the parts of a version where they lie; None: its bytes have to be received
        by the `transport`. A mode that derives from one that maps, and changes its transport, says here what holds.
        """
        return None

    def send(self, broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
        """Do a trainer rank's share of a broadcast; of modes whose `ranks_take_part`.

        Args:
            broadcast: what the publisher has all take part in.
            part: name of the part that the rank staged.
            layout: how that is laid out.
            segment: the slot's bytes, mapped.

        Returns:
            Bytes sent.
        """
        raise RunError(f"{type(self).__name__} has nothing for a trainer rank to send")


class Publisher(Protocol):
    """The driver's half of a sync mode."""

    def publish(self, sealed: Sealed) -> None:
        """Make the version available to explorers and commit it. Blocks until it is."""
        ...

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        """Have the explorers (by name) load the version."""
        ...


class Transport(Protocol):
    """The explorer's half of a sync mode: where the bytes of a leased version come from."""

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        """Every piece of every part once. Once the generator is closed nothing is written any more."""
        ...


class MappedPart(NamedTuple):
    """A part of a version where it lies.

    Attributes:
        layout: what lies where in it.
        data: its bytes, ``layout.nbytes`` of them or more, read-only; mapped for as long as anything refers to them.
        buckets: 16 bytes per bucket that they digest to; None where only the whole version is checked, or nothing.
    """

    layout: PartLayout
    data: Segment
    buckets: Sequence[bytes] | None


class PartMaps(Protocol):
    """Where the parts of leased versions can be mapped, by any process of a node."""

    def map(self, lease: Lease) -> list[MappedPart]:
        """All parts, in the order of their names. Their bytes are the version's for as long as the lease lasts, and in
        a folder for as long as that is kept (`LeaseFolder`).

        Raises:
            RunError: a part is not there, or is another one than was staged.
        """
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
