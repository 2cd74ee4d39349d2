"""The data of a run that only moves bytes: no samples, and explorers that load each version."""

from __future__ import annotations

from trinity_sync.actors.explorer import LoadReport
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import PairBatch
from trinity_sync.samples.excerpt import Line
from trinity_sync.sync.base import Publisher


class NoData:
    """A step's batch is empty.

    Args:
        pool: the explorers.
        mode: the sync mode, by which they load.
    """

    def __init__(self, pool: ExplorerPool, mode: Publisher) -> None:
        self._pool = pool
        self._mode = mode

    def batch(self, step: int) -> PairBatch:
        return PairBatch.of([], [])

    def advantages(self, batch: PairBatch) -> None:
        return None

    def drawn(self) -> None:
        """Return nothing: the batch is all that there is."""

    def position(self, step: int) -> None:
        """Return nothing: there are no data."""

    def load(self, version: Version) -> list[LoadReport]:
        return self._pool.load(version, self._mode.deliver)

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        """Write out nothing: nobody generates."""
        return []
