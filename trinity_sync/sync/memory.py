"""`sync=memory`: explorers on the node map the slot; other nodes get one object per part and version from the agent."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import ray

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import Sealed
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import (
    Bucket,
    Delivery,
    ExplorerSide,
    FindDestination,
    MappedPart,
    SyncMode,
    TrainerSide,
    deliver_each,
)
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.weights.slots import MappedSegments

if TYPE_CHECKING:
    import numpy as np

    from trinity_sync.weights.layout import Segment


class MemoryMode(SyncMode):
    """Versions stay in their slots."""

    def publisher(self, side: TrainerSide) -> MemoryPublisher:
        return MemoryPublisher(side)

    def transport(self, side: ExplorerSide) -> MemoryTransport:
        return MemoryTransport(side.agents, side.layouts, side.timeout_s, side.node)

    def maps(self, side: ExplorerSide) -> SlotMaps:
        return SlotMaps(side.layouts)


class MemoryPublisher:
    """The driver's half. The slot is the transport: publishing is committing."""

    def __init__(self, side: TrainerSide) -> None:
        self._side = side

    def publish(self, sealed: Sealed) -> None:
        synchronizer = self._side.synchronizer
        synchronizer.commit(sealed.version).result(synchronizer.timeout_s)

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        return deliver_each(self._side, explorers, version)


class MemoryTransport:
    """Reads slots: mapped once where they are on this node, fetched once per part and version where they are not.

    Args:
        agents: Ray node id -> agent.
        layouts: layouts that were seen before.
        timeout_s: limit of a fetch, seconds.
        node: Ray id of the node that the reader is on; None: that of this process, which Ray knows.
    """

    def __init__(
        self, agents: Mapping[str, AgentClient], layouts: LayoutCache, timeout_s: float, node: str | None = None
    ) -> None:
        self._agents = agents
        self._layouts = layouts
        self._timeout_s = timeout_s
        self._segments = MappedSegments()
        self._node = ray.get_runtime_context().get_node_id() if node is None else node

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        from trinity_sync.weights.apply import in_buckets

        for _, info in sorted(lease.parts.items()):
            layout = self._layouts.get(info)
            if info.node == self._node:
                segment: Segment = self._segments.get(info.path, info.nbytes)
            else:
                segment = fetch(self._agents[info.node], lease, info, self._timeout_s)
            for number, data, digest in in_buckets(layout, segment, info.buckets):
                yield Bucket(layout, number, data, digest)


class SlotMaps:
    """Maps slots of this node, each once; no page before it is touched (a `PartMaps`).

    Args:
        layouts: layouts that were seen before.
    """

    def __init__(self, layouts: LayoutCache) -> None:
        self._layouts = layouts
        self._segments = MappedSegments(populate=False)

    def map(self, lease: Lease) -> list[MappedPart]:
        """The parts; each lies on this node."""
        return [
            MappedPart(self._layouts.get(info), self._segments.get(info.path, info.nbytes), info.buckets)
            for _, info in sorted(lease.parts.items())
        ]


def fetch(agent: AgentClient, lease: Lease, info: PartInfo, timeout_s: float) -> memoryview:
    """Fetch a part from the agent of another node; what another explorer of this node has fetched is there already."""
    [shared] = agent.share(lease.version, lease.slot, info.part).result(timeout_s)
    fetching: Call[np.ndarray] = Call(shared, agent.who, f"send {info.part} of version {lease.version}")
    return fetching.result(timeout_s).data
