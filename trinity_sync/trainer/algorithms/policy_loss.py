"""verl's policy loss on samples that another program made: how far its log-probs are from the trainer's, as metrics,
and the importance weights that correct for it. Called by every trainer rank that has log-probs.

The mismatch is that of the weights before the step: of the samplers' log-probs (`rollout_log_probs`) and those that the
trainer recomputed before it (`old_log_probs`), where it did. Otherwise the log-probs at hand stand for them, which they
are in the first optimizer step only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from trinity_sync.config.training_schema import RolloutCorrectionConfig
from trinity_sync.trainer.algorithms.base import MISMATCH

_MEANS = ("rollout_is_mean", "rollout_is_eff_sample_size", "rollout_is_ratio_fraction_high")
_OF_UPDATE = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")


def policy_loss(config: ActorConfig, correction: RolloutCorrectionConfig) -> Callable[..., object]:
    """Make the loss, as verl's `TrainingWorker.set_loss_fn` takes it.

    It takes what verl's `ppo_loss` takes; its data have `rollout_log_probs` beside `old_log_probs`.

    Args:
        config: of verl's `ppo_loss`.
        correction: with a level (`rollout_is`), losses of tokens are multiplied by the truncated weights
            exp(`old_log_probs` - `rollout_log_probs`), through which no gradient goes.
    """

    def loss(
        model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        padded = data.select("response_mask", "old_log_probs", "rollout_log_probs").to_padded_tensor()
        mask, sampled = padded["response_mask"], padded["rollout_log_probs"]
        means: dict[str, float] = {}
        largest: dict[str, Metric] = {}
        if correction.rollout_is is None:
            before = no_padding_2_padding(model_output["log_probs"], data).detach()
        else:
            before = padded["old_log_probs"]
            weights, found = compute_rollout_correction_weights(
                before - sampled, mask, correction.rollout_is, correction.rollout_is_threshold
            )
            data = data.copy()
            data["rollout_is_weights"] = response_to_nested(weights, data["response_mask"])
            means = {MISMATCH + name: found[name] for name in _MEANS}
            largest = {f"{MISMATCH}rollout_is_max": Metric(AggregationType.MAX, found["rollout_is_max"])}
        result, metrics = ppo_loss(config, model_output, data, dp_group)
        # only now the configuration knows the tokens of the whole mini-batch
        batch = config.global_batch_info
        means |= {name: metrics[name].aggregate() for name in _OF_UPDATE}
        share = agg_loss(torch.ones_like(mask), mask, "token-mean", **batch).item()
        shares = {name: Metric(AggregationType.SUM, mean * share) for name, mean in means.items()}
        return result, {**metrics, **largest, **shares, **_mismatch(sampled, before, mask, batch)}

    return loss


def _mismatch(
    sampled: torch.Tensor, trained: torch.Tensor, mask: torch.Tensor, batch: Mapping[str, int]
) -> dict[str, Metric]:
    """How far two programs' log-probs of the same tokens are from each other.

    Args:
        sampled, trained: log-probs of shape (sequences, tokens) under the sampler and under the trainer.
        mask: of the same shape, 1 where there is a token.
        batch: verl's figures of the mini-batch, so that means are those over all of its tokens on all ranks.

    Returns:
        Estimators k1 (`kl`) and k3 (`k3_kl`) of the divergence of the trainer from the sampler, under verl's names, and
        mean and maximum of the absolute difference.
    """
    terms = {
        name: kl_penalty(sampled, trained, kind)
        for name, kind in (("kl", "k1"), ("k3_kl", "k3"), ("log_prob_abs_diff", "abs"))
    }
    # each micro-batch has its share of the mean, so shares are added up
    found = {
        MISMATCH + name: Metric(AggregationType.SUM, agg_loss(term, mask, "token-mean", **batch))
        for name, term in terms.items()
    }
    most = (terms["log_prob_abs_diff"] * mask).max()
    return {**found, f"{MISMATCH}log_prob_abs_diff_max": Metric(AggregationType.MAX, most)}
