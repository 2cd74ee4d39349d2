"""What vLLM takes of a model and of a run, told by its source."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_sync.models.families import vllm_problem, vllm_temperature_problem

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 2}


@pytest.mark.parametrize("temperature", [0.005, 1e-6, 2.01, 3.0])
def test_a_temperature_that_vllm_changes_or_refuses_is_refused(temperature: float) -> None:
    assert str(vllm_temperature_problem(temperature)).startswith(f"is {temperature}, at which vLLM ")


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_within_its_bounds_pass(temperature: float) -> None:
    assert vllm_temperature_problem(temperature) is None


def test_its_bounds_are_those_of_vllm() -> None:
    sampling = pytest.importorskip("vllm.sampling_params")
    assert sampling.SamplingParams(temperature=0.01).temperature == 0.01
    assert sampling.SamplingParams(temperature=0.009).temperature == 0.01
    assert sampling.SamplingParams(temperature=2.0).temperature == 2.0
    with pytest.raises(Exception, match="temperature must be in"):
        sampling.SamplingParams(temperature=2.01)


@pytest.mark.parametrize(
    ("fields", "size"),
    [({"head_dim": 24}, 24), ({"num_attention_heads": 4}, 16), ({"text_config": QWEN | {"head_dim": 8}}, 8)],
    ids=["own size", "from the width", "of the language model inside"],
)
def test_heads_that_it_has_no_attention_for_on_a_cpu_are_refused(fields: dict[str, Any], size: int) -> None:
    pytest.importorskip("vllm")
    assert f"a model with heads of {size} on a CPU; it knows 32, 64" in str(vllm_problem(QWEN | fields, on_cpu=True))
    assert vllm_problem(QWEN | fields, on_cpu=False) is None


@pytest.mark.parametrize(("rank", "refused"), [(512, False), (32, True)])
def test_a_latent_that_it_has_no_attention_for_on_a_cpu_is_refused(rank: int, refused: bool) -> None:
    pytest.importorskip("vllm")
    fields = QWEN | {"kv_lora_rank": rank, "qk_rope_head_dim": 64}
    told = "a latent (kv_lora_rank + qk_rope_head_dim) of 96 on a CPU; it knows 576"
    assert (told in str(vllm_problem(fields, on_cpu=True))) is refused
    assert vllm_problem(fields, on_cpu=False) is None


def test_a_model_for_images_and_text_is_refused() -> None:
    fields = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    assert str(vllm_problem(fields, on_cpu=False)).startswith("was not tried on models for images and text")


def test_a_family_into_which_it_puts_no_versions_is_refused() -> None:
    fields = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    assert str(vllm_problem(fields, on_cpu=False)).startswith("does not put versions into the layers of ")


def test_an_architecture_of_another_family_than_the_trainers_is_refused() -> None:
    told = vllm_problem(QWEN | {"architectures": ["LlamaForCausalLM"]}, on_cpu=False)
    assert str(told).startswith(
        "goes by architectures [LlamaForCausalLM] of config.json, where the trainer makes Qwen3F"
    )
