"""`sync=memory`: explorers on the node map the slot; other nodes get one object per part from the agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray

from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Delivery, TrainerSide, deliver_each
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.sync.remote import resolve_one
from trinity_sync.sync.synchronizer import Sealed
from trinity_sync.weights.slots import map_segment


class MemoryMode:
    """The slot is the transport: publishing is committing."""

    name = "memory"

    def __init__(self, side: TrainerSide) -> None:
        self._side = side

    def publish(self, sealed: Sealed) -> None:
        self._side.synchronizer.call("commit", sealed.version)

    def deliver(self, explorers: Mapping[str, Any], version: Version) -> Delivery:
        return deliver_each(self._side, explorers, version)


class MemoryTransport:
    """Reads slots: mapped where they are on this node, fetched once per part where they are not.

    Args:
        agents: Ray node id -> agent handle.
        layouts: layouts that were seen before.
        timeout_s: limit of a fetch, seconds.
    """

    def __init__(self, agents: Mapping[str, Any], layouts: LayoutCache, timeout_s: float) -> None:
        self._agents = agents
        self._layouts = layouts
        self._timeout_s = timeout_s
        self._node = ray.get_runtime_context().get_node_id()

    def parts(self, lease: Lease, ticket: Any) -> Iterator[tuple[Any, Any, list[bytes] | None]]:
        for part, info in sorted(lease.parts.items()):
            layout = self._layouts.get(info)
            if info.node == self._node:
                buffer = map_segment(info.path, info.nbytes)
                try:
                    yield layout, buffer, info.buckets
                finally:
                    with suppress(BufferError):  # after an error its traceback holds views; the mapping goes with them
                        buffer.close()
            else:
                call = self._agents[info.node].read.remote(lease.slot, part)
                yield (
                    layout,
                    resolve_one(call, f"the agent of node {info.node}", f"hand out {part}", self._timeout_s),
                    info.buckets,
                )
