"""What a rank holds of each tensor, as it is sent without a gather; and what is refused."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from verl.workers.engine import spec as verl_spec
from verl.workers.engine.spec import BlockPlacement, ShardSpec

from tests.integrations.weight_sync.sync_members import Members, weights
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.trainer_tensors import own_shards
from trinity_sync.sync.stream import _together
from trinity_sync.weights.shards import CoverageError

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and starts of a block."""


def cuts(shape: tuple[int, ...], dims: dict[int, list[int]]) -> Iterator[Piece]:
    """The blocks of a tensor that is cut at these places of these dimensions."""
    spans = []
    for dim, size in enumerate(shape):
        places = [0, *dims.get(dim, []), size]
        spans.append([(stop - start, start) for start, stop in itertools.pairwise(places)])
    for block in itertools.product(*spans):
        yield tuple(size for size, _ in block), tuple(start for _, start in block)


def held(monkeypatch: pytest.MonkeyPatch, full: torch.Tensor, piece: Piece) -> tuple[Any, torch.Tensor]:
    """What a rank with this block sends."""
    sizes, starts = piece
    local = full[tuple(slice(start, start + size) for size, start in zip(sizes, starts, strict=True))]
    place = BlockPlacement(sizes, starts, tuple(full.shape))
    monkeypatch.setattr(verl_spec, "derive_dtensor_placement", lambda spec: (place, True, None))
    ((shard, elements),) = own_shards([("w", local.reshape(-1), ShardSpec(tuple(full.shape)))], None, "qwen2")
    return shard, elements


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((12,), {0: [5]}),
        ((8, 6), {0: [3]}),
        ((8, 6), {1: [2, 4]}),
        ((8, 6), {0: [1, 5], 1: [5]}),
        ((4, 6, 5), {1: [2]}),
        ((4, 6, 5), {2: [1, 3]}),
        ((4, 6, 5), {0: [2], 1: [3], 2: [4]}),
        ((2, 3, 4, 5), {2: [1]}),
        ((2, 3, 4, 5), {1: [1, 2], 3: [2]}),
        ((1, 3, 1, 5), {1: [1], 3: [2]}),
    ],
)
def test_blocks_are_put_together_to_the_tensor(
    shape: tuple[int, ...], dims: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.randn(shape).bfloat16()
    pieces = [held(monkeypatch, full, piece) for piece in cuts(shape, dims)]
    random.Random(0).shuffle(pieces)
    assert torch.equal(_together(pieces)[1], full)
    with pytest.raises(CoverageError, match="elements are held by no part"):
        _together(pieces[1:])
    with pytest.raises(CoverageError, match="is held twice"):
        _together([pieces[0], *pieces])


def test_a_block_of_many_dimensions_has_few_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = torch.zeros(64, 32, 48)
    shard, _ = held(monkeypatch, experts, ((64, 16, 48), (0, 16, 0)))
    assert [tuple(rect) for rect in shard.rects] == [(0, 0, 16 * 48, 64, 16 * 48)]
    shard, _ = held(monkeypatch, experts, ((8, 32, 24), (8, 0, 24)))
    assert len(shard.rects) == 8 * 32


def test_who_holds_nothing_of_a_tensor_sends_an_empty_share(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.randn(3, 4)
    first = held(monkeypatch, full, ((3, 4), (0, 0)))
    nothing = held(monkeypatch, full, ((0, 4), (3, 0)))
    assert nothing[0].rects == ()
    assert torch.equal(_together([first, nothing])[1], full)
    monkeypatch.setattr(verl_spec, "derive_dtensor_placement", lambda spec: (0, False, None))
    ((replica, elements),) = own_shards([("w", full.reshape(-1), ShardSpec((3, 4)))], None, "qwen2")
    assert (replica.rects, elements.numel()) == ((), 0)


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7,), (3, 4, 2)])
def test_a_tensor_that_is_on_one_rank_is_sent_whole(shape: tuple[int, ...]) -> None:
    full = torch.randn(shape)
    ((shard, elements),) = own_shards([("w", full.reshape(-1), ShardSpec(shape))], None, "qwen2")
    assert torch.equal(_together([(shard, elements)])[1], full)


def one(name: str, shape: tuple[int, ...] = (4, 2), count: int | None = None, **spec: Any) -> Any:
    elements = torch.zeros(torch.Size(shape).numel() if count is None else count)
    return name, elements, ShardSpec(shape, **spec)


@pytest.mark.parametrize(
    ("exported", "said"),
    [
        (one("decoder.layers.0.weight", place=0), "another form than Hugging Face's"),  # as Megatron's
        (one("experts", hf_slots=[("e.0", (2,))]), "another form than Hugging Face's"),
        (one("experts", to_hf_chunk=lambda start, rows: []), "another form than Hugging Face's"),
        (one("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 3)), "another form than Hugging Face's"),
        (one("model.layers.0.mlp.experts.down_proj", (2, 4, 3)), "another form than Hugging Face's"),
        (one("model.q_proj.base_layer.weight"), "adapters that are not merged"),
        (one("w", count=7), "holds 7 elements of w, and says 8"),
        (one("w", count=9), "holds 9 elements of w, and says 8"),
    ],
)
def test_what_only_a_gather_puts_right_is_refused_by_name(exported: Any, said: str) -> None:
    with pytest.raises(RunError, match=said) as refused:
        list(own_shards([exported], None, "qwen3_moe"))
    assert exported[0] in str(refused.value)


def test_packed_experts_that_are_saved_packed_are_sent() -> None:
    exported = one("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 3))
    assert len(list(own_shards([exported], None, "gpt_oss"))) == 1


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (
            "model.q_proj.base_layer.weight",
            torch.zeros(2),
            r"base_layer.weight belongs to .* adapters .* model.lora.merge=true",
        ),
        ("freqs", torch.zeros(2, dtype=torch.complex64), r"freqs cannot be sent: torch.complex64 cannot travel"),
    ],
)
def test_a_tensor_that_is_not_to_be_sent_is_named_to_all(
    name: str, tensor: torch.Tensor, said: str, make: Callable[..., Members]
) -> None:
    members = make("memory", receivers=1)
    members.meet()
    gathered = []

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for item in [*weights(1).items(), (name, tensor), ("after", torch.zeros(1))]:
            gathered.append(item[0])
            yield item

    for error in members.move(weights(1), 1, given())[::2]:
        assert isinstance(error, RunError)
        assert re.search(said, str(error))
    assert gathered[-1] == "after"
