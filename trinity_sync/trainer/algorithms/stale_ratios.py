"""How far the trainer's probabilities are from the samplers', told apart by how old the tokens are.

Ages are brought together: 0, 1, 2 to 3, 4 to 7, 8 to 15, and 16 or more steps, so that a run has few metrics whatever
it allows. A micro-batch gives shares of sums, which `as_means` divides when all are together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils.metric import AggregationType, Metric

from trinity_sync.trainer.algorithms.base import MISMATCH

_FIRST = (0, 1, 2, 4, 8, 16)
"""The youngest age of each class."""
_TOKENS, _RATIO, _LARGEST = "tokens", "ratio_mean", "ratio_max"


def stale_ratios(
    log_ratio: torch.Tensor, staleness: torch.Tensor, mask: torch.Tensor, batch: Mapping[str, int]
) -> dict[str, Metric]:
    """Measure a micro-batch.

    Args:
        log_ratio: logs of the trainer's probability over the sampler's, of shape (sequences, tokens).
        staleness: steps between the version that made a token and the one that is trained; of the same shape.
        mask: of the same shape, 1 where there is a token.
        batch: verl's figures of the mini-batch, so that means are those over all of its tokens on all ranks.

    Returns:
        The same names whatever there is, for all ranks have to have the same; those of an age that no token has are 0.
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
    """Return the metrics of a step with the mean ratio of each age, and without the ages that no token has."""
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
