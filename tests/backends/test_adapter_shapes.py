"""An adapter that is gone on from fits the model, or is refused by name before the engine is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trinity_sync.backends.adapters import check_shapes
from trinity_sync.errors import ConfigError

A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight" for factor in "AB")
WANTED = {A: (2, 8), B: (6, 2)}


def saved(folder: Path, **shapes: tuple[int, ...]) -> Path:
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_of_the_model_s_shapes_is_taken(tmp_path: Path) -> None:
    check_shapes(saved(tmp_path, **WANTED), WANTED)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({A: (2, 8)}, f"it has no {B}"),
        ({**WANTED, "more": (1,)}, "it has more, which this one does not take"),
        ({A: (2, 7), B: (6, 2)}, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is 2x7 there, this model wants 2x8"),
    ],
)
def test_another_model_s_is_refused_by_name(tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(ConfigError, match=f"model.lora.path={tmp_path} is an adapter for another model: .*{said}"):
        check_shapes(saved(tmp_path, **shapes), WANTED)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        check_shapes(tmp_path, WANTED)
