"""What is measured of a batch before it is trained on."""

from __future__ import annotations

import numpy as np

from trinity_sync.samples.batch import PairBatch, SampleBatch


def batch_metrics(batch: SampleBatch | PairBatch) -> dict[str, float]:
    """Measure a batch.

    Returns:
        ``batch/samples``, ``batch/tokens`` (of responses) and, of samples: ``reward/mean``, ``std``, ``min``, ``max``,
        ``reward/exact`` where the task says it of each, ``reward/flat_groups`` (share of prompts all of whose samples
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
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()),
        "reward/min": float(batch.rewards.min()),
        "reward/max": float(batch.rewards.max()),
        "reward/flat_groups": _flat_groups(batch),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(1.0 - batch.finished.mean()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
    }
    if np.isfinite(batch.exact).all():
        metrics["reward/exact"] = float(batch.exact.mean())
    return metrics


def _flat_groups(batch: SampleBatch) -> float:
    """The share of prompts all of whose samples have the same reward."""
    firsts, group = batch.groups()
    differs = batch.rewards != batch.rewards[firsts][group]
    return float((np.bincount(group, differs) == 0).mean())
