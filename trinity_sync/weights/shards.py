"""One rank's share of one tensor, in Hugging Face coordinates. Backends produce shards; everything else reads them.

Placement is expressed on the *matrix view* of a tensor: shape ``(s0, s1, ...)`` is seen as ``s0`` rows of ``s1 * s2 *
...`` columns, and a tensor of fewer than two dimensions as one row. A rank's bytes of a tensor are a sequence of
rectangles of that matrix, each stored row by row. That is enough for every placement in use: row slices (FSDP2), flat
ranges (FSDP1), column slices and interleaved QKV or gate/up blocks (tensor parallelism), experts.
"""

from __future__ import annotations

import functools
import heapq
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from trinity_sync.errors import RunError

_SHOWN = 20
_FEW = 4
_LAYER = re.compile(r"\.(\d{1,3})\.")


Described = tuple[str, str, Sequence[int]]
"""A tensor's name, dtype as torch prints it, such as ``torch.bfloat16``, and shape."""


class CoverageError(RunError):
    """The shards of a version do not cover every tensor exactly once, or disagree about a tensor's dtype or shape."""


class Rect(NamedTuple):
    """A rectangle of a tensor's matrix view, of at least one row and one column."""

    offset: int  # of its first byte in the shard's local bytes
    row: int  # first row in the tensor
    col: int  # first column in the tensor, in elements
    rows: int
    cols: int  # in elements


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of one tensor. Raises ValueError if a rectangle is empty, leaves the tensor or does not start
    where the one before it ended.
    """

    name: str  # the Hugging Face name
    dtype: str  # of the bytes, safetensors name
    shape: tuple[int, ...]  # global
    rects: tuple[Rect, ...]  # in the order of the local bytes, without gaps; empty if the rank has no element

    def __post_init__(self) -> None:
        rows, cols = self.matrix
        size = itemsize(self.dtype)
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{self.name}: shape {self.shape} has a negative extent")
        end = 0
        for rect in self.rects:
            if rect.rows < 1 or rect.cols < 1:
                raise ValueError(f"{self.name}: {rect} is empty; leave it out")
            if rect.row < 0 or rect.col < 0 or rect.row + rect.rows > rows or rect.col + rect.cols > cols:
                raise ValueError(f"{self.name}: {rect} leaves the tensor, whose matrix view is {rows} x {cols}")
            if rect.offset != end:
                raise ValueError(f"{self.name}: {rect} must start at byte {end}, where the rectangle before it ends")
            end += rect.rows * rect.cols * size

    @property
    def matrix(self) -> tuple[int, int]:
        return matrix_view(self.shape)

    @property
    def numel_local(self) -> int:
        return sum(rect.rows * rect.cols for rect in self.rects)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor, row by row."""
        return len(self.rects) == 1 and self.numel_local == prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel_local * itemsize(self.dtype)


def matrix_view(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) under which a tensor of this shape is cut and digested: dim 0 and the product of the
    others.
    """
    return (shape[0], prod(shape[1:])) if len(shape) >= 2 else (1, prod(shape))


def whole(name: str, dtype: str, shape: Sequence[int]) -> Shard:
    """Return the shard of a rank that holds all of a tensor."""
    return Shard(name, dtype, tuple(shape), _all(*matrix_view(shape)))


@functools.lru_cache
def _all(rows: int, cols: int) -> tuple[Rect, ...]:
    """Return the rectangle of a whole tensor: one object per shape, because models have thousands of tensors."""
    return (Rect(0, 0, 0, rows, cols),) if rows * cols else ()


def row_slice(name: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> Shard:
    """Return a slice ``[start, stop)`` along dim 0: whole rows, or for a 1-D tensor a range of its one row."""
    rows, cols = matrix_view(shape)
    extent = shape[0] if shape else 1
    if not 0 <= start <= stop <= extent:
        raise ValueError(f"{name}: rows {start}:{stop} do not lie in dimension 0, which has {extent}")
    if start == stop or rows * cols == 0:
        return Shard(name, dtype, tuple(shape), ())
    rect = Rect(0, start, 0, stop - start, cols) if len(shape) >= 2 else Rect(0, 0, start, 1, stop - start)
    return Shard(name, dtype, tuple(shape), (rect,))


def flat_range(name: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> Shard:
    """Return elements ``[start, stop)`` of the flattened tensor: the end of a row, whole rows, the start of a row."""
    rows, cols = matrix_view(shape)
    if not 0 <= start <= stop <= rows * cols:
        raise ValueError(f"{name}: elements {start}:{stop} do not lie in the tensor, which has {rows * cols}")
    size = itemsize(dtype)
    rects: list[Rect] = []
    at = start
    while at < stop:
        row, col = divmod(at, cols)
        if col or stop - at < cols:
            taken = Rect((at - start) * size, row, col, 1, min(cols - col, stop - at))
        else:
            taken = Rect((at - start) * size, row, 0, (stop - at) // cols, cols)
        rects.append(taken)
        at += taken.rows * taken.cols
    return Shard(name, dtype, tuple(shape), tuple(rects))


def check_cover(parts: Iterable[Iterable[Shard]]) -> None:
    """Check that the shards of all parts (ranks) cover every element of every tensor named in them exactly once. Raises
    CoverageError: names the tensors that are covered twice or not wholly, or that differ in dtype or shape.
    """
    first: dict[str, Shard] = {}
    rects: dict[str, list[Rect]] = {}
    problems: dict[str, str] = {}
    for part in parts:
        for shard in part:
            known = first.setdefault(shard.name, shard)
            if (known.dtype, known.shape) != (shard.dtype, shard.shape):
                problems[shard.name] = f"{describe(known)} in one part, {describe(shard)} in another"
            rects.setdefault(shard.name, []).extend(shard.rects)
    for name, shard in first.items():
        if name not in problems and (problem := _cover_problem(shard, rects[name])):
            problems[name] = problem
    if problems:
        lines = [f"{name} ({problems[name]})" for name in sorted(problems)]
        raise CoverageError(f"the parts do not hold every tensor exactly once: {listed(lines)}")


def check_complete(parts: Sequence[Sequence[Shard]], saved: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check that the shards of all parts (ranks) are the given tensors, name -> (dtype, shape), all of each, and no
    others. Raises CoverageError: counts the differences, and names some.
    """
    held = {shard.name: shard for shards in parts for shard in shards}
    missing = sorted(saved.keys() - held.keys())
    unknown = sorted(held.keys() - saved.keys())
    other = [
        f"{name} ({describe(held[name])} instead of {dtype} {shape_text(shape) or 'scalar'})"
        for name, (dtype, shape) in sorted(saved.items())
        if name in held and (held[name].dtype, held[name].shape) != (dtype, tuple(shape))
    ]
    kinds = ((missing, "missing"), (unknown, "not among them"), (other, "different"))
    problems = [f"{len(names)} {kind}: {listed(names, _FEW)}" for names, kind in kinds if names]
    if problems:
        raise CoverageError(f"of {len(saved)} tensors {'; '.join(problems)}")
    check_cover(parts)


def _cover_problem(shard: Shard, rects: list[Rect]) -> str | None:
    """Return the error in the cover of one tensor. Rectangles that do not overlap and add up cover it."""
    open_columns: list[tuple[int, int]] = []
    closing: list[tuple[int, tuple[int, int]]] = []
    for rect in sorted(rects, key=lambda rect: rect.row):
        while closing and closing[0][0] <= rect.row:
            open_columns.remove(heapq.heappop(closing)[1])
        span = (rect.col, rect.col + rect.cols)
        at = bisect_left(open_columns, span)
        if (at and open_columns[at - 1][1] > span[0]) or (at < len(open_columns) and open_columns[at][0] < span[1]):
            return f"row {rect.row} is held twice"
        insort(open_columns, span)
        heapq.heappush(closing, (rect.row + rect.rows, span))
    missing = prod(shard.matrix) - sum(rect.rows * rect.cols for rect in rects)
    return f"{missing} of {prod(shard.matrix)} elements are held by no part" if missing else None


def describe(shard: Shard) -> str:
    """Return dtype and shape for a message: ``"BF16 4x8"``."""
    return f"{shard.dtype} {shape_text(shard.shape) or 'scalar'}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for digests and messages, joined by ``x``; the empty text for a scalar."""
    return "x".join(map(str, shape))


def listed(items: Sequence[str], shown: int = _SHOWN) -> str:
    """Return the first items for a message, and the number of the others."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size along each dimension."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut elements ``start`` to ``stop`` of a row-major tensor into contiguous boxes, in the order of the memory.

    For two dimensions: the rest of a row, whole rows, and the beginning of a row. A tensor of n dimensions has at most
    2n - 1 boxes, an empty range none.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, start, stop)
        return
    yield from _in_row(shape, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last * row, stop)


def _in_row(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    row = prod(shape[1:])
    at = start // row
    for offset, size in boxes(shape[1:], start - at * row, stop - at * row):
        yield (at, *offset), (1, *size)


# The element types that travel, by their safetensors names, with the bytes of an element.
_ITEMSIZES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

NAMES = tuple(_ITEMSIZES)


def itemsize(name: str) -> int:
    """Return the bytes of one element of a dtype, such as ``"BF16"``; a ValueError if it is not one of `NAMES`."""
    try:
        return _ITEMSIZES[name]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r}: expected one of {', '.join(NAMES)}") from None


def is_floating(name: str) -> bool:
    """Return whether a dtype is a floating one, and so is cast to the wire dtype; a ValueError for an unknown name."""
    itemsize(name)
    return name.startswith(("F", "BF"))


def layer_of(name: str) -> int:
    """Return the layer of a tensor, that is the first number below 1,000 in its name; -1 without one."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1
