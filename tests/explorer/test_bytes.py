"""Explorers that hold weights only take what ranks without an engine publish, in the dtypes in which it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backends.engines import DEEPSEEK
from tests.backends.test_bytes import ranks_of
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
    (backend,) = ranks_of(tmp_path, 1, fields={"model_type": "deepseek_v3", **DEEPSEEK})
    engine = BytesEngine(str(tmp_path), dtype="bf16")
    held = {name: from_torch(tensor.dtype) for name, tensor in engine.destinations().items()}
    assert held == {name: tensor.dtype for name, tensor in backend.saved().items()}
    assert held["model.layers.1.mlp.gate.e_score_correction_bias"] == from_torch(torch.float32)
