"""Which layers of a model get an adapter: what a default leaves out, and what is refused by the module's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.families import FAMILIES, WITH_IMAGES
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.config.lora_settings import Adapter
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.hf import add_adapter
from trinity_sync.models.adapter_layers import adapter_layers
from trinity_sync.models.shapes import adapter_list
from trinity_sync.weights.lora import held_adapter, saved_name

SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
DENSE = [*ATTENTION, "down_proj", "gate_proj", "up_proj"]
OF_MLA = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
DEFAULTS = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "olmo2"), DENSE),
    **dict.fromkeys(("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "granitemoe"), ATTENTION),
    "glm4": [*ATTENTION, "down_proj", "gate_up_proj"],
    "phi3": ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"],
    "deepseek_v3": OF_MLA,
    "qwen2_moe": [*ATTENTION, *(f"shared_expert.{name}_proj" for name in ("down", "gate", "up"))],
    "qwen3_next": [*ATTENTION, "in_proj_ba", "in_proj_qkvz", "out_proj"],
}


def model_of(family: str, device: str = "meta", **changes: Any) -> Any:
    with torch.device(device):
        fields = SPECIAL | FAMILIES[family] | changes
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields), attn_implementation="eager").eval()


def refused(family: str, targets: str | Sequence[str], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        adapter_layers(model_of(family, **changes), targets)
    text = str(caught.value)
    assert text.startswith("model.lora.targets: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_default_is_all_linear_layers_but_routers_and_what_peft_takes_for_experts(family: str) -> None:
    assert adapter_layers(model_of(family), "all-linear").names == sorted(DEFAULTS[family])


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("qwen3", []),
        ("qwen3_moe", ["fused experts (mlp.experts)", "routers (mlp.gate)"]),
        ("gpt_oss", ["fused experts (mlp.experts)", "routers (mlp.router)"]),
        ("qwen2_moe", ["fused experts (mlp.experts)", "routers (mlp.gate, mlp.shared_expert_gate)"]),
    ],
)
def test_what_the_default_leaves_out_is_told(family: str, left_out: list[str]) -> None:
    assert adapter_layers(model_of(family), "all-linear").left_out == left_out


@pytest.mark.parametrize("family", DEFAULTS)
def test_peft_puts_the_adapter_on_these_layers_alone(family: str) -> None:
    model = model_of(family)
    layers, wanted = adapter_layers(model, "all-linear"), adapter_list(model, 4, "all-linear")
    with torch.device("meta"):
        get_peft_model(model, LoraConfig(r=4, target_modules=list(layers.names)))
    held = {saved_name(name): tuple(tensor.shape) for name, tensor in held_adapter(model).items()}
    assert held == {name: saved.shape for name, saved in wanted.items()}


def adapted(family: str, folder: Path) -> Any:
    """A model with an adapter that changes it, as an explorer has it; saved in `base` and `adapter` of a folder."""
    torch.manual_seed(0)
    if family in WITH_IMAGES:
        config = CONFIG_MAPPING[family](**WITH_IMAGES[family])
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    else:
        model = model_of(family, "cpu")
    model.save_pretrained(folder / "base")
    add_adapter(Adapter(rank=4, alpha=8, targets="all-linear", path=None), model)
    for tensor in held_adapter(model).values():
        torch.nn.init.normal_(tensor, std=0.3)
    model.peft_config["default"].save_pretrained(folder / "saved")
    tensors = {saved_name(name): tensor for name, tensor in held_adapter(model).items()}
    save_file(tensors, folder / "saved" / "adapter_model.safetensors")
    export_checkpoint(folder / "saved", folder / "adapter", dtype="as-saved")
    return model


def loaded(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", DEFAULTS)
@pytest.mark.few(6)
def test_an_exported_adapter_loads_in_peft_with_equal_logits(family: str, tmp_path: Path) -> None:
    model, ids = adapted(family, tmp_path), torch.arange(3, 25)[None]
    with torch.inference_mode():
        base = loaded(tmp_path / "base")
        without = base(ids).logits.clone()
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        assert torch.equal(model(ids).logits, theirs)
        assert not torch.equal(theirs, without)


@pytest.mark.parametrize("family", [*DEFAULTS, *WITH_IMAGES])
@pytest.mark.few(6)
def test_a_merged_export_has_the_weights_that_peft_merges(family: str, tmp_path: Path) -> None:
    adapted(family, tmp_path)
    export_checkpoint(tmp_path / "adapter", tmp_path / "ours", form="merged", base=tmp_path / "base", dtype="fp32")
    base = loaded(tmp_path / "base", AutoModelForImageTextToText if family in WITH_IMAGES else AutoModelForCausalLM)
    PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("qwen3_moe", ["gate"], "gate means model.layers.0.mlp.gate, a router (Qwen3MoeTopKRouter)"),
        ("qwen3_moe", ["q_proj", "experts"], "model.layers.0.mlp.experts, fused experts (Qwen3MoeExperts)"),
        ("qwen3_moe", ["gate_proj", "up_proj"], "gate_proj is a part of model.layers.0.mlp.experts, which is fused"),
        ("mixtral", ["w1"], "w1 is a part of model.layers.0.mlp.experts, which is fused experts"),
        ("gpt_oss", ["gate_up_proj"], "gate_up_proj is a part of model.layers.0.mlp.experts, which is fused experts"),
        ("deepseek_v3", ["down_proj"], "model.layers.0.mlp.down_proj, whose name peft takes for the fused experts"),
        ("qwen3", ["embed_tokens"], "embed_tokens means model.embed_tokens, of class Embedding"),
        ("qwen3", ["norm"], "norm means model.norm, of class Qwen3RMSNorm"),
        (
            "qwen3",
            ["qproj"],
            "no layer is called qproj (did you mean q_proj?); its linear layers are down_proj, gate_proj",
        ),
        ("phi3", ["q_proj"], "no layer is called q_proj (did you mean qkv_proj?)"),
        ("qwen3", "q_proj", "q_proj matches the whole name of no module (did you mean [q_proj]?)"),
        ("qwen3", r".*\.layers\.0\..*", "means model.layers.0.self_attn, of class Qwen3Attention"),
        ("qwen3", "(", "( is not a regular expression"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_refused_by_its_module(
    family: str, targets: str | list[str], said: str
) -> None:
    assert said in refused(family, targets)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_can_have_an_adapter(tied: bool) -> None:
    assert adapter_layers(model_of("qwen3", tie_word_embeddings=tied), ["lm_head"]).shapes == {"lm_head": (64, 32)}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_expression_means_the_layers_that_it_matches_and_no_others(family: str) -> None:
    """peft by itself takes that of a mixture for all layers of these names."""
    found = adapter_layers(model_of(family), r"model\.layers\.1\.self_attn\.[qk]_proj")
    assert list(found.shapes) == [f"model.layers.1.self_attn.{name}_proj" for name in "qk"]
    assert found.names == ["1.self_attn.k_proj", "1.self_attn.q_proj"]


def test_names_in_a_list_are_given_to_peft_as_they_are() -> None:
    assert adapter_layers(model_of("qwen3"), ["self_attn.q_proj", "v_proj"]).names == ["self_attn.q_proj", "v_proj"]


@pytest.fixture(scope="module")
def with_vision() -> Any:
    """A language model with a tower whose layers bear some of the same names."""
    sizes = {**SPECIAL, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text = {
        **sizes,
        "vocab_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
    }
    tower = {"hidden_size": 32, "num_heads": 2, "depth": 1, "intermediate_size": 48, "out_hidden_size": 32}
    with torch.device("meta"):
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=tower))


def test_the_default_leaves_out_a_vision_tower(with_vision: Any) -> None:
    found = adapter_layers(with_vision, "all-linear")
    assert all(name.startswith("model.language_model.layers.") for name in found.shapes)
    assert "what is outside the language model (model.visual)" in found.left_out


def test_a_target_in_a_vision_tower_is_refused(with_vision: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.visual\.\S+ is outside the language model, and is not trained"):
        adapter_layers(with_vision, ["qkv"])


def test_a_linear_layer_that_computes_something_else_is_left_out() -> None:
    model = model_of("qwen3")

    class Grouped(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).unflatten(-1, (2, -1))

    model.model.layers[0].self_attn.o_proj = Grouped(32, 32, device="meta")
    found = adapter_layers(model, "all-linear")
    assert found.left_out == ["what peft takes for experts or cannot adapt (self_attn.o_proj)"]
