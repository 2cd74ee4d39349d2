"""What a user may get wrong in training is told by its key, before a cluster is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import launch

REWARDS = "async def waits(prompt, response): ...\n\ndef wants_more(prompt, response, volume): ...\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "61=", "answer": "61"}) + "\n")
    (tmp_path / "bad_rewards_of_mine.py").write_text(REWARDS)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 33})
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def case(told: str, *overrides: str, fast: bool = False) -> object:
    return pytest.param(told, overrides, id=overrides[-1], marks=() if fast else pytest.mark.all)


ROWS = ("task=jsonl", "task.path={}/rows.jsonl", "task.response_length=3")


@pytest.mark.parametrize(
    ("told", "overrides"),
    [
        case("question", *ROWS, "task.prompt_key=question", fast=True),
        case("solution", *ROWS, "task.answer_key=solution"),
        case("backend.overrides.use_dynamic_bsz", "+backend.overrides.use_dynamic_bsz=true"),
        case("a vocabulary of 33 tokens", "algorithm.kl.coeff=0.1", "algorithm.kl.reference={}/reference"),
        case("task.reward.on_error", *ROWS, "task.reward.on_error=ignore"),
        case("asynchronous", *ROWS, "task.reward._target_=bad_rewards_of_mine.waits"),
        case("missing a required argument: 'volume'", *ROWS, "task.reward._target_=bad_rewards_of_mine.wants_more"),
        case("trainer.remove_padding", "backend=megatron", "trainer.remove_padding=always"),
        case("model.lora.rank", "backend=megatron", "model.lora.rank=4"),
        case("no layer is called qq_proj (did you mean q_proj?)", "model.lora.rank=4", "model.lora.targets=[qq_proj]"),
    ],
)
def test_a_wrong_setting_or_file_ends_with_2_before_ray(folder: Path, told: str, overrides: tuple[str, ...]) -> None:
    run = launch(folder / "run", *(override.replace("{}", str(folder)) for override in overrides))
    assert run.code == 2, run.output
    assert told in run.output
    assert "Traceback" not in run.output
    assert "Ray" not in run.output
    assert not (folder / "run" / "run.json").exists()
