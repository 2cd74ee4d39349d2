"""What a load copies as one: tensors that follow each other in the segment as they do in the model's memory, as the
experts of a layer do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import prod

import torch

from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import Shard, whole
from trinity_sync.weights.stretch import Stretch


class Group:
    """Whole tensors with rows of one length that follow each other in the segment as they do in memory, as one; or any
    one shard.

    Args:
        shard, offset: the first, and its byte in the segment.
        matrix: its destination's matrix view.

    Attributes:
        offset, end: the bytes of all in the segment, the last one not included.
    """

    def __init__(self, shard: Shard, offset: int, matrix: torch.Tensor) -> None:
        self._stretch = Stretch(matrix)
        self._shards = [shard]
        self._starts = [0, len(matrix)]
        self.end = offset + shard.nbytes
        self.offset = offset

    def take(self, shard: Shard, offset: int, matrix: torch.Tensor) -> bool:
        """Go on with a shard; returns whether it follows."""
        first = self._shards[0]
        fits = offset == self.end and shard.dtype == first.dtype and shard.matrix[1] == first.matrix[1]
        if not (fits and _is_plain(first) and _is_plain(shard) and self._stretch.take(matrix)):
            return False
        self._shards.append(shard)
        self._starts.append(self._starts[-1] + len(matrix))
        self.end += shard.nbytes
        return True

    @property
    def matrix(self) -> torch.Tensor:
        """The destination's."""
        return self._stretch.elements().view(self._starts[-1], -1)

    @property
    def shard(self) -> Shard:
        """The one, or one that is as long as all."""
        first = self._shards[0]
        return first if len(self._shards) == 1 else whole(first.name, first.dtype, (self._starts[-1], first.matrix[1]))

    def rows(self, first: int, count: int) -> tuple[tuple[str, int, int], ...]:
        """Whose the rows are from the first on: see `Rows.of`."""
        found: list[tuple[str, int, int]] = []
        number = bisect_right(self._starts, first) - 1
        while count:
            within = first - self._starts[number]
            taken = min(count, self._starts[number + 1] - first)
            found.append((self._shards[number].name, within, taken))
            first, count, number = first + taken, count - taken, number + 1
        return tuple(found)


def _is_plain(shard: Shard) -> bool:
    """It is all of a tensor, row by row."""
    return len(shard.rects) == 1 and shard.numel_local == prod(shard.matrix)


def groups(layout: PartLayout, matrices: Mapping[str, torch.Tensor]) -> list[Group]:
    """All of a layout's shards that hold something."""
    found: list[Group] = []
    for shard, offset in layout.entries:
        matrix = matrices[shard.name]
        if shard.rects and not (found and found[-1].take(shard, offset, matrix)):
            found.append(Group(shard, offset, matrix))
    return found
