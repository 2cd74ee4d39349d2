"""Which boxes a range of a tensor's elements is made of. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size along each dimension."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut elements ``start`` to ``stop`` of a row-major tensor into boxes, in the order in which they lie in memory:
    for two dimensions the rest of a row, whole rows, and the beginning of a row.

    Each box is contiguous in memory. A tensor of n dimensions has at most 2n - 1 of them, an empty range none.
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
