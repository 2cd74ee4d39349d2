"""Which rectangles of Hugging Face tensors a local Megatron parameter holds, against a plain cut of whole tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.backends.megatron.bridges import Geometry, among_all_experts, dtypes_of, pieces
from trinity_sync.errors import ConfigError
from trinity_sync.weights.shards import check_cover
from trinity_sync.weights.wire import WireFormat

Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


def _at(rank: int, ranks: int, *, groups: int = 4, per_group: int = 2, vocabulary: int = 37) -> Geometry:
    return Geometry(
        heads=groups * per_group, groups=groups, head_size=3, vocabulary=vocabulary, tp_rank=rank, tp_size=ranks
    )


def _put_together(parts: list[list[tuple[object, torch.Tensor]]]) -> dict[str, np.ndarray]:
    """Whole tensors from the shards and local elements of all ranks; checks that each element is held once."""
    check_cover([[shard for shard, _ in part] for part in parts])
    found: dict[str, np.ndarray] = {}
    for part in parts:
        for shard, local in part:
            whole = found.setdefault(shard.name, np.zeros(shard.matrix, np.float32))
            flat = local.reshape(-1).numpy()
            for rect in shard.rects:
                start = rect.offset // 4
                block = flat[start : start + rect.rows * rect.cols].reshape(rect.rows, rect.cols)
                whole[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols] = block
    return found


def _held(name: str, hf_names: list[str], local: torch.Tensor, at: Geometry) -> list[tuple[object, torch.Tensor]]:
    dtypes = dict.fromkeys(hf_names, "F32")
    return [(piece.shard, piece.view(local)) for piece in pieces(name, hf_names, local.shape, dtypes, at)]


@given(ranks=st.sampled_from([1, 2, 4]), per_group=st.integers(1, 3), bias=st.booleans())
def test_queries_keys_and_values_of_groups_of_heads(ranks: int, per_group: int, bias: bool) -> None:
    groups, size, columns = 4, 3, () if bias else (5,)
    draw = torch.Generator().manual_seed(per_group)
    q = torch.rand(groups, per_group, size, *columns, generator=draw)
    k, v = (torch.rand(groups, 1, size, *columns, generator=draw) for _ in range(2))
    fused = torch.cat([q, k, v], dim=1).reshape(groups * (per_group + 2) * size, *columns)
    name = "decoder.layers.0.self_attention.linear_qkv." + ("bias" if bias else "weight")
    parts = [
        _held(name, [Q, K, V], local, _at(rank, ranks, groups=groups, per_group=per_group))
        for rank, local in enumerate(fused.chunk(ranks))
    ]
    found = _put_together(parts)
    for hf_name, whole in zip((Q, K, V), (q, k, v), strict=True):
        assert np.array_equal(found[hf_name].reshape(-1), whole.reshape(-1).numpy())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_and_up(ranks: int) -> None:
    gate, up = torch.rand(8, 5), torch.rand(8, 5)
    locals_ = [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    found = _put_together([_held(name, ["gate", "up"], local, _at(i, ranks)) for i, local in enumerate(locals_)])
    assert np.array_equal(found["gate"], gate.numpy())
    assert np.array_equal(found["up"], up.numpy())


@pytest.mark.parametrize("name", ["self_attention.linear_proj.weight", "mlp.linear_fc2.weight"])
def test_layers_that_are_cut_by_columns(name: str) -> None:
    whole = torch.rand(6, 8)
    parts = [
        _held(f"decoder.layers.0.{name}", ["out"], local.contiguous(), _at(i, 4))
        for i, local in enumerate(whole.chunk(4, dim=1))
    ]
    assert np.array_equal(_put_together(parts)["out"], whole.numpy())


@given(tp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([1, 2, 4]), each=st.integers(1, 3), grouped=st.booleans())
def test_experts_of_several_ranks(tp: int, ep: int, each: int, grouped: bool) -> None:
    """Where they are modules of their own, and where they are parameters of one."""
    draw = torch.Generator().manual_seed(each)
    gate, up = (torch.rand(ep * each, 8, 5, generator=draw) for _ in range(2))
    down, router = torch.rand(ep * each, 5, 8, generator=draw), torch.rand(ep * each, 5, generator=draw)
    parts = []
    for rank, expert_rank in np.ndindex(tp, ep):
        at, held = _at(rank, tp), []
        for index in range(each):
            number = expert_rank * each + index
            wide = torch.cat([gate[number].chunk(tp)[rank], up[number].chunk(tp)[rank]])
            narrow = down[number].chunk(tp, dim=1)[rank].contiguous()
            for layer, local, names in (("linear_fc1", wide, ["gate", "up"]), ("linear_fc2", narrow, ["down"])):
                end = f"{layer}.weight{index}" if grouped else f"local_experts.{index}.{layer}.weight"
                name = among_all_experts(f"decoder.layers.0.mlp.experts.{end}", expert_rank * each)
                assert name == f"decoder.layers.0.mlp.experts.{layer}.weight{number}"
                held += _held(name, [f"{of}-{number}" for of in names], local, at)
        if expert_rank == 0:  # one of the replicas
            held += _held("decoder.layers.0.mlp.router.weight", ["router"], router, at)
        parts.append(held)
    found = _put_together(parts)
    assert len(found) == 3 * ep * each + 1
    assert np.array_equal(found["router"], router.numpy())
    for name, wholes in (("gate", gate), ("up", up), ("down", down)):
        for number, whole in enumerate(wholes):
            assert np.array_equal(found[f"{name}-{number}"], whole.numpy())


@given(ranks=st.sampled_from([1, 2, 4, 8]), vocabulary=st.integers(1, 40))
def test_the_padding_of_the_vocabulary_is_nobodys(ranks: int, vocabulary: int) -> None:
    whole = torch.rand(vocabulary, 3)
    padded = torch.cat([whole, torch.full((-vocabulary % 8, 3), 7.0)])
    parts = [
        _held("embedding.word_embeddings.weight", ["embed"], local, _at(i, ranks, vocabulary=vocabulary))
        for i, local in enumerate(padded.chunk(ranks))
    ]
    assert np.array_equal(_put_together(parts)["embed"], whole.numpy())


@pytest.mark.parametrize(
    "name", ["decoder.final_layernorm.weight", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"]
)
def test_the_first_rank_contributes_what_all_hold(name: str) -> None:
    norm = torch.rand(6)
    parts = [_held(name, ["norm"], norm, _at(rank, 2)) for rank in range(2)]
    assert [len(part) for part in parts] == [1, 0]
    assert np.array_equal(_put_together(parts)["norm"][0], norm.numpy())


def test_a_parameter_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"mlp\.router\.expert_bias"):
        pieces("decoder.layers.0.mlp.router.expert_bias", ["x"], (4, 4), {"x": "F32"}, _at(0, 1))


GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))


def test_a_part_of_a_parameter_travels_in_its_own_dtype() -> None:
    dtypes = dtypes_of([GATE, UP], "F32", WireFormat("BF16", frozenset([UP])))
    assert dtypes == {GATE: "BF16", UP: "F32"}
    held = pieces("decoder.layers.0.mlp.linear_fc1.weight", [GATE, UP], (6, 4), dtypes, _at(0, 1))
    assert {piece.shard.name: piece.shard.dtype for piece in held} == dtypes


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_what_the_engine_has_rounded_is_not_said_to_be_kept(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sync\.keep_fp32 keeps {UP} in fp32, but backend=megatron trains"):
        dtypes_of([GATE, UP], "BF16", WireFormat(dtype, frozenset([UP])))
    assert dtypes_of([GATE, UP], "BF16", WireFormat("F32", frozenset([UP]))) == {GATE: "F32", UP: "F32"}
    assert dtypes_of([GATE, UP], "BF16", WireFormat(dtype)) == {GATE: dtype, UP: dtype}
