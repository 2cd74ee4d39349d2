"""Trainer, explorers, SFT and exports give the same answers about a model: runs as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.chat_models import byte_tokenizer, make_chat_model
from tests.e2e.runs import Run, launch
from trinity_sync.checkpoint.export import export_checkpoint

HEALTHY = 0.02
"""Mean difference of log-probs of explorer and trainer, natural, of tiny models in bf16."""
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = WIDTHS | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 256}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True, "rope_theta": 10000.0}
MARKS = {"image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 28, "vision_end_token_id": 29}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": TOWER | LAYERS,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": TOWER | LAYERS | {"model_type": "pixtral", "head_dim": 16},
        "image_token_index": 30,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_scaling": ROPE},
        "vision_config": TOWER | QWEN | {"deepstack_visual_indexes": [0]},
        **MARKS,
    },
    "qwen3_5": {
        "text_config": TEXT | LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
        "vision_config": TOWER | QWEN,
        **MARKS,
    },
}


def saved(model: torch.nn.Module, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    ends = json.loads((folder / "config.json").read_text()) | {"eos_token_id": byte_tokenizer().eos_token_id}
    (folder / "config.json").write_text(json.dumps(ends))
    return folder


def rows(path: Path, **more: str) -> str:
    """Prompts such as ``12=``, with the answer 12."""
    lines = [{"prompt": f"{n}=", "answer": f"{n}"} | {name: f"{n}" for name in more} for n in range(10, 42)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"task.path={path}"


def generated(folder: Path, model: Path, *overrides: str) -> Run:
    task = ["task=jsonl", rows(folder / "prompts.jsonl"), "task.response_length=8", "task.prompt_length=64"]
    return launch(folder / "run", *task, f"model.path={model}", "backend.ranks=1", *overrides)


def assert_healthy(run: Run) -> None:
    assert run.code == 0, run.output
    assert max(line["rollout_corr/log_prob_abs_diff"] for line in run.lines("metrics.jsonl")) < HEALTHY


@pytest.mark.all
def test_rollouts_end_where_sft_taught_the_model_to_end(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        said = json.loads((model / name).read_text()) | {"eos_token_id": byte_tokenizer().pad_token_id}
        (model / name).write_text(json.dumps(said))
    task = ["algorithm=sft", "task=pairs", rows(tmp_path / "pairs.jsonl", response=""), "task.max_length=32"]
    steps = ["trainer.steps=40", "trainer.lr=0.005", "checkpoint.interval=40", "algorithm.batch_size=16"]
    taught = launch(tmp_path / "sft", *task, *steps, f"model.path={model}", "backend.ranks=1", small=False)
    assert taught.code == 0, taught.output
    export_checkpoint(taught.folder / "checkpoints/global_step_40", tmp_path / "exported")
    run = generated(tmp_path, tmp_path / "exported")
    assert run.code == 0, run.output
    assert run.lines("metrics.jsonl")[0]["response_length/truncated"] < 0.2


@pytest.mark.all
@pytest.mark.parametrize("family", sorted(WITH_IMAGES))
def test_a_model_for_images_and_text_trains_on_texts_and_keeps_its_tower(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **WITH_IMAGES[family])
    model = saved(AutoModelForImageTextToText.from_config(config), tmp_path / "model")
    (tmp_path / "lengths.py").write_text("def varied(prompt, response):\n    return sum(map(ord, response)) % 5\n")
    reward = "task.reward._target_=lengths.varied"
    run = generated(tmp_path, model, reward, "trainer.lr=0.01")
    assert_healthy(run)
    exported = tmp_path / "exported"
    export_checkpoint(run.folder / "checkpoints/global_step_2", exported)
    before, after = load_file(model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("language_model" in name for name in changed)
    assert not [name for name in changed if "vis" in name or "multi_modal" in name]


@pytest.mark.all
def test_vllm_and_the_trainer_compute_a_soft_cap_alike(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    capped = TEXT | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **capped))
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 20
    path = saved(model, tmp_path / "model")
    assert_healthy(generated(tmp_path, path, "explorer=vllm", "model.attn_implementation=eager"))
    refused = generated(tmp_path, path, "explorer=vllm", "--dry-run")
    assert (refused.code, "which leaves out attn_logit_softcapping (2.0)" in " ".join(refused.output.split())) == (
        2,
        True,
    )
