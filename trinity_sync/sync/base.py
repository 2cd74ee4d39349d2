"""The interface of a sync mode: its parts in the driver, in a trainer rank and in an explorer.

A mode is a `SyncMode`, the class that its option file under `conf/sync` names. A version arrives *sealed* (all ranks
staged, digests known). Then

1. driver: `Publisher.publish(sealed)` makes the bytes available and commits the version at the synchronizer;
2. driver: `Publisher.deliver(explorers, version)` has the explorers load it and returns their reports;
3. rank, in a mode whose `ranks_take_part`: `SyncMode.send(broadcast, ...)` sends the part that the rank staged;
4. explorer: `Transport.buckets(lease, broadcast, find_destination)` yields the pieces of the parts one after another,
   which `sync.weight_loader` checks and applies. Where an explorer's processes read by themselves,
   `PartMaps.map(lease)` maps the parts.

Errors are raised; the version before stays in force.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import ExplorerClient, LoadReport
from trinity_sync.actors.pending import ANSWER_S
from trinity_sync.actors.rank_client import Broadcast, RankClient
from trinity_sync.actors.synchronizer_client import SealedVersion, SynchronizerClient
from trinity_sync.errors import RunError, WaitTimeout, grown
from trinity_sync.protocol.parts import PartInfo, VersionBytes
from trinity_sync.protocol.versions import LOAD_HOPS, Lease, Version
from trinity_sync.weights.layout import Cut, PartLayout, Segment

if TYPE_CHECKING:
    import mmap

    import torch

    from trinity_sync.sync.links import BucketNotice, End, Hub, Spoke


class StateDictStore(Protocol):
    """The checkpoint package's side of a weights-only save, passed in."""

    def begin(self, version: Version, nodes: list[str]) -> Path:
        """Return the staging folder of a version, in which one part per node is expected."""
        ...

    def part_written(self, version: Version, node: str, files: list[tuple[str, int, str]]) -> None:
        """Take a node's files: (path relative to the folder, bytes, xxh3_128 hex)."""
        ...

    def commit(self, version: Version, digest: str | None) -> Path:
        """Wait until the version is committed and return its folder."""
        ...

    def fail(self, version: Version, error: str) -> None:
        """Delete the staging folder of a version that will not be completed."""
        ...

    def keep(self, folder: Path, target: Path) -> None:
        """Keep a committed version in another folder as well, whatever becomes of the first one."""
        ...


class VersionStore(Protocol):
    """The checkpoint package's side of a place that followers read (`sync.store`), passed in."""

    def add(self, version: Version, digest: str | None, full: Path | None, deltas: Sequence[Path]) -> None:
        """Have a published version copied, in the background. Never raises, and does not wait for the place. `full`:
        its weights-only checkpoint. `deltas`: files of `part_delta`. Both may be deleted after the call.
        """
        ...


LeaseFolder = Callable[[Path, Version], AbstractContextManager[Callable[[], None]]]
"""Keeps a version's folder from deletion while the context is open; RunError: the folder is gone. Expires unless the
function that the context yields is called, so a hung reader cannot block deletion.
"""


@dataclass(frozen=True, kw_only=True)
class TrainerSide:
    """The trainer's side, as a publisher sees it."""

    synchronizer: SynchronizerClient
    agents: Mapping[str, AgentClient]  # by Ray node id
    ranks: Sequence[RankClient]
    timeout_s: float  # of each wait: a `WaitLimit`, which `grown` makes longer for bytes
    version_bytes: VersionBytes = field(default_factory=VersionBytes)
    use_gpu: bool = False
    store: StateDictStore | None = None  # of weights-only checkpoints
    explorer_nodes: Callable[[], Mapping[str, str]] = dict  # Ray's ids of the explorers' nodes, by name
    deltas: Path | None = None  # folder of the deltas between versions, in that of the checkpoints
    versions: VersionStore | None = None  # to which published versions are copied
    base_every: int | None = None  # versions from one base of the history to the next; None: there is no history


class LayoutCache:
    """Layouts by digest, each fetched once from the agent that has the part.

    Args:
        agents: by Ray node id.
        timeout_s: timeout of a fetch, seconds.
    """

    def __init__(self, agents: Mapping[str, AgentClient], timeout_s: float) -> None:
        self._agents = agents
        self._timeout_s = timeout_s
        self._known: dict[str, PartLayout] = {}

    def get(self, info: PartInfo) -> PartLayout:
        """Return the layout of a part; RunError: the agent has another one than the version was staged in."""
        if info.layout not in self._known:
            agent = self._agents[info.node]
            layout = agent.layout(info.part).result(self._timeout_s)
            if layout.digest != info.layout:
                raise RunError(
                    f"{agent.who} describes {info.part} by layout {layout.digest}, the version was staged in "
                    f"{info.layout}"
                )
            self._known[info.layout] = layout
        return self._known[info.layout]

    def learn(self, layout: PartLayout) -> None:
        """Add a layout that another process has fetched."""
        self._known[layout.digest] = layout

    def tensor_digests(self, version: Version) -> dict[str, bytes]:
        """Return the 16-byte digests of a version's tensors as they were staged; empty where no agent has them."""
        found: dict[str, bytes] = {}
        for agent in self._agents.values():
            found |= agent.tensor_digests(version).result(self._timeout_s)
        return found


@dataclass(frozen=True, kw_only=True)
class ExplorerSide:
    """An explorer's side, as a transport sees it."""

    name: str  # of the explorer, or of its process that receives
    node: str  # Ray's id
    agents: Mapping[str, AgentClient]  # by Ray node id
    layouts: LayoutCache
    timeout_s: float  # of each wait: a `WaitLimit`, which `grown` makes longer for bytes
    settings: Mapping[str, object] = field(default_factory=dict)  # of `sync`, for processes that build the mode
    lease_folder: LeaseFolder | None = None  # None: no program deletes folders
    still_leased: Callable[[int], bool] = lambda lease_id: True
    on_fault: Callable[[str], None] = lambda error: None  # called with each error on the way that was overcome


@dataclass
class Delivery:
    """The outcome of a delivery: the reports of the explorers that loaded the version, and the error of each explorer
    that died, whose leases the caller ends.
    """

    reports: list[LoadReport] = field(default_factory=list)
    lost: dict[str, Exception] = field(default_factory=dict)


class Bucket(NamedTuple):
    """One piece of a part."""

    layout: PartLayout  # `PartLayout` of the part
    number: int  # of the piece
    # Its bytes, valid until the next piece is asked for, or as `lasts` has it; None where they are in their destination
    # already.
    data: Segment | None
    digest: bytes | None  # of the bytes; None where only the whole version is checked, or nothing
    cut: Cut = "bucket"  # the kind of pieces, see `PartLayout.pieces`
    moved: int | None = None  # bytes that travelled for it; None: all of its bytes
    apply_s: float = 0.0  # that deltas took to apply
    lasts: bool = False  # `data` is valid until all pieces have been asked for


FindDestination = Callable[[PartLayout, int, Cut], "torch.Tensor | None"]
"""`Receiver.destination`: the tensor into which a piece (layout, number, cut) can arrive without a copy, or None."""


@runtime_checkable
class Places(Protocol):
    """Destinations (a `FindDestination`) whose bits can be read back, such as `weights.apply.Receiver`."""

    def __call__(self, layout: PartLayout, number: int, cut: Cut) -> torch.Tensor | None: ...

    def read(self, layout: PartLayout, number: int, cut: Cut, into: memoryview) -> None:
        """Write the bits of a piece, in the dtype in which it travels, to memory of its length."""
        ...


class SyncMode(ABC):
    """A sync mode. The driver, each rank and each explorer build one of their own.

    Args:
        settings: the keys of `sync` by name. A subclass names the keys that it needs, and its own, and leaves the rest
            to ``**settings``.

    Attributes:
        ranks_take_part: a load needs the trainer's ranks, so explorers cannot load at any time.
        agents_bring_parts: explorers read parts of other nodes through the agent of their node.
    """

    ranks_take_part: ClassVar[bool] = False
    agents_bring_parts: ClassVar[bool] = False

    def __init__(self, **settings: object) -> None:
        super().__init__()

    @abstractmethod
    def publisher(self, side: TrainerSide) -> Publisher:
        """The driver's half."""

    @abstractmethod
    def transport(self, side: ExplorerSide) -> Transport:
        """The explorer's half."""

    def maps(self, side: ExplorerSide) -> PartMaps | None:
        """Return how processes of an explorer map the parts of a version; None: the `transport` has to receive them. A
        subclass of a mode that maps overrides this together with `transport`.
        """
        return None

    def copies(self, side: ExplorerSide) -> LocalCopies | None:
        """Return the copies that processes map in place of the parts; None: only parts of other nodes are copied."""
        return None

    def send(self, broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
        """Do a trainer rank's share of a broadcast, in modes whose `ranks_take_part`.

        Args:
            broadcast: from the publisher.
            part: name of the part that the rank staged.
            layout: of the part.
            segment: the slot's bytes, mapped.

        Returns:
            Bytes sent.
        """
        raise RunError(f"{type(self).__name__} has nothing for a trainer rank to send")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A publisher's report on a version. `nbytes` are those that were made to be sent."""

    encoding: str
    nbytes: int
    codec: str | None = None
    changed: float | None = None  # share of the elements
    changed_ppm: Mapping[str, int] | None = None  # by `layer_group`
    encode_s: float | None = None  # seconds for its deltas
    fault: str | None = None  # why they could not be made


class Publisher(Protocol):
    """The driver's half of a sync mode."""

    def publish(self, sealed: SealedVersion) -> Published | None:
        """Make the version available to explorers and commit it."""
        ...

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        """Have the explorers (by name) load the version."""
        ...


class Transport(Protocol):
    """The explorer's half of a sync mode: the source of a leased version's bytes."""

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        """Yield every piece of every part once. After the generator is closed, no destination is written to."""
        ...


class BucketTransfer(ABC):
    """How a mode carries the buckets of programs without slots, such as verl's; one object for all syncs of a member.

    For each sync a sender makes a `BucketSender`, whose `meeting` travels to the receivers. Once the members are linked
    (`sync.links`), it calls `BucketSender.connect`, and each receiver `receiver`. For each bucket follow
    `BucketSender.room` and `put`, and `BucketReceiver.take`; then `BucketSender.end`; and `close` of both, also after
    an error.
    """

    @abstractmethod
    def sender(self, host: str) -> BucketSender:
        """Prepare a sync at a sender, whose node has this address; RunError, WaitTimeout: it cannot be prepared."""

    @abstractmethod
    def receiver(self, spoke: Spoke, meeting: str | None, index: int, receivers: int) -> BucketReceiver:
        """Begin to receive, as receiver `index` of so many; errors as of `BucketSender.connect`."""


class BucketSender(ABC):
    """A sender's half of one sync.

    Attributes:
        meeting: what the receivers need to know of this sender.
    """

    meeting: str | None = None

    def connect(self, hub: Hub, receivers: int) -> None:
        """Begin to send; returns once all receivers can receive. RunError, WaitTimeout: they cannot."""
        self._hub = hub

    @abstractmethod
    def room(self, nbytes: int) -> torch.Tensor:
        """Return memory for the next bucket (uint8, at least `nbytes` long), once it is free."""

    @abstractmethod
    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        """Send bucket `number` (from 0): `data` in the memory of `room`, with the xxh3_128 digest of its bytes. Where
        `data` is shorter than the layout, it is the bucket's delta.
        """

    def end(self, end: End) -> None:
        """Tell the receivers that all buckets were sent. Errors as of `put`."""
        self._hub.tell(end)

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Release the memory, group or folder of this sync. May be called before `connect`, and again."""


class BucketReceiver(ABC):
    """A receiver's half of one sync, for one sender.

    Attributes:
        device: where buckets arrive; None: in the CPU's memory.
    """

    device: torch.device | None = None

    @abstractmethod
    def take(self, bucket: BucketNotice, into: torch.Tensor) -> None:
        """Write a bucket's bytes, or its delta, to a tensor of `device` (uint8, of that length)."""

    def close(self, *, failed: bool) -> None:  # noqa: B027 - a receiver may have nothing to release
        """Release the group or folder."""


class MappedPart(NamedTuple):
    """A mapped part of a version."""

    layout: PartLayout  # of the part
    data: Segment  # its bytes, ``layout.nbytes`` or more, read-only; mapped as long as anything refers to them
    # A digest of 16 bytes per bucket; None where only the whole version is checked, or nothing.
    buckets: Sequence[bytes] | None


class PartMaps(Protocol):
    """Maps the parts of leased versions, in any process of a node."""

    def map(self, lease: Lease) -> list[MappedPart]:
        """Return all parts, in the order of their names. Their bytes are the version's as long as the lease lasts, and
        in a folder as long as that is leased (`LeaseFolder`).

        Raises:
            RunError: a part is missing, or has another layout than was staged.
        """
        ...


class LocalCopies(Protocol):
    """Files of this node with the parts of the version that was localized last. `moved`: bytes that were read for it;
    None: all of its bytes. `apply_s`: as of `LoadReport`.
    """

    moved: int | None
    apply_s: float

    def localize(self, lease: Lease) -> Lease: ...

    def close(self) -> None: ...


def commit(side: TrainerSide, version: Version, location: str | None = None) -> None:
    """Make a version the newest one for all readers. `location`: its folder, where readers need one."""
    side.synchronizer.commit(version, location).result(side.synchronizer.timeout_s)


def nodes_of(parts: Mapping[str, PartInfo]) -> list[str]:
    """Return Ray's ids of the nodes that have parts."""
    return sorted({info.node for info in parts.values()})


def is_near(node: str, parts: Mapping[str, PartInfo]) -> bool:
    """Whether all parts of a version are on a node, so that none has to travel there."""
    return nodes_of(parts) == [node]


def deliver_each(side: TrainerSide, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
    """Have all explorers load concurrently, for modes in which a load depends on no other load. The limit is that of
    all hops of a load, so an explorer's own error, which names the hop, comes first.
    """
    from trinity_sync.actors.calls import results  # imports Ray, which vLLM's workers may lack

    calls = [explorer.load(version) for explorer in explorers.values()]
    limit_s = grown(side.timeout_s, LOAD_HOPS * side.version_bytes.whole, more_s=ANSWER_S)
    try:
        return Delivery(reports=results(calls, limit_s))
    except WaitTimeout as late:
        if calls and late.what == calls[0].what:  # an explorer's own error says more
            _check_synchronizer(side.synchronizer, late)
        raise


def _check_synchronizer(synchronizer: SynchronizerClient, late: WaitTimeout) -> None:
    """Raise an error about the synchronizer where it does not answer, so that late explorers wait for it."""
    try:
        synchronizer.newest().result(ANSWER_S)
    except WaitTimeout:
        what = f"answer while {late.who} tried to {late.what}"
        raise WaitTimeout("the synchronizer", what, late.seconds) from late
