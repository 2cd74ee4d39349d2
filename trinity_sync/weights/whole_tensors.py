"""Whole tensors, read from where the parts of a version lie: views of a part where it holds all of a tensor as it is to
be, else put together from the pieces when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.loans import Loans
from trinity_sync.weights.shards import Rect, Shard, matrix_view
from trinity_sync.weights.tensors import byte_tensor, to_torch


class _Held(NamedTuple):
    """What a part holds of a tensor: the number of the part, the shard, and its first byte in the segment."""

    part: int
    shard: Shard
    offset: int


class WholeTensors:
    """How to read each tensor of a version: worked out once, as layouts stay and versions come.

    Args:
        layouts: of all parts; together they hold every tensor once (`check_cover`).
        dtypes: Hugging Face name -> the dtype in which the tensor is to be, which its published one can be cast to.
    """

    def __init__(self, layouts: Sequence[PartLayout], dtypes: Mapping[str, torch.dtype]) -> None:
        self._layouts = list(layouts)
        self._dtypes = dict(dtypes)
        self._held: dict[str, list[_Held]] = {}
        for part, layout in enumerate(self._layouts):
            for shard, offset in layout.entries:
                self._held.setdefault(shard.name, []).append(_Held(part, shard, offset))

    def of(self, segments: Sequence[Segment]) -> VersionTensors:
        """The tensors of one version.

        Args:
            segments: in the order of the layouts, each at least ``layout.nbytes``.

        Raises:
            LayoutError: a segment is too small.
        """
        pairs = zip(self._layouts, segments, strict=True)
        return VersionTensors(
            [byte_tensor(layout.view(segment)) for layout, segment in pairs], self._held, self._dtypes
        )


class VersionTensors:
    """The tensors of one version; made by `WholeTensors.of`.

    Attributes:
        parts: the bytes of the parts. They, and views of them, keep the segments from being unmapped.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], held: Mapping[str, Sequence[_Held]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.parts = parts
        self._held = held
        self._dtypes = dtypes
        self._loans = Loans()

    def read(self, name: str, rows: int | None = None) -> torch.Tensor:
        """A tensor, contiguous, in the dtype in which it is to be.

        Args:
            name: of the tensor.
            rows: give no more than so many slices along dim 0, and read no more; None, or of a tensor of fewer than
                two dimensions: all.

        Returns:
            Either a view of a part, to be read and not written, or memory of its own, which is used again for another
            tensor once nothing refers to this one.
        """
        held, dtype = self._held[name], self._dtypes[name]
        shape = held[0].shard.shape
        if rows is not None and len(shape) > 1:
            shape = (min(rows, shape[0]), *shape[1:])
        length = prod(shape) * dtype.itemsize
        if (plain := _plain(held, dtype)) is not None:
            return self.parts[plain.part][plain.offset : plain.offset + length].view(dtype).view(shape)
        whole = self._loans.lend(length).view(dtype).view(shape)
        matrix = whole.view(matrix_view(shape))
        for part, shard, offset in held:
            for rect in shard.rects:
                _put(matrix, rect, self.parts[part][offset + rect.offset :], to_torch(shard.dtype))
        return whole


def _plain(held: Sequence[_Held], dtype: torch.dtype) -> _Held | None:
    """The part that holds all of a tensor, row by row and in this dtype; None where there is none."""
    filled = [one for one in held if one.shard.rects]
    if len(filled) != 1 or to_torch(filled[0].shard.dtype) != dtype:
        return None
    shard = filled[0].shard
    return filled[0] if len(shard.rects) == 1 and shard.numel_local == prod(shard.shape) else None


def _put(matrix: torch.Tensor, rect: Rect, data: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy a rectangle to the rows of it that a matrix has.

    Args:
        data: the part's bytes from the rectangle's first on.
        dtype: that they are in.
    """
    rows = min(rect.rows, len(matrix) - rect.row)
    if rows < 1:
        return
    source = data[: rows * rect.cols * dtype.itemsize].view(dtype).view(rows, rect.cols)
    target = matrix[rect.row : rect.row + rows, rect.col : rect.col + rect.cols]
    if target.dtype == dtype:  # any dtype has bytes, but torch does not copy every dtype
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.copy_(source)
