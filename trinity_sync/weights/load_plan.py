"""The copies of a load: which bytes of each piece of a part go where in a model's tensors, worked out once per layout.

Copies within the CPU's memory are cut so that what was just written is digested while it is still in the processor's
cache: the digest of what the model holds then costs no second pass over its memory.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.load_groups import Group, groups
from trinity_sync.weights.shards import Rect
from trinity_sync.weights.tensors import to_torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CACHED_BYTES = 512 << 10
"""Copied within the CPU's memory at a time, then digested: fits the second-level cache of one core."""


class Rows(NamedTuple):
    """Rows that follow each other in memory, of one tensor's matrix view or of several tensors'.

    Attributes:
        of: whose they are, in order: (name of the tensor, number of the first row in it, how many).
        data: the rows; where they are in wire dtype and contiguous, their bytes.
        dtype: the dtype on the wire, as safetensors names it.
    """

    of: tuple[tuple[str, int, int], ...]
    data: torch.Tensor | NDArray[np.uint8]
    dtype: str


class Copy(NamedTuple):
    """One copy of a load.

    Attributes:
        start, stop: the bytes of the piece to copy.
        dtype: the dtype of the bytes; None to copy them as they are (`target` is uint8 then).
        target: an array where bytes are copied within the CPU's memory: copying to it costs less than to a tensor.
        rows: what is complete after this copy, None where that is nothing or not cheap to read back.
    """

    start: int
    stop: int
    dtype: torch.dtype | None
    target: torch.Tensor | NDArray[np.uint8]
    rows: Rows | None


class LoadPlan(NamedTuple):
    """The copies of a layout, by the piece in which their bytes lie.

    Attributes:
        digest: the digest of the layout.
        pieces: (start, stop) of each piece in the segment.
        copies: the copies that each piece is taken with.
        destinations: for each piece the destination's bytes, where it can be received there as it is; else None.
    """

    digest: str
    pieces: list[tuple[int, int]]
    copies: list[list[Copy]]
    destinations: list[torch.Tensor | None]


def plan_load(layout: PartLayout, pieces: list[tuple[int, int]], matrices: Mapping[str, torch.Tensor]) -> LoadPlan:
    """Cut a layout's shards into copies, none of which crosses the end of a piece.

    Args:
        layout: what lies where in the segment.
        pieces: (start, stop) in bytes of what travels at a time, as `PartLayout.pieces` gives them.
        matrices: the destinations' matrix views, by name.
    """
    copies: list[list[Copy]] = [[] for _ in pieces]
    destinations: list[torch.Tensor | None] = [None] * len(pieces)
    starts, ends = [start for start, _ in pieces], [stop for _, stop in pieces]
    for group in groups(layout, matrices):
        cutter = _Cutter(group, ends)
        for copy in cutter.copies():
            number = bisect_right(starts, copy.start) - 1
            begin = starts[number]
            copies[number].append(copy._replace(start=copy.start - begin, stop=copy.stop - begin))
        for number in range(bisect_left(starts, group.offset), bisect_left(starts, group.end)):
            destinations[number] = cutter.destination(*pieces[number])
    return LoadPlan(layout.digest, pieces, copies, destinations)


class _Run(NamedTuple):
    """Bytes that go on one after another in the segment and in the destination.

    Attributes:
        start: byte in the segment.
        first, last: elements of the destination, the last one not included.
    """

    start: int
    first: int
    last: int


class _Cutter:
    """Cuts a group into copies at the ends of pieces and of what fits the cache, between rows where it can.

    Args:
        group: what is published, and its destination. The bytes of the copies are those of the segment.
        ends: the ends of all pieces in the segment, ascending.
    """

    def __init__(self, group: Group, ends: Sequence[int]) -> None:
        self._group = group
        self._shard = group.shard
        self._offset = group.offset
        self._matrix = matrix = group.matrix
        self._ends = ends
        self._dtype = to_torch(self._shard.dtype)
        self._size = self._dtype.itemsize
        self._cols = matrix.shape[1]
        # A copy to a device has its cost per call, and nothing of it is read back from a cache.
        self._most = sys.maxsize if matrix.is_cuda else _CACHED_BYTES
        self._bytes: torch.Tensor | NDArray[np.uint8] | None = None
        self._row_bytes: NDArray[np.uint8] | None = None
        if matrix.is_contiguous() and matrix.dtype == self._dtype and matrix.numel():
            raw = matrix.view(-1).view(torch.uint8)
            self._bytes = raw if matrix.is_cuda else raw.numpy()
            if isinstance(self._bytes, np.ndarray):
                self._row_bytes = self._bytes.reshape(len(matrix), -1)

    def copies(self) -> Iterator[Copy]:
        """All copies."""
        for rect in self._shard.rects:
            if not self._is_flat(rect):
                block = self._matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
                yield from self._block(self._offset + rect.offset, block, rect.row)
        for start, first, last in self._runs:
            yield from self._flat(start, first, last)

    def destination(self, start: int, stop: int) -> torch.Tensor | None:
        """The destination's bytes for these of the segment, where they belong there one after another as they are."""
        if self._bytes is None:
            return None
        for run in self._runs:
            begin = run.first * self._size + start - run.start
            if run.start <= start and begin + stop - start <= run.last * self._size:
                return self._matrix.view(-1).view(torch.uint8)[begin : begin + stop - start]
        return None

    def _is_flat(self, rect: Rect) -> bool:
        """Its elements follow each other in the destination."""
        return self._matrix.is_contiguous() and (rect.cols == self._cols or rect.rows == 1)

    @cached_property
    def _runs(self) -> list[_Run]:
        """The flat rectangles; those that go on from each other are one."""
        runs: list[_Run] = []
        for rect in filter(self._is_flat, self._shard.rects):
            start, first = self._offset + rect.offset, rect.row * self._cols + rect.col
            last = first + rect.rows * rect.cols
            if runs and runs[-1].last == first and runs[-1].start + (first - runs[-1].first) * self._size == start:
                start, first, _ = runs.pop()
            runs.append(_Run(start, first, last))
        return runs

    def _block(self, start: int, block: torch.Tensor, row: int) -> Iterator[Copy]:
        width = block.shape[1] * self._size
        for at, taken, index, within in self._pieces(start, len(block) * width, width, 0):
            if taken < width:
                col = within // self._size
                yield Copy(at, at + taken, self._dtype, block[index, col : col + taken // self._size], None)
                continue
            count = taken // width
            rows = self._rows(row + index, count) if block.shape[1] == self._cols else None
            yield Copy(at, at + taken, self._dtype, block[index : index + count], rows)

    def _flat(self, start: int, first: int, last: int) -> Iterator[Copy]:
        width = self._cols * self._size
        row, col = divmod(first, self._cols)
        for at, taken, index, within in self._pieces(start, (last - first) * self._size, width, col * self._size):
            rows = self._rows(row + index, taken // width) if not within and taken >= width else None
            begin = (row + index) * width + within
            if self._bytes is not None:
                yield Copy(at, at + taken, None, self._bytes[begin : begin + taken], rows)
            else:
                target = self._matrix.view(-1)[begin // self._size : (begin + taken) // self._size]
                yield Copy(at, at + taken, self._dtype, target, rows)

    def _pieces(self, start: int, nbytes: int, width: int, phase: int) -> Iterator[tuple[int, int, int, int]]:
        """(byte in the segment, length, row, byte in the row) of pieces: whole rows of `width` bytes, or part of one.

        Args:
            start: byte in the segment.
            nbytes: the length of all pieces together.
            phase: byte in the first row at which they begin.
        """
        done = 0
        while done < nbytes:
            row, within = divmod(phase + done, width)
            at = start + done
            room = min(nbytes - done, self._ends[bisect_right(self._ends, at)] - at)
            if within or room < width:
                taken = min(room, width - within)
            else:
                taken = max(min(room, self._most) // width, 1) * width
            yield at, taken, row, within
            done += taken

    def _rows(self, first: int, count: int) -> Rows | None:
        if self._matrix.is_cuda:
            return None
        data = self._matrix if self._row_bytes is None else self._row_bytes
        return Rows(self._group.rows(first, count), data[first : first + count], self._shard.dtype)
