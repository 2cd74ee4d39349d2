from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.weights.helpers import random_tensor, reference_digest, without_nan
from trinity_sync.errors import RunError
from trinity_sync.weights import tensors as tensors_module
from trinity_sync.weights.tensors import saved_list, saved_tensors, state_digest

SIZES = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}


def tiny(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    match kind:
        case "qwen3-tied":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
        case "qwen3-untied":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
        case "qwen3-moe":
            return Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6)
            )
    raise AssertionError(kind)


KINDS = ["qwen3-tied", "qwen3-untied", "llama", "qwen3-moe"]


def written(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_are_those_that_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    ours, theirs = saved_tensors(model), written(tmp_path)
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert state_digest(ours, "BF16") == reference_digest(theirs, "BF16")


def test_keys_that_the_model_does_not_save_are_left_out(tmp_path: Path) -> None:
    model = tiny("llama")
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    model.save_pretrained(tmp_path)
    assert "model.norm.weight" not in saved_tensors(model)
    assert sorted(saved_tensors(model)) == sorted(written(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_saved_tensors_changes_the_model(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    for tensor in saved_tensors(model).values():
        tensor.fill_(0.5)
    model.save_pretrained(tmp_path)
    assert all(bool((tensor == 0.5).all()) for tensor in written(tmp_path).values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_the_meta_device_has_the_same_names_and_shapes(kind: str) -> None:
    real = tiny(kind)
    with torch.device("meta"):
        empty = tiny(kind)
    assert {n: t.shape for n, t in saved_tensors(empty).items()} == {n: t.shape for n, t in saved_tensors(real).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_list_of_what_would_be_saved_needs_no_weights(kind: str, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path)
    with torch.device("meta"):
        listed = saved_list(tiny(kind))
    theirs = written(tmp_path)
    assert {name: (saved.dtype, saved.shape) for name, saved in listed.items()} == {
        name: ("F32", tuple(tensor.shape)) for name, tensor in theirs.items()
    }
    assert {name for name, saved in listed.items() if saved.held != name} == {n for n in theirs if ".experts." in n}


def test_a_tied_tensor_is_kept_under_the_name_that_the_config_expects() -> None:
    names = saved_tensors(tiny("qwen3-tied"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_non_persistent_buffer_is_left_out_and_a_persistent_one_is_not() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    module.register_buffer("kept", torch.ones(3))
    module.register_buffer("derived", torch.ones(3), persistent=False)
    assert sorted(saved_tensors(module)) == ["kept", "weight"]


def test_tensors_side_by_side_in_one_storage_are_all_kept() -> None:
    flat = torch.arange(12.0)
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(flat[:6].view(2, 3))
    module.b = torch.nn.Parameter(flat[6:])
    saved = saved_tensors(module)
    assert {name: tensor.data_ptr() for name, tensor in saved.items()} == {
        "a": module.a.data_ptr(),
        "b": module.b.data_ptr(),
    }


def test_tensors_that_share_memory_undeclared_are_refused() -> None:
    flat = torch.arange(12.0)
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(flat[:8])
    module.b = torch.nn.Parameter(flat[4:])
    with pytest.raises(RunError, match="a, b share memory but are not declared as tied"):
        saved_tensors(module)


def test_state_digest_follows_the_definition_whatever_strides_and_dtype() -> None:
    rng = random.Random(3)
    state = {
        "plain": without_nan(random_tensor("F32", (5, 7), rng)),
        "scalar": without_nan(random_tensor("BF16", (), rng)),
        "turned": without_nan(random_tensor("F32", (6, 4), rng)).t(),
        "thinned": without_nan(random_tensor("F16", (40,), rng))[::3],
        "cube": without_nan(random_tensor("F32", (3, 4, 5), rng)).permute(2, 0, 1),
        "ids": random_tensor("I64", (2, 3), rng),
        "empty": torch.empty(0, 4),
        "hollow": torch.empty(3, 0),
        "none": torch.empty(0),
    }
    for wire in ("BF16", "F32", None):
        assert state_digest(state, wire) == reference_digest(state, wire)


def test_state_digest_in_small_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    state = {
        "rows": without_nan(random_tensor("F32", (50, 3), rng)),
        "long": without_nan(random_tensor("F32", (3, 101), rng)).t().contiguous().t(),
        "vector": without_nan(random_tensor("F32", (333,), rng)),
        "cube": without_nan(random_tensor("F32", (2, 30, 5), rng)).transpose(1, 2),
    }
    expected = reference_digest(state, "BF16")
    monkeypatch.setattr(tensors_module, "CHUNK_BYTES", 64)
    assert state_digest(state, "BF16") == expected


def test_weights_that_need_a_gradient_can_be_digested() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert state_digest({"w": weight}, "BF16") == reference_digest({"w": weight.detach()}, "BF16")
