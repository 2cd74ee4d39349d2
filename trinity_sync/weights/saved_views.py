"""Saved tensors as views of a model's tensors, and the rectangles of them in a rank's range of such a tensor.

transformers keeps some weights in another form than it saves: the experts of a layer as one tensor, gate and up
projection as one. Each saved tensor is then a strided view of a model's tensor, and a rank that holds a range of that
tensor's elements holds rectangles of the saved ones. Pure geometry; no element is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.weights.shards import Box, Rect, Shard, boxes, flat_range, itemsize

if TYPE_CHECKING:
    import torch


class SavedTensor(NamedTuple):
    """A tensor that ``save_pretrained`` would write, and the place of its elements in the model."""

    dtype: str  # safetensors name
    shape: tuple[int, ...]
    held: str | None  # the model's tensor that it is a view of; None: it is computed when it is saved
    stride: tuple[int, ...] = ()  # of the view, row-major, in elements
    offset: int = 0  # of the view's first element, in elements

    @classmethod
    def as_held(cls, dtype: str, shape: Sequence[int], name: str) -> SavedTensor:
        """Return a tensor that is saved as the model holds it."""
        return cls(dtype, tuple(shape), name, row_major(shape))


class StridedView(NamedTuple):
    """A strided view of a flat tensor, all in elements: shape, strides, and the place of its first element."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a saved tensor in a range of a model tensor's elements. `shard`: the part. Its local elements are
    those of the views, one after the other. `views`: the places of these elements, counted from the beginning of the
    range.
    """

    shard: Shard
    views: tuple[StridedView, ...]

    @property
    def is_view(self) -> bool:
        return len(self.views) == 1

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the shard's elements, in its order, from a rank's range of elements (`local`, contiguous)."""
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


def by_held(saved: Mapping[str, SavedTensor]) -> dict[str, list[str]]:
    """Return the names of the saved tensors of each model tensor, in the order of their places in it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tensor in saved.items():
        if tensor.held is not None:
            found[tensor.held].append(name)
    for names in found.values():
        names.sort(key=lambda name: (saved[name].offset, name))
    return dict(found)


def is_rectangular(saved: SavedTensor) -> bool:
    """Return whether a range of the model tensor's elements is rectangles of the saved one.

    It is, if no dimension steps through another: views, transposes, splits and expansions; not sliding windows.
    """
    dims = _by_stride(saved)
    inner = 1
    for dim in reversed(dims):
        if saved.stride[dim] < inner:
            return False
        inner = saved.stride[dim] * saved.shape[dim]
    return True


def cut(name: str, saved: SavedTensor, start: int, stop: int) -> Cut | None:
    """Cut a saved tensor, which `is_rectangular`, by elements `start` to `stop` of the row-major model tensor, or
    return None.

    The elements are in the order of the memory, as far as rectangles allow.
    """
    if 0 in saved.shape:
        return None
    if saved.stride == row_major(saved.shape):
        first = max(start - saved.offset, 0)
        last = min(stop - saved.offset, prod(saved.shape))
        if first >= last:
            return None
        shard = flat_range(name, saved.dtype, saved.shape, first, last)
        return Cut(shard, (StridedView((last - first,), (1,), saved.offset + first - start),))
    dims = _by_stride(saved)
    sizes = tuple(saved.shape[dim] for dim in dims)
    first, last = (_elements_before(at - saved.offset, saved, dims) for at in (start, stop))
    rects: list[Rect] = []
    views: list[StridedView] = []
    end = 0
    for offset, size in boxes(sizes, first, last):
        box = _widened(saved, dims, (offset, size))
        outer, view = _in_row_order(saved, box)
        views.append(view._replace(offset=view.offset - start))
        for rect in _rects(saved.shape, box, outer):
            rects.append(Rect(end * itemsize(saved.dtype), *rect))
            end += rect[2] * rect[3]
    return Cut(Shard(name, saved.dtype, saved.shape, tuple(rects)), tuple(views)) if rects else None


def _by_stride(saved: SavedTensor) -> list[int]:
    dims = [dim for dim, size in enumerate(saved.shape) if size > 1 and saved.stride[dim]]
    return sorted(dims, key=lambda dim: -saved.stride[dim])


def _elements_before(at: int, saved: SavedTensor, dims: Sequence[int]) -> int:
    """Count the view's elements before position `at` in the order of memory, counted from its first."""
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


def _widened(saved: SavedTensor, dims: Sequence[int], box: Box) -> Box:
    """Extend a box along some dimensions to all: whole along those in which elements repeat."""
    offset, size = [0] * len(saved.shape), list(saved.shape)
    for dim, first, count in zip(dims, *box, strict=True):
        offset[dim], size[dim] = first, count
    return tuple(offset), tuple(size)


def _in_row_order(saved: SavedTensor, box: Box) -> tuple[int, StridedView]:
    """Return the first of the trailing dimensions that form one run of columns, and the box's elements in the order of
    its rectangles: for each run of columns the rows.
    """
    shape, (offset, size) = saved.shape, box
    last = len(shape) - 1
    while last > 1 and size[last] == shape[last]:
        last -= 1
    order = [*range(1, last), 0, *range(max(last, 1), len(shape))]
    first = saved.offset + sum(step * at for step, at in zip(saved.stride, offset, strict=True))
    return last, StridedView(tuple(size[dim] for dim in order), tuple(saved.stride[dim] for dim in order), first)


def _rects(shape: tuple[int, ...], box: Box, last: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, column, rows, columns) of each rectangle of a box in the matrix view.

    `last`: the first of the dimensions that form one run of columns.
    """
    offset, size = box
    if len(shape) < 2:
        yield 0, offset[0], 1, size[0]
        return
    strides = row_major(shape[1:])
    columns = prod(size[last:])
    for index in product(*map(range, size[1:last])):
        place = (*(first + at for first, at in zip(offset[1:last], index, strict=True)), *offset[last:])
        yield offset[0], sum(step * at for step, at in zip(strides, place, strict=True)), size[0], columns
