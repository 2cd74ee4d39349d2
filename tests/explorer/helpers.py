"""The default model, and engines with weights, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trinity_sync.explorer.hf import HFEngine

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The model of conf/model/digits.yaml."""


def engine_of(path: Path, **changes: Any) -> HFEngine:
    """An engine without weights."""
    settings = {
        "dtype": "fp32",
        "temperature": 1.0,
        "batch_size": 512,
        "response_length": 3,
        "seed": 0,
        "device": "cpu",
    }
    return HFEngine(str(path), **(settings | changes))  # type: ignore[arg-type]


def loaded(path: Path, **changes: Any) -> HFEngine:
    """An engine with the weights of the folder."""
    engine = engine_of(path, **changes)
    load(engine, path)
    return engine


def load(engine: HFEngine, path: Path) -> None:
    """Give an engine the weights of a folder, as a sync would."""
    weights = load_file(path / "model.safetensors")
    destinations = engine.destinations()
    assert weights.keys() == destinations.keys()
    with torch.no_grad():
        for name, tensor in destinations.items():
            tensor.copy_(weights[name])
    engine.after_load()
