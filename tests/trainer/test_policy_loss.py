"""The loss on samples of another program, against the formulas: importance weights, and what they correct."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.losses import ADVANTAGES, HALVES, LENGTHS, TOKENS, drawn, loss, of_responses


def clipped(now: np.ndarray, old: np.ndarray, advantage: float) -> np.ndarray:
    """Loss of each token of a response."""
    ratio = np.exp(now.astype(np.float64) - old)
    objective = np.maximum(-ratio * advantage, -np.clip(ratio, 0.8, 1.2) * advantage)
    return np.minimum(objective, -3.0 * advantage) if advantage < 0 else objective


def weights(old: np.ndarray, sampled: np.ndarray, level: str, threshold: float) -> np.ndarray:
    logs = old.astype(np.float64) - sampled
    of_sequence = np.full_like(logs, logs.sum())
    return np.minimum(np.exp(logs if level == "token" else of_sequence), threshold)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_losses_of_tokens_are_multiplied_by_truncated_weights(level: str) -> None:
    now, old, sampled = drawn(1, 2.0), drawn(6, 2.0), drawn(7, 2.0)
    wanted = [weights(before, other, level, 1.5) for before, other in zip(old, sampled, strict=True)]
    assert any((row == 1.5).any() for row in wanted), "nothing is truncated"
    assert any((row < 1.5).any() for row in wanted), "everything is truncated"
    losses = [clipped(*rows) * weight for *rows, weight in zip(now, old, ADVANTAGES, wanted, strict=True)]
    found, _, metrics = loss(now, sampled, old, level=level, threshold=1.5)
    assert found == pytest.approx(np.concatenate(losses).sum() / TOKENS, rel=1e-5)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.concatenate(wanted).mean(), rel=1e-5)


def test_how_many_weights_are_truncated_is_measured() -> None:
    now, old, sampled = drawn(1, 2.0), drawn(6, 2.0), drawn(7, 2.0)
    found = np.concatenate([weights(before, other, "token", 1.5) for before, other in zip(old, sampled, strict=True)])
    _, _, metrics = loss(now, sampled, old, level="token", threshold=1.5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx((found == 1.5).mean())
    assert metrics["rollout_corr/rollout_is_max"] == 1.5
    size = found.mean() ** 2 / (found**2).mean()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-5)


def gap(trained: list[np.ndarray], sampled: list[np.ndarray]) -> dict[str, float]:
    logs = (np.concatenate(trained) - np.concatenate(sampled)).astype(np.float64)
    return {
        "rollout_corr/kl": -logs.mean(),
        "rollout_corr/k3_kl": (np.exp(logs) - logs - 1).mean(),
        "rollout_corr/log_prob_abs_diff": np.abs(logs).mean(),
        "rollout_corr/log_prob_abs_diff_max": np.abs(logs).max(),
    }


def test_the_gap_is_that_of_the_recomputed_log_probs() -> None:
    now, old, sampled = drawn(1, 2.0), drawn(6, 2.0), drawn(7, 2.0)
    _, _, metrics = loss(now, sampled, old, level="token")
    assert {name: metrics[name] for name in gap(old, sampled)} == pytest.approx(gap(old, sampled), rel=1e-5)


def test_without_them_it_is_that_of_the_log_probs_at_hand() -> None:
    now, sampled = drawn(1, 2.0), drawn(7, 2.0)
    total, _, metrics = loss(now, sampled)
    assert {name: metrics[name] for name in metrics if name.startswith("rollout_corr/")} == pytest.approx(
        gap(now, sampled), rel=1e-5
    )
    losses = [clipped(*rows) for rows in zip(now, sampled, ADVANTAGES, strict=True)]
    assert total == pytest.approx(np.concatenate(losses).sum() / TOKENS, rel=1e-5)


def test_means_of_the_gap_are_over_all_tokens_however_they_are_divided() -> None:
    now, sampled = drawn(1, 2.0), drawn(7, 2.0)
    _, _, metrics = loss(now, sampled, micro_batches=HALVES)
    assert {name: metrics[name] for name in gap(now, sampled)} == pytest.approx(gap(now, sampled), rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["token", "sequence"]), st.floats(1.0, 9.0), st.floats(0.1, 5.0))
def test_where_the_log_probs_agree_all_weights_are_1_and_nothing_changes(
    seed: int, level: str, threshold: float, scale: float
) -> None:
    now, sampled = drawn(seed, scale), drawn(seed + 1, scale)
    plain, gradient, _ = loss(now, sampled)
    found, corrected, metrics = loss(now, sampled, sampled, level=level, threshold=threshold)
    assert found == plain
    assert corrected.tobytes() == gradient.tobytes()
    assert metrics["rollout_corr/rollout_is_mean"] == metrics["rollout_corr/rollout_is_max"] == 1.0
    assert metrics["rollout_corr/kl"] == metrics["rollout_corr/log_prob_abs_diff_max"] == 0.0


def test_no_gradient_goes_through_the_weights() -> None:
    old, sampled = drawn(2, 0.3), drawn(3, 0.3)
    _, gradient, _ = loss(old, sampled, old, level="token", threshold=9.0)
    for row, before, other, advantage in zip(of_responses(gradient), old, sampled, ADVANTAGES, strict=True):
        wanted = -advantage * np.exp(before.astype(np.float64) - other) / TOKENS  # the ratio is 1 at the old weights
        assert row == pytest.approx(wanted, rel=1e-5)


def test_means_of_the_update_are_over_all_tokens_however_they_are_divided() -> None:
    now, sampled = drawn(1, 2.0), drawn(7, 2.0)
    _, _, metrics = loss(now, sampled, micro_batches=HALVES)
    logs = np.concatenate(now).astype(np.float64) - np.concatenate(sampled)
    advantages = np.repeat(ADVANTAGES, [response for _, response in LENGTHS])
    ratio = np.exp(logs)
    clipped_tokens = -np.clip(ratio, 0.8, 1.2) * advantages > -ratio * advantages
    assert metrics["actor/ppo_kl"] == pytest.approx(-logs.mean(), rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped_tokens.mean(), rel=1e-5)
    whole = loss(now, sampled)[2]
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(whole["actor/pg_clipfrac_lower"], rel=1e-5)
    of_weights = [
        loss(now, sampled, now, level="token", threshold=1.5, micro_batches=cut)[2] for cut in (HALVES, (slice(None),))
    ]
    name = "rollout_corr/rollout_is_ratio_fraction_high"
    assert of_weights[0][name] == pytest.approx(of_weights[1][name], rel=1e-5)
