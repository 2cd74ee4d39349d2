"""A model folder is compared with what the model is made of, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.backends.engines import DEEPSEEK, SIZES
from tests.families import WITH_IMAGES
from trinity_sync.errors import ConfigError
from trinity_sync.models.architecture import make_model
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
    return left_out(folder, model, saved_list(model)).drafts


@pytest.mark.parametrize("architecture", [QWEN, {**QWEN, "tie_word_embeddings": True}, MOE, DRAFTED])
def test_a_whole_folder_is_whole(tmp_path: Path, architecture: dict[str, Any]) -> None:
    assert found(folder_of(tmp_path, architecture, {}, [])) == ()


@pytest.mark.parametrize("inserted", ["", "vision_model."], ids=["as saved now", "as published"])
def test_a_vision_tower_is_told_by_its_names_in_the_folder(tmp_path: Path, inserted: str) -> None:
    folder, model = model_with_tower(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("vision_tower.", f"vision_tower.{inserted}"): one for name, one in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    expected = {name for name in renamed if name.startswith(("vision_tower.", "multi_modal_projector."))}
    assert left_out(folder, model, saved_list(model)) == ((), tuple(sorted(expected)))


def test_a_vision_tower_in_another_format_is_refused(tmp_path: Path) -> None:
    folder, model = model_with_tower(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"^model\.path=.* has no vision tower in plain safetensors files"):
        left_out(folder, model, saved_list(model))


def model_with_tower(folder: Path) -> tuple[Path, PreTrainedModel]:
    """The folder, and the model without storage."""
    config = AutoConfig.for_model("gemma3", **WITH_IMAGES["gemma3"])
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    with torch.device("meta"):
        return folder, AutoModelForImageTextToText.from_config(config)


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


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def test_all_parts_of_what_the_model_holds_as_one_have_to_be_there(tmp_path: Path) -> None:
    """In a folder of older names, where a part is found by what transformers makes of its name."""
    folder = folder_of(tmp_path, MOE, {}, [])
    tensors = without_prefix(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    assert found(folder) == ()
    del tensors["layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of .*: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight; train"):
        found(folder)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    """transformers would not tie them."""
    folder = folder_of(tmp_path, {**QWEN, "tie_word_embeddings": True}, {}, [])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds lm_head\.weight and model\.embed_tokens\.weight with other values"):
        found(folder)


def test_what_cannot_be_read_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN, {}, [])
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match=r"^model\.path=.*: model\.safetensors is damaged or cannot be read: .*cover"):
        found(folder)
    file.unlink()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ConfigError, match=r": model-00001-of-00001\.safetensors is damaged or cannot be read: File"):
        found(folder)
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is damaged or cannot be read: Val"):
        found(folder)
    index.unlink()
    (folder / "pytorch_model.bin").touch()
    assert found(folder) == ()


def test_the_file_that_transformers_would_load_is_looked_at(tmp_path: Path) -> None:
    """Of a folder that was saved over: `model.safetensors` goes before the index of what was there before."""
    folder = folder_of(tmp_path, QWEN, {}, [])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    assert found(folder) == ()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "whole.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "whole.safetensors")}))
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 9 of .*norm\.weight"):
        found(folder)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_what_a_model_computes_by_itself_is_not_missed(tmp_path: Path, prefix: str) -> None:
    sizes = {"hidden_size": 8, "num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2, "vocab_size": 40}
    folder = make_model({"model_type": "gpt_neo", **sizes, "max_position_embeddings": 16}, 3, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    masks = {f"{prefix}h.0.attn.attention.{name}": torch.ones(1) for name in ("bias", "masked_bias")}
    save_file(tensors | masks, folder / "model.safetensors")
    assert found(folder) == ()
    save_file(tensors | {f"{prefix}h.0.attn.attention.other": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no place for: .*attention\.other"):
        found(folder)
