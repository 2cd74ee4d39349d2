"""`algorithm.rollout_correction` as a user sets it: what a run then says of its samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.runs import Run, launch

LEVEL = "algorithm.rollout_correction.rollout_is"
TRUNCATED = f"{LEVEL}_threshold=0.5"
"""Below what any weight of a sampler is that nearly agrees."""


def assert_measured(run: Run, *, fresh: bool = True, rounded: bool = True) -> None:
    """Every step has said how far explorers and trainer are apart: by no more than what rounding does, where samples
    are of the newest weights. Where the trainer does not round its log-probs to bf16, they may be the same.
    """
    assert run.code == 0, run.output
    steps = run.lines("metrics.jsonl")
    for line in steps:
        assert line["rollout_corr/k3_kl"] >= 0
        mean, most = line["rollout_corr/log_prob_abs_diff"], line["rollout_corr/log_prob_abs_diff_max"]
        assert 0 < mean < most if rounded else 0 <= mean <= most
        assert line["rollout_corr/log_prob_abs_diff_max"] < 0.1 or not fresh
    largest = max(line["rollout_corr/log_prob_abs_diff_max"] for line in steps)
    assert run.summary["mismatch"]["log_prob_abs_diff_max"] == largest
    drawn = "Mismatch by step" in (run.folder / "report.html").read_text()
    assert drawn or largest == 0


def assert_truncated(run: Run) -> None:
    """All weights are the threshold."""
    for line in run.lines("metrics.jsonl"):
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(0.5)
        assert line["rollout_corr/rollout_is_max"] == pytest.approx(0.5)
        assert line["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1.0)


@pytest.mark.all
def test_weights_are_truncated_and_the_update_is_measured_from_the_weights_before(tmp_path: Path) -> None:
    measured = ("algorithm.calculate_entropy=true", "trainer.warmup_steps=2", "trainer.lr=1e-3")
    groups = ("backend=fsdp", "sync=nccl", "backend.ranks=1", "explorer.replicas=2")
    run = launch(tmp_path / "run", f"{LEVEL}=token", TRUNCATED, *measured, *groups)
    run.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], explorers=2)
    assert_measured(run, rounded=False)  # of logits in fp32, as the entropy is
    assert_truncated(run)
    entropies = [line["actor/entropy_loss"] for line in run.lines("metrics.jsonl")]
    assert entropies[0] == pytest.approx(np.log(32), rel=0.02), "that of all tokens alike, as the model begins"
    assert min(entropies) > 0
    # with one optimizer step, what is trained with is what was recomputed, bit for bit
    assert {line["actor/ppo_kl"] for line in run.lines("metrics.jsonl")} == {0.0}
    assert run.summary["sync"]["mismatched"] == 0
    assert [line["lr"] for line in run.lines("metrics.jsonl")] == pytest.approx([0.0, 5e-4, 1e-3])


@pytest.mark.all
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
def test_at_a_temperature_explorers_and_trainer_agree_on_the_newest_weights(tmp_path: Path, backend: str) -> None:
    run = launch(tmp_path / "run", f"backend={backend}", "explorer.temperature=0.5")
    assert run.code == 0, run.output
    for line in run.lines("metrics.jsonl"):
        assert line["rollout_corr/log_prob_abs_diff"] < 3e-3


@pytest.mark.all
def test_without_a_level_nothing_is_weighed(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "trainer.mini_batches=2", "trainer.epochs=2")
    assert_measured(run)
    for line in run.lines("metrics.jsonl"):
        assert not [name for name in line if "rollout_is" in name]
        assert line["actor/ppo_kl"] != 0.0


@pytest.mark.all
@pytest.mark.parametrize(
    "overrides",
    [
        ("backend=fsdp",),
        ("backend=fsdp2", "trainer.micro_batch_size=2"),
        ("backend=megatron", "backend.tp=2"),
        ("backend=megatron", "backend.pp=2"),
        ("backend=megatron", "backend.ranks=4", "backend.tp=2", "backend.pp=2"),
    ],
    ids="-".join,
)
def test_all_engines_recompute(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = launch(tmp_path / "run", *overrides, f"{LEVEL}=token", TRUNCATED)
    assert_measured(run)
    assert_truncated(run)
    assert {line["actor/ppo_kl"] for line in run.lines("metrics.jsonl")} == {0.0}
    run.assert_reproduced()


@pytest.mark.all
def test_stale_samples_of_a_free_run_are_weighed_too(tmp_path: Path) -> None:
    free = ("trainer.schedule=free", "sync.max_staleness=1", "explorer.replicas=2", "trainer.steps=12")
    run = launch(tmp_path / "run", *free, f"{LEVEL}=sequence", "trainer.mini_batches=2")
    assert_measured(run, fresh=False)
    assert max(line["rollout_corr/rollout_is_mean"] for line in run.lines("metrics.jsonl")) <= 2.0
