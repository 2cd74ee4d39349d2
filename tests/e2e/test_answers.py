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
from tests.families import TEXT, WITH_IMAGES
from trinity_sync.checkpoint.export import export_checkpoint

HEALTHY = 0.02
"""Mean difference of log-probs of explorer and trainer, natural, of tiny models in bf16."""


def saved(model: torch.nn.Module, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    ends = json.loads((folder / "config.json").read_text()) | {"eos_token_id": byte_tokenizer().eos_token_id}
    (folder / "config.json").write_text(json.dumps(ends))
    return folder


def rows(path: Path) -> str:
    """Prompts such as ``12=``, with the answer 12."""
    lines = [{"prompt": f"{n}=", "answer": f"{n}"} for n in range(10, 42)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"task.path={path}"


def generated(folder: Path, model: Path, *overrides: str) -> Run:
    task = ["task=jsonl", rows(folder / "prompts.jsonl"), "task.response_length=8", "task.prompt_length=64"]
    return launch(folder / "run", *task, f"model.path={model}", "backend.ranks=1", *overrides)


def assert_healthy(run: Run) -> None:
    assert run.code == 0, run.output
    assert max(line["rollout_corr/log_prob_abs_diff"] for line in run.lines("metrics.jsonl")) < HEALTHY


@pytest.mark.all
@pytest.mark.parametrize("kind", ["pairs", "conversations"])
def test_rollouts_of_an_export_end_where_sft_taught_the_model_to_end(tmp_path: Path, kind: str) -> None:
    """The tokenizer, by which SFT goes, has another end than the model's two files."""
    model = make_chat_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        said = json.loads((model / name).read_text()) | {"eos_token_id": byte_tokenizer().pad_token_id}
        (model / name).write_text(json.dumps(said))
    learnt, asked = _same_questions(kind)
    (tmp_path / "learnt.jsonl").write_text("\n".join(map(json.dumps, learnt)))
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    task = ["algorithm=sft", f"task={kind}", f"task.path={tmp_path}/learnt.jsonl", "task.max_length=64"]
    steps = [
        "trainer.steps=150",
        "trainer.lr=0.005",
        "checkpoint.interval=150",
        "algorithm.batch_size=16",
        "trainer.micro_batch_size=16",
    ]
    taught = launch(tmp_path / "sft", *task, *steps, f"model.path={model}", "backend.ranks=1", small=False)
    assert taught.code == 0, taught.output
    export_checkpoint(taught.folder / "checkpoints/global_step_150", tmp_path / "exported")
    task = ["task=jsonl", f"task.path={tmp_path}/asked.jsonl", "task.response_length=8", "task.prompt_length=64"]
    samples = ["samples.record_interval=1", "samples.record_groups=4", "trainer.steps=1"]
    sure = ["explorer.temperature=0.1", "explorer.check_agreement=off"]  # what was taught, whatever is drawn
    run = launch(tmp_path / "run", *task, *samples, *sure, f"model.path={tmp_path}/exported", "backend.ranks=1")
    assert run.code == 0, run.output
    ends = [(line["finished"], line["tokens"], len(line["response"])) for line in run.lines("samples.jsonl")]
    assert ends == [(True, 3, 2)] * 16  # two digits and the end


def _same_questions(kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of SFT, and prompts of the same questions: texts of ``pairs``, chats of ``conversations``."""
    learnt, asked = [], []
    for number in map(str, range(10, 42)):
        question: Any = f"{number}="
        row = {"prompt": question, "response": number}
        if kind == "conversations":
            question = [{"role": "user", "content": question}]
            row = {"messages": [*question, {"role": "assistant", "content": number}]}
        learnt.append(row)
        asked.append({"prompt": question, "answer": number})
    return learnt, asked


@pytest.mark.all
@pytest.mark.parametrize(
    ("family", "steps", "sync"),
    [
        *((family, [2], []) for family in sorted(WITH_IMAGES)),
        ("gemma3", [1, 2], ["sync=checkpoint", "checkpoint.interval=2", "trainer.steps=2", "retention=keep_all"]),
    ],
)
def test_a_model_for_images_and_text_trains_on_texts_and_its_tower_stays_and_is_not_sent(
    tmp_path: Path, family: str, steps: list[int], sync: list[str]
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **WITH_IMAGES[family])
    model = saved(AutoModelForImageTextToText.from_config(config), tmp_path / "model")
    (tmp_path / "lengths.py").write_text("def varied(prompt, response):\n    return sum(map(ord, response)) % 5\n")
    reward = "task.reward._target_=lengths.varied"
    run = generated(tmp_path, model, reward, "trainer.lr=0.01", *sync)
    assert_healthy(run)
    before = load_file(model / "model.safetensors")
    still = {name for name in before if "vis" in name or "multi_modal" in name}
    size = sum(tensor.nbytes for name, tensor in before.items() if name not in still)
    sent = {line["bytes_full"] for line in run.lines("events.jsonl") if line["event"] == "publish"}
    assert all(size <= each < size + 64 * len(before) for each in sent), (size, sent)
    for step in steps:
        done = export_checkpoint(run.folder / f"checkpoints/global_step_{step}", tmp_path / f"exported-{step}")
        after = load_file(done.output / "model.safetensors")
        assert (done.checked is not None, before.keys()) == (True, after.keys())
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert any("language_model" in name for name in changed)
        assert not changed & still


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
