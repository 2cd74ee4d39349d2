"""What becomes of the metrics of a step's mini-batches."""

from __future__ import annotations

import math

import pytest
from verl.utils.metric import Metric

from trinity_sync.trainer.worker import step_metrics

OF_TWO = {
    "loss": [1.0, 3.0],
    "grad_norm": 0.5,
    "actor/ppo_kl": [Metric("mean", 0.5), Metric("mean", 2.5)],
    "rollout_corr/kl": [0.25, 0.75],
    "rollout_corr/log_prob_abs_diff_max": [2.0, 5.0],
}


def test_optimizer_steps_count_alike_and_of_maxima_the_largest() -> None:
    assert step_metrics(OF_TWO, recomputed=True) == {
        "loss": 2.0,
        "grad_norm": 0.5,
        "updates/skipped": 0.0,
        "actor/ppo_kl": 1.5,
        "rollout_corr/kl": 0.5,
        "rollout_corr/log_prob_abs_diff_max": 5.0,
    }


def test_the_mismatch_is_that_of_the_first_where_nothing_was_recomputed() -> None:
    found = step_metrics(OF_TWO, recomputed=False)
    assert (found["loss"], found["actor/ppo_kl"]) == (2.0, 1.5)
    assert (found["rollout_corr/kl"], found["rollout_corr/log_prob_abs_diff_max"]) == (0.25, 2.0)


@pytest.mark.parametrize(
    ("norms", "norm", "skipped"),
    [([0.5, math.inf, 1.5], 1.0, 1.0), ([math.nan, math.inf], math.nan, 2.0), (math.nan, math.nan, 1.0)],
)
def test_updates_whose_gradient_is_not_finite_are_counted_and_not_averaged(
    norms: object, norm: float, skipped: float
) -> None:
    found = step_metrics({"loss": 1.0, "grad_norm": norms}, recomputed=False)
    assert found == {"loss": 1.0, "grad_norm": pytest.approx(norm, nan_ok=True), "updates/skipped": skipped}
