"""A model folder is compared with what the model is made of, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.backends.engines import DEEPSEEK, SIZES
from trinity_sync.errors import ConfigError
from trinity_sync.models.factory import make_model
from trinity_sync.models.model_folder import left_out
from trinity_sync.weights.tensors import saved_list

QWEN = {"model_type": "qwen3", **SIZES}
MOE = {"model_type": "qwen3_moe", **SIZES, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DRAFTED = {"model_type": "deepseek_v3", **DEEPSEEK}


def folder_of(tmp_path: Path, architecture: dict[str, Any], add: dict[str, int], drop: list[str]) -> Path:
    """A model's folder with other tensors than it should have."""
    folder = make_model(architecture, 3, tmp_path / "model")
    if architecture is DRAFTED:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    save_file(tensors | {name: torch.ones(size) for name, size in add.items()}, folder / "model.safetensors")
    return folder


def found(folder: Path) -> tuple[str, ...]:
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        config.num_nextn_predict_layers = 0  # as verl does
        model = AutoModelForCausalLM.from_config(config)
    return left_out(folder, model, saved_list(model))


@pytest.mark.parametrize("architecture", [QWEN, {**QWEN, "tie_word_embeddings": True}, MOE, DRAFTED])
def test_a_whole_folder_is_whole(tmp_path: Path, architecture: dict[str, Any]) -> None:
    assert found(folder_of(tmp_path, architecture, {}, [])) == ()


def test_draft_heads_are_told(tmp_path: Path) -> None:
    drafts = {"model.layers.2.eh_proj.weight": 3, "model.layers.2.mlp.gate.weight": 3}
    assert found(folder_of(tmp_path, DRAFTED, drafts, [])) == tuple(drafts)
    named = {"model.layers.61.eh_proj.weight": 3}  # by the class, whatever the config says
    assert found(folder_of(tmp_path / "named", DRAFTED, named, [])) == tuple(named)


@pytest.mark.parametrize(
    ("architecture", "add", "drop", "told"),
    [
        (QWEN, {"model.layers.2.eh_proj.weight": 3}, [], "1 tensors that Qwen3ForCausalLM has no place for: model.la"),
        (QWEN, {}, ["model.norm.weight"], "lacks 1 of the 25 tensors of Qwen3ForCausalLM: model.norm.weight; training"),
        (MOE, {}, ["model.layers.1.mlp.experts.2.up_proj.weight"], "model.layers.1.mlp.experts.2.up_proj.weight"),
        (QWEN, {}, ["lm_head.weight"], "lm_head.weight; training would begin with random numbers"),
    ],
)
def test_what_would_be_left_out_or_drawn_at_random_is_refused(
    tmp_path: Path, architecture: dict[str, Any], add: dict[str, int], drop: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path=") as refused:
        found(folder_of(tmp_path, architecture, add, drop))
    assert told in str(refused.value)


def test_other_forms_of_a_folder_are_known(tmp_path: Path) -> None:
    tied = folder_of(tmp_path, {**QWEN, "tie_word_embeddings": True}, {}, [])
    tensors = load_file(tied / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    for names in (["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"], ["embed_tokens.weight"]):
        more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3), **dict.fromkeys(names, embedding)}
        save_file({name: tensor.clone() for name, tensor in (tensors | more).items()}, tied / "model.safetensors")
        assert found(tied) == ()
    quantised = {**json.loads((tied / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}}
    save_file({"scale": torch.ones(1)}, tied / "model.safetensors")
    (tied / "config.json").write_text(json.dumps(quantised))
    assert found(tied) == ()
    (tied / "model.safetensors").write_bytes(b"torn")
    assert found(tied) == ()
