"""An adapter that a model cannot have, or a backend cannot train, is refused before an engine is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.families import FAMILIES
from trinity_sync.backends.adapters import adapter_targets
from trinity_sync.config.lora_settings import Adapter
from trinity_sync.errors import ConfigError
from trinity_sync.weights.lora import held_adapter, saved_name


def model_of(family: str, device: str = "meta", **changes: Any) -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family] | changes))


def asked(targets: Any = "all-linear", path: Path | None = None) -> Adapter:
    return Adapter(4, 8, targets, path and str(path))


def saved(folder: Path, family: str, targets: list[str]) -> Path:
    """An adapter that peft has put on a model."""
    model = model_of(family, "cpu")
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    wrapped.peft_config["default"].save_pretrained(folder)
    tensors = {saved_name(name): tensor for name, tensor in held_adapter(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_is_refused_where_verl_wraps_it_by_itself(tied: bool) -> None:
    model = model_of("qwen3", tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match=r"model\.lora\.targets includes lm_head.*use backend=fsdp$"):
        adapter_targets(model, asked(["lm_head"]), "fsdp2")


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_is_taken_by_fsdp(tied: bool) -> None:
    model = model_of("qwen3", tie_word_embeddings=tied)
    assert adapter_targets(model, asked(["lm_head"]), "fsdp").names == ["lm_head"]


def test_what_peft_itself_refuses_is_said_with_the_key() -> None:
    config = CONFIG_MAPPING["mamba"](vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"model\.lora\.targets=\[out_proj\] does not fit this model: .*out_proj"):
        adapter_targets(model, asked(["out_proj"]), "fsdp2")


def test_an_adapter_that_is_gone_on_from_is_taken_where_its_layers_are_the_model_s(tmp_path: Path) -> None:
    path = saved(tmp_path / "adapter", "qwen3_moe", ["q_proj", "v_proj"])
    assert adapter_targets(model_of("qwen3_moe"), asked(["q_proj", "v_proj"], path), "fsdp2").left_out == []


def test_an_adapter_that_is_gone_on_from_may_name_layers_of_other_models(tmp_path: Path) -> None:
    targets = ["q_proj", "query_key_value"]
    path = saved(tmp_path / "adapter", "qwen3", targets)
    assert adapter_targets(model_of("qwen3"), asked(targets, path), "fsdp2").names == targets


def test_an_adapter_for_fused_experts_is_refused_by_its_folder(tmp_path: Path) -> None:
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    path = saved(tmp_path / "adapter", "qwen3_moe", targets)
    with pytest.raises(ConfigError, match=rf"model\.lora\.path={path}, adapter_config\.json: .*gate_proj is a part of"):
        adapter_targets(model_of("qwen3_moe"), asked(targets, path), "fsdp2")


def test_an_adapter_of_another_model_is_refused_by_a_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "adapter", "qwen3", ["q_proj"])
    with pytest.raises(ConfigError, match=r"is an adapter for another model: .*q_proj.* is 4x32 there, this .* 4x64"):
        adapter_targets(model_of("qwen3", hidden_size=64), asked(["q_proj"], path), "fsdp2")
