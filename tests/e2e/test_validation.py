"""`task.validation` as a user sets it: who is asked when, what is kept by it, and that training stays the same."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import launch

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
    assert "Reward of each validation by step" in (run.folder / "report.html").read_text()

    without = launch(tmp_path / "without", "trainer.steps=4", "checkpoint.interval=2", "explorer.replicas=2")
    assert without.digests == run.digests
    trained = [{name: line[name] for name in MEASURED} for line in lines if line["step"]]
    assert trained == [{name: line[name] for name in MEASURED} for line in without.lines("metrics.jsonl")]
