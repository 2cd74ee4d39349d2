"""Explorers that hold weights only take what ranks without an engine publish, in the dtypes in which it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backends.test_bytes import ranks_of
from tests.models.test_shapes import SMALL
from trinity_sync.explorer.bytes import BytesEngine
from trinity_sync.weights.tensors import from_torch

LORA = {"rank": 3, "targets": "all-linear"}


@pytest.mark.parametrize(
    ("lora", "keep_fp32", "kept"),
    [(None, None, 0), (None, ["norm"], 13), (LORA, ["lora_A"], 12)],
    ids=["bf16", "norms in fp32", "an adapter"],
)
def test_destinations_are_of_the_dtypes_that_travel(
    tmp_path: Path, lora: object, keep_fp32: list[str] | None, kept: int
) -> None:
    (backend,) = ranks_of(tmp_path, 1, lora=lora, keep_fp32=keep_fp32)
    engine = BytesEngine(str(tmp_path), dtype="bf16", keep_fp32=keep_fp32, seed=0)
    held = {name: (from_torch(tensor.dtype), tuple(tensor.shape)) for name, tensor in engine.destinations().items()}
    assert held == {name: tensor[:2] for name, tensor in backend.saved().items()}
    assert sum(dtype == "F32" for dtype, _ in held.values()) == kept


def test_what_the_class_of_a_model_keeps_in_fp32_is_held_so(tmp_path: Path) -> None:
    deepseek = {
        **{name: value for name, value in SMALL.items() if name not in ("num_experts", "head_dim")},
        **{"model_type": "deepseek_v3", "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8},
    }
    (backend,) = ranks_of(tmp_path, 1, fields=deepseek)
    engine = BytesEngine(str(tmp_path), dtype="bf16")
    held = {name: from_torch(tensor.dtype) for name, tensor in engine.destinations().items()}
    assert held == {name: tensor.dtype for name, tensor in backend.saved().items()}
    assert held["model.layers.1.mlp.gate.e_score_correction_bias"] == from_torch(torch.float32)
