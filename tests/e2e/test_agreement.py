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


def put_lost_rope(folder: Path) -> None:
    """Put the engine of `LOST_ROPE` where a run that begins in this folder looks for it."""
    shutil.copy(Path(__file__).parents[1] / "explorer" / "lost_rope.py", folder)


@pytest.fixture
def _lost_rope(tmp_path: Path) -> None:
    put_lost_rope(tmp_path)


def agreement(run: Run) -> dict[str, Any]:
    """The event of the explorer that is farthest from the trainer."""
    return max(run.events("agreement"), key=lambda event: event["mean"])


def assert_refused(run: Run) -> None:
    """Nothing was trained or saved, and the figures are on record."""
    assert (run.record["status"], run.lines("metrics.jsonl")) == ("failed", [])
    assert not list(run.folder.glob("checkpoints/*/*/manifest.json"))
    assert agreement(run)["mean"] > agreement(run)["bound"]


@pytest.mark.all
@pytest.mark.usefixtures("_lost_rope")
def test_a_free_run_is_refused_likewise(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *SHARP, *LOST_ROPE, "trainer.schedule=free", "sync.max_staleness=1")
    assert run.code == 2, run.output
    assert_refused(run)


@pytest.mark.all
@pytest.mark.usefixtures("_lost_rope")
def test_a_warning_trains_all_the_same(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *SHARP, *LOST_ROPE, "explorer.check_agreement=warn")
    assert run.code == 0, run.output
    assert "fault: explorer-0 and the trainer do not compute the same of version 0" in run.output
    assert "1 fault reported" in run.output
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
    assert "error: explorer-0 and the trainer do not compute the same of version 0" in run.output


@pytest.mark.all
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
@pytest.mark.parametrize("explorer", ["hf", "vllm"])
@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_healthy_runs_are_far_below_the_bound(tmp_path: Path, backend: str, explorer: str, schedule: str) -> None:
    more = ["sync.max_staleness=1"] if schedule == "free" else []
    chosen = [f"backend={backend}", f"explorer={explorer}", f"trainer.schedule={schedule}", "explorer.replicas=2"]
    run = launch(tmp_path / "run", *chosen, *more)
    assert run.code == 0, run.output
    assert 0 < agreement(run)["mean"] < agreement(run)["bound"] / 3
    explorers = [event["explorer"] for event in run.events("agreement")]
    assert sorted(explorers) == ["explorer-0", "explorer-1"] or schedule == "free"


@pytest.mark.all
def test_each_attempt_measures_before_its_first_update(tmp_path: Path) -> None:
    assert launch(tmp_path / "run", "trainer.steps=2", "checkpoint.interval=1").code == 0
    again = resume(tmp_path / "run", "trainer.steps=3")
    assert again.code == 0, again.output
    assert [(event["attempt"], event["step"]) for event in again.events("agreement")] == [(0, 1), (1, 3)]


@pytest.mark.all
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_measuring_changes_nothing(tmp_path: Path, backend: str) -> None:
    """Not even where training draws dropout."""
    of_megatron = "+backend.overrides.override_transformer_config.attention_dropout=0.2"
    drops = {"fsdp2": "+model.architecture.attention_dropout=0.2", "megatron": of_megatron}[backend]
    chosen = [f"backend={backend}", "trainer.lr=5e-3", drops]
    digests = [launch(tmp_path / how, *chosen, f"explorer.check_agreement={how}").digests for how in ("warn", "off")]
    assert digests[0] == digests[1]
    assert len(digests[0]) > 1
