"""Folders that pass for a model's with whoever reads no tensor."""

from __future__ import annotations

import json
from pathlib import Path


def bare_model(folder: Path, **fields: object) -> Path:
    """Write a config.json, of a Qwen3 unless `fields` say otherwise, and weights without a tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **fields})
    )
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder
