"""Saved tensors as views of the tensors that a model holds, and what of them lies in a rank's part of such a tensor.

transformers holds some weights in another form than it saves: the experts of a layer as one tensor, gate and up
projection as one. Each saved tensor is then a strided view of a held one, and a rank that holds a range of the held
tensor's elements holds rectangles of the saved ones. Pure geometry; no element is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.weights.shards import Box, Rect, Shard, boxes, flat_range, itemsize

if TYPE_CHECKING:
    import torch


class Saved(NamedTuple):
    """A tensor that ``save_pretrained`` would write, and where the model holds its elements.

    Attributes:
        dtype: safetensors name.
        shape: as it is written.
        held: name of the model's tensor of which it is a view; None: of none, it is made when it is saved.
        stride: of the view in the held tensor, row-major, in elements.
        offset: of the view's first element in the held tensor, in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    held: str | None
    stride: tuple[int, ...] = ()
    offset: int = 0

    @classmethod
    def as_held(cls, dtype: str, shape: Sequence[int], name: str) -> Saved:
        """A tensor that is saved as the model holds it."""
        return cls(dtype, tuple(shape), name, row_major(shape))


class Strided(NamedTuple):
    """A strided view of a flat tensor, all in elements: shape, strides, and where its first element lies."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a saved tensor that lies in a range of a held tensor's elements.

    Attributes:
        shard: the part. Its local elements are those of the views, one after the other.
        views: where these elements lie, counted from the beginning of the range.
    """

    shard: Shard
    views: tuple[Strided, ...]

    @property
    def is_view(self) -> bool:
        """Whether `of` gives a view of what the rank holds, and not a copy."""
        return len(self.views) == 1

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The shard's elements, in its order, from the elements of the range that a rank holds.

        Args:
            local: contiguous, as many elements as the range has.
        """
        base = local.storage_offset()
        parts = [local.as_strided(shape, stride, base + offset) for shape, stride, offset in self.views]
        if self.is_view:
            return parts[0]
        from torch import cat

        return cat([part.reshape(-1) for part in parts])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def by_held(saved: Mapping[str, Saved]) -> dict[str, list[str]]:
    """Return the names of the saved tensors of each held one, in the order in which they lie in it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tensor in saved.items():
        if tensor.held is not None:
            found[tensor.held].append(name)
    for names in found.values():
        names.sort(key=lambda name: (saved[name].offset, name))
    return dict(found)


def is_rectangular(saved: Saved) -> bool:
    """Whether a range of the held tensor's elements is rectangles of the saved one: none of its dimensions steps
    through another. What views, transposes, splits and expansions give is; sliding windows are not.
    """
    dims = _by_stride(saved)
    inner = 1
    for dim in reversed(dims):
        if saved.stride[dim] < inner:
            return False
        inner = saved.stride[dim] * saved.shape[dim]
    return True


def cut(name: str, saved: Saved, start: int, stop: int) -> Cut | None:
    """Cut a saved tensor by a range of the held tensor's elements.

    Args:
        name: of the saved tensor.
        saved: what and where it is; `is_rectangular`.
        start, stop: the elements of the row-major held tensor that a rank holds.

    Returns:
        What of the saved tensor lies in the range, elements in the order in which they lie in memory as far as
        rectangles allow that; None where nothing does.
    """
    if 0 in saved.shape:
        return None
    if saved.stride == row_major(saved.shape):
        first = max(start - saved.offset, 0)
        last = min(stop - saved.offset, prod(saved.shape))
        if first >= last:
            return None
        shard = flat_range(name, saved.dtype, saved.shape, first, last)
        return Cut(shard, (Strided((last - first,), (1,), saved.offset + first - start),))
    dims = _by_stride(saved)
    sizes = tuple(saved.shape[dim] for dim in dims)
    first, last = (_elements_before(at - saved.offset, saved, dims) for at in (start, stop))
    rects: list[Rect] = []
    views: list[Strided] = []
    end = 0
    for offset, size in boxes(sizes, first, last):
        box = _widened(saved, dims, (offset, size))
        outer, view = _in_row_order(saved, box)
        views.append(view._replace(offset=view.offset - start))
        for rect in _rects(saved.shape, box, outer):
            rects.append(Rect(end * itemsize(saved.dtype), *rect))
            end += rect[2] * rect[3]
    return Cut(Shard(name, saved.dtype, saved.shape, tuple(rects)), tuple(views)) if rects else None


def _by_stride(saved: Saved) -> list[int]:
    """The dimensions along which elements differ, from the longest step in memory to the shortest."""
    dims = [dim for dim, size in enumerate(saved.shape) if size > 1 and saved.stride[dim]]
    return sorted(dims, key=lambda dim: -saved.stride[dim])


def _elements_before(at: int, saved: Saved, dims: Sequence[int]) -> int:
    """How many elements of the view, in the order of memory, lie before position `at`, counted from its first."""
    if at <= 0:
        return 0
    total = prod(saved.shape[dim] for dim in dims)
    index = 0
    for place, dim in enumerate(dims):
        below = prod(saved.shape[inner] for inner in dims[place + 1 :])
        step, at = divmod(at, saved.stride[dim])
        if step >= saved.shape[dim]:
            return min(index + saved.shape[dim] * below, total)
        index += step * below
    return min(index + (at > 0), total)


def _widened(saved: Saved, dims: Sequence[int], box: Box) -> Box:
    """A box along some dimensions as one along all: whole along those in which elements repeat."""
    offset, size = [0] * len(saved.shape), list(saved.shape)
    for dim, first, count in zip(dims, *box, strict=True):
        offset[dim], size[dim] = first, count
    return tuple(offset), tuple(size)


def _in_row_order(saved: Saved, box: Box) -> tuple[int, Strided]:
    """How many of the trailing dimensions form one run of columns, and the box's elements in the order of its
    rectangles: for each run of columns the rows.
    """
    shape, (offset, size) = saved.shape, box
    last = len(shape) - 1
    while last > 1 and size[last] == shape[last]:
        last -= 1
    order = [*range(1, last), 0, *range(max(last, 1), len(shape))]
    first = saved.offset + sum(step * at for step, at in zip(saved.stride, offset, strict=True))
    return last, Strided(tuple(size[dim] for dim in order), tuple(saved.stride[dim] for dim in order), first)


def _rects(shape: tuple[int, ...], box: Box, last: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, column, rows, columns) of each rectangle of a box in the matrix view.

    Args:
        last: the first of the dimensions that form one run of columns.
    """
    offset, size = box
    if len(shape) < 2:
        yield 0, offset[0], 1, size[0]
        return
    strides = row_major(shape[1:])
    columns = prod(size[last:])
    for index in _indices(size[1:last]):
        place = (*(first + at for first, at in zip(offset[1:last], index, strict=True)), *offset[last:])
        yield offset[0], sum(step * at for step, at in zip(strides, place, strict=True)), size[0], columns


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _indices(sizes[1:]):
            yield first, *rest
