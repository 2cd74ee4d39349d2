"""verl's policy losses on samples of another program: measures the mismatch of its log-probs and the trainer's, and
corrects for it. Called by every trainer rank that has log-probs.

The mismatch refers to the weights before the step: between the samplers' log-probs (`rollout_log_probs`) and those that
the trainer recomputed (`old_log_probs`). Without recomputation the current log-probs take their place, which is right
in the first optimizer step only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_geo_mean, kl_penalty, register_policy_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from trinity_sync.config.schema import RolloutCorrectionConfig
from trinity_sync.trainer.algorithms.base import MISMATCH, REJECTED

GEO_MEAN = "trinity_geo_mean"
"""Name of verl's `geo_mean` without its dependence on micro-batches, for `policy_loss.loss_mode`."""
_WEIGHTS = ("rollout_is_mean", "rollout_is_eff_sample_size", "rollout_is_ratio_fraction_high")
_OF_UPDATE = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")


class _CorrectedBatch(NamedTuple):
    """The corrected data of a micro-batch, and its metrics. `of_tokens`: means over the micro-batch's tokens."""

    data: TensorDict
    of_tokens: dict[str, float]
    of_sequences: dict[str, float]
    largest: dict[str, float]


def policy_loss(config: ActorConfig, correction: RolloutCorrectionConfig, *, recomputed: bool) -> Callable[..., object]:
    """Make the loss for verl's `TrainingWorker.set_loss_fn`.

    Its arguments are those of verl's `ppo_loss`. Its data also have `rollout_log_probs`; `staleness` (of each response
    token, in steps), to measure ratios by age; and `ref_log_prob`, if there is a reference.
    """

    def loss(
        model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        fields = ["response_mask", "old_log_probs", "rollout_log_probs"]
        fields += [name for name in ("staleness", "ref_log_prob") if name in data]
        padded = data.select(*fields).to_padded_tensor()
        mask, sampled = padded["response_mask"], padded["rollout_log_probs"]
        now = no_padding_2_padding(model_output["log_probs"], data).detach()
        before = padded["old_log_probs"] if recomputed else now
        corrected = _corrected(data, before - sampled, mask, correction)
        result, metrics = ppo_loss(config, model_output, corrected.data, dp_group)
        # ppo_loss has set the number of tokens of the whole mini-batch
        batch = config.global_batch_info
        means = corrected.of_tokens | {name: metrics[name].aggregate() for name in _OF_UPDATE if name in metrics}
        share = agg_loss(torch.ones_like(mask), mask, "token-mean", **batch).item()
        shares = {name: mean * share for name, mean in means.items()}
        part = len(mask) * batch["dp_size"] / batch["global_batch_size"]
        shares |= {name: mean * part for name, mean in corrected.of_sequences.items()}
        found = {
            **{name: Metric(AggregationType.SUM, value) for name, value in shares.items()},
            **{name: Metric(AggregationType.MAX, value) for name, value in corrected.largest.items()},
            **_mismatch(sampled, before, mask, batch),
        }
        if "staleness" in padded:
            found |= stale_ratios(before - sampled, padded["staleness"], mask, batch)
        if "ref_log_prob" in padded:
            found |= _from_reference(now, padded["ref_log_prob"], mask, batch)
        if config.use_kl_loss:
            del metrics["kl_coef"]
            found["actor/kl_loss"] = metrics.pop("kl_loss")
        return result, {**metrics, **found}

    return loss


@register_policy_loss(GEO_MEAN)
def geo_mean(
    *, response_mask: torch.Tensor, config: ActorConfig, **given: object
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute verl's `compute_policy_loss_geo_mean` as a share of the mean over all sequences of the mini-batch, like
    its other losses; verl's own is the mean over a micro-batch. Arguments and results as of verl's.
    """
    result, metrics = compute_policy_loss_geo_mean(response_mask=response_mask, config=config, **given)
    batch = config.global_batch_info
    return result * len(response_mask) * batch["dp_size"] / batch["global_batch_size"], metrics


def _corrected(
    data: TensorDict, log_ratio: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrectionConfig
) -> _CorrectedBatch:
    """Weight tokens by the ratio of the trainer's probability to the sampler's, and reject those with extreme ratios.
    `log_ratio`: logs of that ratio, of shape (sequences, tokens). `mask`: of the same shape, 1 where there is a token.
    """
    of_tokens: dict[str, float] = {}
    of_sequences: dict[str, float] = {}
    largest: dict[str, float] = {}
    corrected = data.copy()
    if correction.rollout_is is not None:
        weights, found = compute_rollout_correction_weights(
            log_ratio, mask, correction.rollout_is, correction.rollout_is_threshold
        )
        corrected["rollout_is_weights"] = response_to_nested(weights, data["response_mask"])
        of_tokens |= {MISMATCH + name: found[name] for name in _WEIGHTS}
        largest[f"{MISMATCH}rollout_is_max"] = found["rollout_is_max"]
    if correction.rollout_rs is not None:
        kept, found = compute_rollout_rejection_mask(
            log_ratio, mask, correction.rollout_rs, correction.rollout_rs_threshold
        )
        corrected["response_mask"] = response_to_nested(kept, data["response_mask"])
        of_tokens[REJECTED] = found["rollout_rs_masked_fraction"]
        of_sequences[f"{MISMATCH}rollout_rs_seq_masked_fraction"] = found["rollout_rs_seq_masked_fraction"]
    return _CorrectedBatch(corrected, of_tokens, of_sequences, largest)


def _mismatch(
    sampled: torch.Tensor, trained: torch.Tensor, mask: torch.Tensor, batch: Mapping[str, int]
) -> dict[str, Metric]:
    """Measure the difference of two programs' log-probs of the same tokens.

    Args:
        sampled, trained: log-probs of shape (sequences, tokens) under the sampler and under the trainer.
        mask: of the same shape, 1 where there is a token.
        batch: verl's numbers of the mini-batch, for means over all of its tokens on all ranks.

    Returns:
        Estimators k1 (`kl`) and k3 (`k3_kl`) of the divergence of the trainer from the sampler, under verl's names, and
        mean and maximum of the absolute difference.
    """
    terms = {
        name: kl_penalty(sampled, trained, kind)
        for name, kind in (("kl", "k1"), ("k3_kl", "k3"), ("log_prob_abs_diff", "abs"))
    }
    # SUM: each micro-batch has its share of the mean
    found = {
        MISMATCH + name: Metric(AggregationType.SUM, agg_loss(term, mask, "token-mean", **batch))
        for name, term in terms.items()
    }
    most = (terms["log_prob_abs_diff"] * mask).max()
    return {**found, f"{MISMATCH}log_prob_abs_diff_max": Metric(AggregationType.MAX, most)}


def _from_reference(
    trained: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, batch: Mapping[str, int]
) -> dict[str, Metric]:
    """Return estimators k1 and k3 of the policy's divergence from the reference; arguments as of `_mismatch`."""
    return {
        name: Metric(AggregationType.SUM, agg_loss(kl_penalty(trained, reference, kind), mask, "token-mean", **batch))
        for name, kind in (("reference/kl", "k1"), ("reference/k3_kl", "k3"))
    }


# Ratios of the trainer's probabilities to the samplers', by the age of the tokens.


_FIRST = (0, 1, 2, 4, 8, 16)
"""The lowest staleness of each class."""
_TOKENS, _RATIO, _LARGEST = "tokens", "ratio_mean", "ratio_max"


def stale_ratios(
    log_ratio: torch.Tensor, staleness: torch.Tensor, mask: torch.Tensor, batch: Mapping[str, int]
) -> dict[str, Metric]:
    """Measure a micro-batch.

    Args:
        log_ratio: logs of the trainer's probability over the sampler's, of shape (sequences, tokens).
        staleness: steps between the version that made a token and the one that is trained; of the same shape.
        mask: of the same shape, 1 where there is a token.
        batch: verl's numbers of the mini-batch, for means over all of its tokens on all ranks.

    Returns:
        The same names on all ranks; 0 for ages without a token.
    """
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    found = {}
    for first, after in zip(_FIRST, (*_FIRST[1:], None), strict=True):
        there = mask.bool() & (staleness >= first)
        if after is not None:
            there &= staleness < after
        of_age = there.to(ratio.dtype)
        share, mean = (agg_loss(of_age * term, mask, "token-mean", **batch) for term in (torch.ones_like(ratio), ratio))
        found[_name(first, _TOKENS)] = Metric(AggregationType.SUM, share)
        found[_name(first, _RATIO)] = Metric(AggregationType.SUM, mean)
        found[_name(first, _LARGEST)] = Metric(AggregationType.MAX, (of_age * ratio).max())
    return found


def as_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step with the mean ratio of each age, and without ages that have no token."""
    found = dict(metrics)
    for first in _FIRST:
        names = [_name(first, what) for what in (_TOKENS, _RATIO, _LARGEST)]
        tokens = found.get(names[0])
        if tokens:
            found[names[1]] /= tokens
        elif tokens is not None:
            for name in names:
                del found[name]
    return found


def _name(first: int, what: str) -> str:
    return f"{MISMATCH}stale_{first}/{what}"
