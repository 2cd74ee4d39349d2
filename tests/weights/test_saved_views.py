"""What ranks hold of saved tensors, from what they hold of the tensors that these are views of."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.weights.saved_views import SavedTensor, by_held, cut, is_rectangular, row_major
from trinity_sync.weights.shards import check_complete


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A held tensor, and a view of it that was made of splits, permutations, expansions and reshapes."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    held = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    view = held
    for kind in draw(st.lists(st.sampled_from(["split", "turn", "expand", "index", "flat"]), max_size=4)):
        dims = view.ndim
        if kind == "split" and dims:
            dim = draw(st.integers(0, dims - 1))
            first = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, first, draw(st.integers(1, view.shape[dim] - first)))
        elif kind == "turn":
            view = view.permute(draw(st.permutations(range(dims))))
        elif kind == "expand" and dims < 4:
            view = view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)
        elif kind == "index" and dims:
            dim = draw(st.integers(0, dims - 1))
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif kind == "flat" and dims > 1 and view.is_contiguous():
            view = view.flatten(0, 1)
    return held, view


@given(views(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_ranks_parts_are_the_saved_tensor(pair: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    held, view = pair
    saved = SavedTensor("F32", tuple(view.shape), "held", view.stride(), int(view.storage_offset()))
    assert is_rectangular(saved)
    ends = sorted(data.draw(st.lists(st.integers(0, held.numel()), max_size=4)))
    found = torch.full((prod(view.shape),), -1.0)
    shards = []
    for start, stop in zip([0, *ends], [*ends, held.numel()], strict=True):
        local = held.flatten()[start:stop].clone()
        part = cut("saved", saved, start, stop)
        if part is None:
            continue
        elements = part.of(local)
        assert elements.numel() == part.shard.numel_local
        matrix = found.view(part.shard.matrix)
        for rect in part.shard.rects:
            first = rect.offset // 4
            block = elements.reshape(-1)[first : first + rect.rows * rect.cols].view(rect.rows, rect.cols)
            matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols] = block
        shards.append([part.shard])
    check_complete(shards, {"saved": ("F32", saved.shape)})
    assert torch.equal(found.view(view.shape), view)


def test_what_is_contiguous_is_read_and_written_in_place() -> None:
    local = torch.zeros(20)
    part = cut("up", SavedTensor("F32", (3, 4), "gate_up", row_major((3, 4)), 12), 8, 28)
    assert part is not None
    assert part.is_view
    part.of(local).fill_(1)
    assert local.tolist() == [0.0] * 4 + [1.0] * 12 + [0.0] * 4


def test_a_transposed_tensor_of_whole_rows_is_read_in_place() -> None:
    part = cut("weight", SavedTensor("F32", (6, 4), "held", (1, 6)), 6, 18)
    assert part is not None
    assert part.is_view
    assert [rect[1:] for rect in part.shard.rects] == [(0, 1, 6, 2)]


def test_a_sliding_window_is_not_rectangles() -> None:
    windows = torch.zeros(6).unfold(0, 3, 1)
    assert not is_rectangular(SavedTensor("F32", tuple(windows.shape), "held", windows.stride()))


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (24, 48), (12, 12)])
def test_a_range_beside_the_view_holds_nothing_of_it(start: int, stop: int) -> None:
    assert cut("up", SavedTensor("F32", (3, 4), "gate_up", row_major((3, 4)), 12), start, stop) is None
    assert cut("up", SavedTensor("F32", (4, 3), "gate_up", (1, 4), 12), start, stop) is None


def test_the_tensors_of_a_held_one_come_in_the_order_of_memory() -> None:
    saved = {
        "b.up": SavedTensor.as_held("F32", (2,), "x")._replace(offset=2),
        "a.gate": SavedTensor.as_held("F32", (2,), "x")._replace(offset=4),
        "made": SavedTensor("F32", (2,), None),
        "b.gate": SavedTensor.as_held("F32", (2,), "x"),
    }
    assert by_held(saved) == {"x": ["b.gate", "b.up", "a.gate"]}
