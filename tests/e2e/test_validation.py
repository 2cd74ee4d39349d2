"""`task.validation` as a user sets it: who is asked when, what is kept by it, and that training stays the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Run, launch, resume, start

VALIDATED = [
    "trainer.steps=4",
    "checkpoint.interval=2",
    "task.validation.prompts=6",
    "task.validation.interval=2",
    "task.validation.samples_per_prompt=2",
    "task.validation.temperature=1.0",
]
BEST = ["retention=[keep_best]", "retention.policies.keep_best.metric=val/reward/mean"]
MEASURED = ("loss", "grad_norm", "reward/mean", "reward/std", "response_length/mean", "batch/tokens")


def test_the_best_by_a_validation_are_kept_and_training_is_bitwise_that_without(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *VALIDATED, *BEST, "retention.policies.keep_best.n=2", "explorer.replicas=2")
    run.assert_the_same_weights_everywhere([0, 1, 2, 3, 4], [2, 4], 2)
    lines = run.lines("metrics.jsonl")
    validated = {line["step"]: line for line in lines if "val/reward/mean" in line}
    assert list(validated) == [0, 2, 4]
    assert all((line["val/prompts"], line["val/samples"]) == (6.0, 12.0) for line in validated.values())
    assert all(0 <= line["val/exact"] <= line["val/pass@2"] <= 1 for line in validated.values())
    assert all(line["timing/validate"] > 0 for line in validated.values())
    rewards = {step: line["val/reward/mean"] for step, line in validated.items()}
    for step, manifest in run.manifests.items():
        assert manifest["metrics"]["val/reward/mean"] == rewards[step]
    summary = run.summary["validation"]
    assert (summary["reward_first"], summary["reward_last"]) == (rewards[0], rewards[4])
    assert summary["reward_best"] == max(rewards.values()) == rewards[summary["best_step"]]
    page = (run.folder / "report.html").read_text()
    assert "Reward of each validation by step" in page
    assert "waits for a validation" in page

    without = launch(tmp_path / "without", "trainer.steps=4", "checkpoint.interval=2", "explorer.replicas=2")
    assert without.digests == run.digests
    trained = [{name: line[name] for name in MEASURED} for line in lines if line["step"]]
    assert trained == [{name: line[name] for name in MEASURED} for line in without.lines("metrics.jsonl")]


@pytest.mark.all
def test_a_run_that_goes_on_validates_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    settings = (*VALIDATED, "trainer.steps=8", "explorer.replicas=2", "sync=memory")
    whole = launch(tmp_path / "whole", *settings)
    assert whole.code == 0, whole.output
    started = start(tmp_path / "run", *settings)
    started.wait_for_file("checkpoints/global_step_4/manifest.json")
    os.killpg(started.process.pid, signal.SIGKILL)
    started.finish()
    run = resume(started.folder)
    assert run.code == 0, run.output

    def validated(run: Run) -> list[dict[str, float]]:
        lines = [line for line in run.lines("metrics.jsonl") if "val/reward/mean" in line]
        return [
            {"step": line["step"]} | {name: line[name] for name in line if name.startswith("val/")} for line in lines
        ]

    assert validated(run) == validated(whole)
    assert [line["step"] for line in validated(run)] == [0, 2, 4, 6, 8]


@pytest.mark.all
def test_a_run_with_validation_is_reproduced(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *VALIDATED)
    assert run.code == 0, run.output
    run.assert_reproduced()
