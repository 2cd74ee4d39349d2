"""Memory mode at a walk: loads that leave bandwidth to those who work beside them."""

import time
from collections.abc import Generator
from typing import Any

from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.errors import ConfigError
from trinity_sync.protocol.versions import Lease
from trinity_sync.sync.base import Bucket, ExplorerSide, FindDestination
from trinity_sync.sync.memory import MemoryMode, MemoryTransport


class PacedMode(MemoryMode):
    """Versions stay in their slots, and each explorer takes no more than `mb_per_s` of one.

    Args:
        mb_per_s: MiB per second.
    """

    def __init__(self, mb_per_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        if mb_per_s <= 0:
            raise ConfigError(f"sync.mb_per_s is {mb_per_s}; must be more than 0")
        self._bytes_per_s = mb_per_s * 2**20

    def transport(self, side: ExplorerSide) -> MemoryTransport:
        return PacedTransport(self._bytes_per_s, side)


class PacedTransport(MemoryTransport):
    """Hands out a bucket when the ones before it have had their time."""

    def __init__(self, bytes_per_s: float, side: ExplorerSide) -> None:
        super().__init__(side.agents, side.layouts, side.timeout_s)
        self._bytes_per_s = bytes_per_s

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        due = time.monotonic()
        for bucket in super().buckets(lease, broadcast, find_destination):
            time.sleep(max(0.0, due - time.monotonic()))
            due += len(bucket.data) / self._bytes_per_s
            yield bucket
