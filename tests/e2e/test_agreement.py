"""A run whose explorers and trainer do not compute the same of equal weights is refused before it trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Run, launch, resume

LOST_ROPE = ["explorer.kind=lost_rope", "explorer._target_=lost_rope.LostRope"]
SHARP = ["trainer.steps=2", "checkpoint.interval=1", "model.architecture.initializer_range=0.3"]
"""A model whose attention matters: that of the defaults is all but uniform."""


@pytest.fixture
def _lost_rope(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "explorer" / "lost_rope.py", tmp_path)


def agreement(run: Run) -> dict[str, Any]:
    (event,) = run.events("agreement")
    return event


@pytest.mark.usefixtures("_lost_rope")
def test_another_function_at_the_explorers_is_refused_with_both_figures(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *SHARP, *LOST_ROPE)
    assert run.code == 2, run.output
    assert "error: explorers and trainer do not compute the same of version 0: their log-probs of " in run.output
    assert "where 0.06 on average is allowed (mean log-prob" in run.output
    assert run.record["status"] == "failed"
    assert not list((tmp_path / "run" / "checkpoints").glob("*/*/manifest.json"))


@pytest.mark.all
@pytest.mark.usefixtures("_lost_rope")
def test_a_warning_trains_all_the_same(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *SHARP, *LOST_ROPE, "explorer.check_agreement=warn")
    assert run.code == 0, run.output
    assert "note: explorers and trainer do not compute the same of version 0" in run.output
    assert agreement(run)["mean"] > agreement(run)["bound"]


@pytest.mark.all
def test_dropout_that_training_has_and_explorers_have_not_is_refused(tmp_path: Path) -> None:
    first = launch(tmp_path / "first", *SHARP)
    shutil.copytree(first.folder / "model", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.5}))
    run = launch(tmp_path / "run", *SHARP[:2], f"model.path={tmp_path / 'model'}")
    assert run.code == 2, run.output
    assert "note: the model's config has attention_dropout=0.5" in run.output
    assert "error: explorers and trainer do not compute the same of version 0" in run.output


@pytest.mark.all
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
@pytest.mark.parametrize("explorer", ["hf", "vllm"])
@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_healthy_runs_are_far_below_the_bound(tmp_path: Path, backend: str, explorer: str, schedule: str) -> None:
    more = ["sync.max_staleness=1"] if schedule == "free" else []
    chosen = [f"backend={backend}", f"explorer={explorer}", f"trainer.schedule={schedule}"]
    run = launch(tmp_path / "run", *chosen, *more)
    assert run.code == 0, run.output
    assert 0 < agreement(run)["mean"] < agreement(run)["bound"] / 3


@pytest.mark.all
def test_each_attempt_measures_before_its_first_update(tmp_path: Path) -> None:
    assert launch(tmp_path / "run", "trainer.steps=2", "checkpoint.interval=1").code == 0
    again = resume(tmp_path / "run", "trainer.steps=3")
    assert again.code == 0, again.output
    assert [(event["attempt"], event["step"]) for event in again.events("agreement")] == [(0, 1), (1, 3)]
