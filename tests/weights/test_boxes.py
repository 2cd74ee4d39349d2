"""A range of elements as rectangles: what a data-parallel rank holds of a parameter's optimizer state."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.weights.shards import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    ends = st.integers(0, prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, start, stop


@given(ranges())
def test_boxes_hold_the_elements_of_the_range_in_their_order(of: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = of
    elements = np.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    for offset, size in boxes(shape, start, stop):
        place = tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))
        found += elements[place].reshape(-1).tolist()
    assert found == list(range(start, stop))


@given(ranges())
def test_there_are_few_of_them_and_none_is_empty(of: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = of
    found = list(boxes(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(length > 0 for _, size in found for length in size)
    assert all(len(offset) == len(size) == len(shape) for offset, size in found)


def test_whole_rows_are_one_box_and_parts_of_rows_are_their_own() -> None:
    assert list(boxes((4, 3), 0, 12)) == [((0, 0), (4, 3))]
    assert list(boxes((4, 3), 2, 10)) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert list(boxes((4, 3), 4, 5)) == [((1, 1), (1, 1))]


def test_neighbours_cover_a_tensor_once() -> None:
    shape = (3, 2, 5)
    for cuts in product(range(31), repeat=2):
        low, high = sorted(cuts)
        covered = np.zeros(shape, dtype=int)
        for start, stop in ((0, low), (low, high), (high, 30)):
            for offset, size in boxes(shape, start, stop):
                covered[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))] += 1
        assert (covered == 1).all()
