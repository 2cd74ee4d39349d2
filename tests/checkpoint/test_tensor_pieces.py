"""Pieces that make up a tensor, and those that do not, against a count of how often each element is held."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.checkpoint.reading.tensor_pieces import AssembledTensor, FileBox, TensorInfo, WeightsError, assembled

Box = tuple[tuple[int, ...], tuple[int, ...]]


def put_together(shape: tuple[int, ...], boxes: list[Box]) -> AssembledTensor:
    """A tensor whose pieces are of files that are named by their number, each filled with that."""

    def piece(number: int, start: tuple[int, ...], sizes: tuple[int, ...]) -> FileBox:
        return FileBox(Path(f"file-{number}"), start, sizes, lambda: torch.full(sizes, number, dtype=torch.int32))

    pieces = [piece(number, *box) for number, box in enumerate(boxes)]
    return assembled("w", TensorInfo("I32", shape), pieces)


def told(shape: tuple[int, ...], boxes: list[Box]) -> str:
    with pytest.raises(WeightsError) as refused:
        put_together(shape, boxes)
    return str(refused.value)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor of up to three dimensions, cut again and again, of which some pieces are moved, grown or left out."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        start, sizes = boxes[at]
        wide = [dim for dim, size in enumerate(sizes) if size > 1]
        if not wide:
            continue
        dim = draw(st.sampled_from(wide))
        cut = draw(st.integers(1, sizes[dim] - 1))
        first, rest = list(sizes), list(sizes)
        first[dim], rest[dim] = cut, sizes[dim] - cut
        behind = tuple(begin + cut * (index == dim) for index, begin in enumerate(start))
        boxes[at : at + 1] = [(start, tuple(first)), (behind, tuple(rest))]
    for _ in range(draw(st.integers(0, 2))):
        if not boxes:
            break
        at = draw(st.integers(0, len(boxes) - 1))
        start = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
        sizes = tuple(draw(st.integers(1, extent - begin)) for begin, extent in zip(start, shape, strict=True))
        boxes[at : at + 1] = draw(st.sampled_from([[(start, sizes)], [boxes[at], (start, sizes)], []]))
    return shape, draw(st.permutations(boxes))


@given(cut_tensors())
def test_a_tensor_is_made_of_pieces_that_hold_each_element_once_and_of_no_others(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = case
    held, filled = np.zeros(shape, int), np.zeros(shape, int)
    for number, (start, sizes) in reversed([*enumerate(boxes)]):
        place = tuple(slice(begin, begin + size) for begin, size in zip(start, sizes, strict=True))
        held[place] += boxes.index((start, sizes)) == number  # a replica counts once
        filled[place] = boxes.index((start, sizes))
    wrong = np.argwhere(held != 1)
    if not len(wrong):
        assert np.array_equal(put_together(shape, boxes).read().numpy(), filled)
    elif held[tuple(wrong[0])] == 0:
        assert f"elements of w are missing, the first of {list(shape)} at {wrong[0].tolist()}; it is " in told(
            shape, boxes
        )
    else:
        assert told(shape, boxes).endswith(" hold the same elements of w")


def test_pieces_that_overlap_are_named() -> None:
    quarters = [((row, column), (2, 2)) for row, column in product((0, 2), (0, 2))]
    message = told((4, 4), [*quarters, ((3, 1), (1, 2))])
    assert message == "file-2 and file-4 hold the same elements of w"


def test_pieces_that_no_straight_cut_separates_make_a_tensor() -> None:
    around = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    assert put_together((3, 3), [*around, ((1, 1), (1, 1))]).read().tolist() == [[0, 0, 1], [3, 4, 1], [3, 2, 2]]
    assert "the first of [3, 3] at [1, 1]" in told((3, 3), around)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_scalar_needs_a_piece_and_what_has_no_elements_none(shape: tuple[int, ...]) -> None:
    assert put_together(shape, [((0,) * len(shape), shape)]).read().shape == shape
    if shape:
        assert put_together(shape, []).read().shape == shape
    else:
        assert told(shape, []) == "elements of w are missing, the first of [] at []; it is in no file"


@pytest.mark.all
def test_many_pieces_are_compared_in_a_moment() -> None:
    """Layers of experts over tensor-parallel ranks. Compared two by two, they would take minutes."""
    shape = (32, 128, 12)
    boxes = [((layer, expert, 2 * rank), (1, 1, 2)) for layer, expert, rank in np.ndindex(32, 128, 6)]
    assert len(put_together(shape, boxes).pieces) == len(boxes)
    *others, _, last = boxes
    assert "the first of [32, 128, 12] at [31, 127, 8]" in told(shape, [*others, last])
    assert told(shape, [*boxes, ((31, 127, 9), (1, 1, 3))]).endswith("hold the same elements of w")
