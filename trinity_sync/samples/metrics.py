"""What is measured of a batch before it is trained on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.advantages import relative_rewards
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.filtering import Drawn


def batch_metrics(batch: SampleBatch | PairBatch) -> dict[str, float]:
    """Measure a batch.

    Returns:
        ``batch/samples``, ``batch/tokens`` (of responses) and, of samples: ``reward/mean``, ``std``, ``min``, ``max``
        over those that have a reward, where any has, ``reward/exact`` where the task says it of each that it could
        judge, ``reward/failed`` (how many it could not), ``reward/flat_groups`` (share of prompts all of whose samples
        have one reward, of which a group's advantages learn nothing), ``response_length/mean``, ``max`` and
        ``truncated`` (share that did not end by itself), ``prompt_length/mean`` and ``max`` (over prompts); lengths in
        tokens.
    """
    counts = {"batch/samples": float(len(batch)), "batch/tokens": float(batch.token_count)}
    if not isinstance(batch, SampleBatch) or not len(batch):
        return counts
    lengths, prompts = batch.response_lengths, batch.prompt_rows.lengths
    metrics = {
        **counts,
        **of_rewards(batch.rewards[~np.isnan(batch.rewards)]),
        "reward/failed": float(sum(map(bool, batch.errors))),
        "reward/flat_groups": _flat_groups(batch),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(1.0 - batch.finished.mean()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
    }
    exact = batch.exact[[not error for error in batch.errors]]
    if len(exact) and np.isfinite(exact).all():
        metrics["reward/exact"] = float(exact.mean())
    return metrics


def drawn_metrics(drawn: Drawn) -> dict[str, float]:
    """Measure all that was drawn for a step, where only some of it is trained on.

    Returns:
        What `batch_metrics` says of these samples but their number, to stand in place of what it says of the batch:
        the rewards of groups that were chosen for a difference are no measure of the policy. And how many groups were
        drawn (``filter_groups/drawn``), are without a difference (``flat``), in the batch all the same (``filled``),
        and are left out with one (``surplus``).
    """
    of_all = batch_metrics(drawn.samples)
    return {
        **{name: value for name, value in of_all.items() if not name.startswith("batch/")},
        "filter_groups/drawn": float(drawn.groups),
        "filter_groups/flat": float(drawn.flat),
        "filter_groups/filled": float(drawn.filled),
        "filter_groups/surplus": float(drawn.surplus),
    }


def of_rewards(rewards: NDArray[np.float64]) -> dict[str, float]:
    """Measure rewards, all of which are numbers; nothing where there is none."""
    if not len(rewards):
        return {}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }


def _flat_groups(batch: SampleBatch) -> float:
    """The share of prompts all of whose samples have the same reward."""
    relative, _, group = relative_rewards(batch)
    return float((np.bincount(group, relative != 0) == 0).mean())
