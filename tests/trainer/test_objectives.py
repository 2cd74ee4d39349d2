"""The objectives, against verl's own functions on the same data and against formulas written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.losses import ADVANTAGES, HALVES, LENGTHS, TOKENS, drawn, loss, of_responses, padded

OF_TOKENS = ["vanilla", "gspo", "gpg", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro"]
COUPLED = ["clip_cov", "kl_cov"]
"""Losses that choose tokens among those of a micro-batch."""
LONGEST = 5


def mask() -> torch.Tensor:
    return padded([np.ones(response) for _, response in LENGTHS])


def settings_of(mode: str, aggregation: str = "token-mean") -> dict[str, Any]:
    from verl.workers.config import PolicyLossConfig

    of_mode = PolicyLossConfig(loss_mode=mode, dro_beta=0.3, clip_cov_ratio=0.3, clip_cov_lb=0.0, kl_cov_ratio=0.3)
    return {"policy_loss": of_mode, "loss_agg_mode": aggregation, "tau_neg": 1.3}


def verls(mode: str, now: list[np.ndarray], old: list[np.ndarray], aggregation: str = "token-mean") -> float:
    """What verl's function gives of the whole mini-batch at once."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **settings_of(mode, aggregation)
    )
    advantages = torch.from_numpy(ADVANTAGES.astype(np.float32))[:, None] * torch.ones(4, LONGEST)
    found, _ = get_policy_loss_fn(mode)(
        old_log_prob=padded(old),
        log_prob=padded(now),
        advantages=advantages,
        response_mask=mask(),
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=None,
    )
    return float(found)


@pytest.mark.parametrize("mode", OF_TOKENS)
def test_a_loss_is_verls_however_the_mini_batch_is_divided(mode: str) -> None:
    now, old = drawn(1, 1.0), drawn(7, 1.0)
    wanted = verls(mode, now, old)
    for cut in ((slice(None),), HALVES):
        found, _, _ = loss(now, old, settings=settings_of(mode), micro_batches=cut)
        assert found == pytest.approx(wanted, rel=1e-5), cut


@pytest.mark.parametrize("mode", COUPLED)
def test_a_loss_that_chooses_tokens_is_verls(mode: str) -> None:
    now, old = drawn(1, 1.0), drawn(7, 1.0)
    torch.manual_seed(3)
    wanted = verls(mode, now, old)
    torch.manual_seed(3)
    found, _, _ = loss(now, old, settings=settings_of(mode))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found != pytest.approx(verls("vanilla", now, old), rel=1e-3), "nothing was chosen"


def test_the_geometric_mean_is_over_the_whole_mini_batch() -> None:
    from trinity_sync.trainer.algorithms.policy_loss import GEO_MEAN

    now, old = drawn(1, 1.0), drawn(7, 1.0)
    wanted = verls("geo_mean", now, old)
    for cut in ((slice(None),), HALVES):
        found, _, _ = loss(now, old, settings=settings_of(GEO_MEAN), micro_batches=cut)
        assert found == pytest.approx(wanted, rel=1e-5), cut


def test_dr_grpo_divides_by_a_constant_and_by_no_length() -> None:
    now, old = drawn(1, 0.05), drawn(7, 0.05)  # nothing is clipped
    settings = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7}
    ratios = [np.exp(row.astype(np.float64) - before) for row, before in zip(now, old, strict=True)]
    wanted = sum(-advantage * row.sum() for row, advantage in zip(ratios, ADVANTAGES, strict=True)) / 4 / 7
    for cut in ((slice(None),), HALVES):
        found, gradient, _ = loss(now, old, settings=settings, micro_batches=cut)
        assert found == pytest.approx(wanted, rel=1e-5)
        for row, ratio, advantage in zip(of_responses(gradient), ratios, ADVANTAGES, strict=True):
            assert row == pytest.approx(-advantage * ratio / 4 / 7, rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "by_hand", "slope"),
    [
        ("k1", lambda d: d, lambda d: np.ones_like(d)),
        ("k2", lambda d: d**2 / 2, lambda d: d),
        ("low_var_kl", lambda d: np.exp(-d) + d - 1, lambda d: 1 - np.exp(-d)),
        ("k3+", lambda d: np.exp(-d) + d - 1, lambda d: d),
    ],
)
def test_the_divergence_from_the_reference_is_in_the_loss(estimator: str, by_hand: Any, slope: Any) -> None:
    now, reference = drawn(1, 0.5), drawn(5, 0.5)
    plain, without, _ = loss(now, now, reference=reference)
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": estimator}
    far = [row.astype(np.float64) - other for row, other in zip(now, reference, strict=True)]
    wanted = by_hand(np.concatenate(far)).sum() / TOKENS
    for cut in ((slice(None),), HALVES):
        found, gradient, metrics = loss(now, now, reference=reference, settings=settings, micro_batches=cut)
        assert found - plain == pytest.approx(0.3 * wanted, rel=1e-4)
        assert metrics["actor/kl_loss"] == pytest.approx(wanted, rel=1e-4)
        added = np.concatenate(of_responses(gradient)) - np.concatenate(of_responses(without))
        assert added == pytest.approx(0.3 * slope(np.concatenate(far)) / TOKENS, rel=1e-3, abs=1e-6)


def test_the_divergence_is_measured_without_a_weight_and_changes_nothing() -> None:
    now, reference = drawn(1, 0.5), drawn(5, 0.5)
    plain, without, none = loss(now, now)
    found, gradient, metrics = loss(now, now, reference=reference, micro_batches=HALVES)
    assert found == pytest.approx(plain, rel=1e-6)
    assert gradient == pytest.approx(without, rel=1e-6)
    far = (np.concatenate(now) - np.concatenate(reference)).astype(np.float64)
    assert metrics["reference/kl"] == pytest.approx(far.mean(), rel=1e-5)
    assert metrics["reference/k3_kl"] == pytest.approx((np.exp(-far) + far - 1).mean(), rel=1e-5)
    assert not {"reference/kl", "actor/kl_loss"} & none.keys()


RULES = [("token_k1", "0.7_1.4"), ("token_k3", "0.05"), ("seq_mean_k1", "0.8_1.2"), ("seq_max_k2,token_k1", "0.5,1.5")]


@pytest.mark.parametrize(("rules", "bounds"), RULES)
def test_what_breaks_a_rule_has_no_loss(rules: str, bounds: str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    old, sampled = drawn(6, 1.0), drawn(7, 1.0)
    _, kept, verls_metrics = compute_rollout_correction_and_rejection_mask(
        padded(old), padded(sampled), mask(), rollout_rs=rules, rollout_rs_threshold=bounds
    )
    assert 0 < kept.sum() < TOKENS, "all or nothing is left out"
    rows = [row[:response].numpy() for row, (_, response) in zip(kept, LENGTHS, strict=True)]
    for cut in ((slice(None),), HALVES):
        found, gradient, metrics = loss(old, sampled, old, rules=rules, bounds=bounds, micro_batches=cut)
        wanted = sum(-advantage * row.sum() for row, advantage in zip(rows, ADVANTAGES, strict=True)) / TOKENS
        assert found == pytest.approx(wanted, rel=1e-5)  # the ratio is 1 at the old weights
        for row, slope, advantage in zip(rows, of_responses(gradient), ADVANTAGES, strict=True):
            assert slope == pytest.approx(-advantage * row / TOKENS, rel=1e-5)
        for name in ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction"):
            assert metrics[name] == pytest.approx(verls_metrics[name], rel=1e-5), name


def test_with_the_samplers_log_probs_the_rules_are_those_of_verls_bypass_mode() -> None:
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    now, sampled = drawn(1, 1.0), drawn(7, 1.0)
    asked = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
    config = ActorConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=asked),
        global_batch_info={"batch_num_tokens": TOKENS},
    )
    advantages = torch.from_numpy(ADVANTAGES.astype(np.float32))[:, None] * torch.ones(4, LONGEST)
    wanted, _ = get_policy_loss_fn("bypass_mode")(
        padded(sampled), padded(now), advantages, mask(), loss_agg_mode="token-mean", config=config
    )
    found, _, _ = loss(now, sampled, rules="token_k1", bounds="0.7_1.4", micro_batches=HALVES)
    assert found == pytest.approx(float(wanted), rel=1e-5)


def test_ratios_are_told_apart_by_the_age_of_the_tokens() -> None:
    from trinity_sync.trainer.algorithms.policy_loss import as_means

    old, sampled = drawn(6, 1.0), drawn(7, 1.0)
    ages = [np.array([0, 1]), np.array([2, 3, 3]), np.array([40]), np.array([1, 1, 0, 0, 0])]
    ratio, age = np.exp(np.concatenate(old).astype(np.float64) - np.concatenate(sampled)), np.concatenate(ages)
    for cut in ((slice(None),), HALVES):
        _, _, raw = loss(old, sampled, old, staleness=ages, micro_batches=cut)
        metrics = {name: value for name, value in as_means(raw).items() if "/stale_" in name}
        assert len(metrics) == 3 * 4
        for first, last in ((0, 0), (1, 1), (2, 3), (16, 99)):
            there = ratio[(age >= first) & (age <= last)]
            of_age = [metrics[f"rollout_corr/stale_{first}/{what}"] for what in ("tokens", "ratio_mean", "ratio_max")]
            assert of_age == pytest.approx([len(there) / TOKENS, there.mean(), there.max()], rel=1e-5)
