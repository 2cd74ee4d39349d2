"""`sync=memory`: explorers on the node map the slot; to other nodes the node agents bring the parts (`pieces`).

verl's weight sync in mode memory has no slots and no agent: its buckets lie in a `SharedRoom` of the sender.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import ray

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.errors import RunError, grown
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import (
    Bucket,
    BucketReceiver,
    BucketSender,
    BucketTransfer,
    Delivery,
    ExplorerSide,
    FindDestination,
    LayoutCache,
    Published,
    SyncMode,
    TrainerSide,
    Transport,
    commit,
    deliver_each,
)
from trinity_sync.sync.deltas import (
    DeltaCopies,
    Deltas,
    DeltaTransport,
    VersionDeltas,
    fetch_delta,
    read_chain,
    shared_deltas,
)
from trinity_sync.sync.links import BucketNotice, Hub, Spoke
from trinity_sync.sync.maps import SlotMaps
from trinity_sync.sync.pieces import WantedPart
from trinity_sync.weights.slots import MappedSegments

if TYPE_CHECKING:
    import torch

    from trinity_sync.config.schema import DeltaConfig
    from trinity_sync.weights.layout import PartLayout


class MemoryMode(SyncMode):
    """Versions stay in their slots.

    Args:
        encoding: ``full``; ``delta``: explorers fetch what has changed; ``auto``: those on a node that has not all
            parts (`sync.encoding`).
        delta: how deltas are made; not for ``full``.
    """

    agents_bring_parts = True

    _delta: DeltaConfig | None = None
    _always = True

    def __init__(self, *, encoding: str = "full", delta: DeltaConfig | None = None, **settings: object) -> None:
        self._delta = None if encoding == "full" else delta
        self._always = encoding == "delta"

    def publisher(self, side: TrainerSide) -> MemoryPublisher:
        return MemoryPublisher(side, self._delta, always=self._always)

    def transport(self, side: ExplorerSide) -> MemoryTransport | DeltaTransport:
        return self._full(side) if self._delta is None else self._deltas(side)

    def _full(self, side: ExplorerSide) -> MemoryTransport:
        return MemoryTransport(side.agents, side.layouts, side.timeout_s, side.node, side.on_fault)

    def _deltas(self, side: ExplorerSide) -> DeltaTransport:
        return DeltaTransport(side, AgentDeltas(side, self._full(side)), always=self._always)

    def maps(self, side: ExplorerSide) -> SlotMaps:
        return SlotMaps(side.layouts)

    def copies(self, side: ExplorerSide) -> DeltaCopies | None:
        return None if self._delta is None else DeltaCopies(side, self._deltas(side))


class MemoryPublisher:
    """The driver's half. The slot is the transport: publishing is committing."""

    def __init__(self, side: TrainerSide, keys: DeltaConfig | None = None, *, always: bool = True) -> None:
        self._side = side
        self._deltas = None if keys is None else VersionDeltas(side, keys.codec, always=always)

    def publish(self, sealed: SealedVersion) -> Published | None:
        if self._deltas is not None:
            return self._deltas.publish(sealed)
        commit(self._side, sealed.version)
        return None

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        return deliver_each(self._side, explorers, version)


class AgentDeltas:
    """Deltas that the agents keep (a `DeltaSource`)."""

    def __init__(self, side: ExplorerSide, full: Transport) -> None:
        self.full = full
        self._side = side

    def find(self, lease: Lease, broadcast: Broadcast | None, held: Version | None) -> Deltas | None:
        if held is None:
            return None
        if held == lease.version:
            return Deltas([() for _ in lease.parts])
        limit, agents = self._side.timeout_s, self._side.agents
        shared = shared_deltas(agents, lease.version, held, lease.parts, limit)
        if shared is None:
            return None
        chains = []
        for part, info in sorted(lease.parts.items()):
            fetch = partial(fetch_delta, who=agents[info.node].who, timeout_s=limit)
            chains.append(read_chain(self._side.layouts.get(info), shared[part], lease.version, fetch))
        return Deltas(chains)

    def whole(self, lease: Lease) -> AbstractContextManager[tuple[Transport, Lease]]:
        return nullcontext((self.full, lease))


class MemoryTransport:
    """Reads slots of this node, each mapped once.

    Args:
        agents: by Ray node id.
        layouts: of the reader.
        timeout_s: timeout for a part from another node, seconds.
        node: Ray id of the reader's node; None: that of this process, as subclasses in other packages have it.
        on_fault: see `ExplorerSide`.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentClient],
        layouts: LayoutCache,
        timeout_s: float,
        node: str | None = None,
        on_fault: Callable[[str], None] = lambda error: None,
    ) -> None:
        self._agents = agents
        self._layouts = layouts
        self._timeout_s = timeout_s
        self._segments = MappedSegments(pinned=True)
        self._node = ray.get_runtime_context().get_node_id() if node is None else node
        self._on_fault = on_fault

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        from trinity_sync.weights.apply import in_buckets

        layouts = {part: self._layouts.get(info) for part, info in lease.parts.items()}
        for info in parts_here(self._agents, self._node, lease, self._timeout_s, self._on_fault):
            layout, segment = layouts[info.part], self._segments.get(info.path, info.nbytes)
            for number, data, digest in in_buckets(layout, segment, info.buckets):
                yield Bucket(layout, number, data, digest, lasts=True)


def parts_here(
    agents: Mapping[str, AgentClient], node: str, lease: Lease, timeout_s: float, on_fault: Callable[[str], None]
) -> Iterator[PartInfo]:
    """Yield the parts of a version by their names, each as soon as it is in a slot of a node. Those of other nodes are
    brought by the node's agent, once for all readers. They travel together, so the limit is that of all.
    """
    away = {part: info for part, info in sorted(lease.parts.items()) if info.node != node}
    if away and node not in agents:
        raise RunError(f"node {node} has no agent to bring {', '.join(away)} of version {lease.version} there")
    limit_s = grown(timeout_s, sum(info.nbytes for info in away.values()))
    coming = {
        part: agents[node].bring(
            WantedPart(lease.version, lease.slot, part, info.nbytes, agents[info.node], lease.again)
        )
        for part, info in away.items()
    }
    for part, info in sorted(lease.parts.items()):
        if part not in away:
            yield info
            continue
        brought = coming[part].result(limit_s)
        for error in brought.errors:
            on_fault(error)
        yield replace(info, node=node, path=brought.path)


class PartCopies:
    """Parts of other nodes for workers that map them (`LocalCopies`)."""

    moved: int | None = None
    apply_s = 0.0

    def __init__(self, side: ExplorerSide) -> None:
        self._side = side

    def localize(self, lease: Lease) -> Lease:
        """Return the lease with all parts on this node."""
        if lease.location is not None:  # files, which all nodes share
            return lease
        side = self._side
        here = parts_here(side.agents, side.node, lease, side.timeout_s, side.on_fault)
        return replace(lease, parts={info.part: info for info in here})

    def close(self) -> None:
        """Nothing to free: the agent has the parts."""


# ---- programs without slots: buckets lie in shared memory without a name, from which receivers copy them

_ROOMS = 2
"""One bucket is filled while the one before is copied."""


class RoomTransfer(BucketTransfer):
    """Buckets of a node."""

    def sender(self, host: str) -> RoomSender:
        return RoomSender()

    def receiver(self, spoke: Spoke, meeting: str | None, index: int, receivers: int) -> RoomReceiver:
        return RoomReceiver(spoke.sender)


class RoomSender(BucketSender):
    """Fills rooms in turn, each once all receivers have copied the bucket before."""

    def __init__(self) -> None:
        self._rooms: list[SharedRoom] = []
        self._count = 0

    def connect(self, hub: Hub, receivers: int) -> None:
        super().connect(hub, receivers)
        self._rooms += [SharedRoom() for _ in range(_ROOMS)]

    def room(self, nbytes: int) -> torch.Tensor:
        from trinity_sync.weights.tensors import byte_tensor

        if self._count >= _ROOMS:
            self._hub.wait_taken(self._count - _ROOMS)
        room = self._rooms[self._count % _ROOMS]
        self._count += 1
        return byte_tensor(room.bytes(nbytes))

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        self._hub.tell(BucketNotice(number, layout, digest, self._rooms[number % _ROOMS].source))

    def close(self, *, failed: bool) -> None:
        while self._rooms:
            self._rooms.pop().close()


class RoomReceiver(BucketReceiver):
    """Copies buckets out of the rooms of a sender."""

    def __init__(self, sender: str) -> None:
        self._sender = sender

    def take(self, bucket: BucketNotice, into: torch.Tensor) -> None:
        assert isinstance(bucket.source, tuple), "the sender is of the same mode"
        read_room(bucket.source, into.numpy().data, self._sender)


class SharedRoom:
    """Shared memory that no file system lists, and that grows.

    Other processes of the same user open it by this process and its descriptor. So two programs cannot meet in it, and
    the kernel frees it with the last process that has it open.

    Raises:
        RunError: the system has none.
    """

    def __init__(self) -> None:
        try:
            self._descriptor = os.memfd_create("trinity-sync-weights", os.MFD_CLOEXEC)
        except OSError as error:
            raise RunError(f"this system gives no shared memory without a name: {error}; set another mode") from error
        os.fchmod(self._descriptor, 0o600)
        self._mapped: mmap.mmap | None = None

    def bytes(self, nbytes: int) -> memoryview:
        """Return its bytes, at least so many, writable; RunError: there is not enough memory."""
        if self._mapped is None or len(self._mapped) < nbytes:
            self._mapped = None
            try:
                os.ftruncate(self._descriptor, nbytes)
                self._mapped = mmap.mmap(self._descriptor, nbytes)
            except (OSError, ValueError) as error:
                raise RunError(
                    f"there is no room for {nbytes} bytes of shared memory: {error}; lower bucket_mb"
                ) from error
        return memoryview(self._mapped)

    @property
    def source(self) -> tuple[int, int, int]:
        """Where other processes find it: process, descriptor, inode."""
        return os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino

    def close(self) -> None:
        """Free the memory, also where the traceback of an error still refers to the mapping."""
        os.close(self._descriptor)
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_REMOVE)
        self._mapped = None


def read_room(source: tuple[int, int, int], into: memoryview, owner: str) -> None:
    """Copy the first bytes of another process's room. A mapping would keep memory that its owner frees meanwhile."""
    pid, number, inode = source
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RunError(
            f"the memory of {owner} cannot be opened here ({error.strerror}): members have to run as one user on one "
            "node; else set engine_kwargs' mode to nccl or checkpoint"
        ) from error
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise RunError(f"process {pid} has other memory under its descriptor {number} than {owner} said")
        left, at = into, 0
        while left:
            count = os.preadv(descriptor, [left], at)
            if not count:
                raise RunError(f"the memory of {owner} ends after {at} bytes, before its bucket does")
            left, at = left[count:], at + count
    finally:
        os.close(descriptor)
