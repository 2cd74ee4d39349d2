"""What is measured of the samples of a validation, and whether its prompts are new ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import of_rewards
from trinity_sync.samples.record import Prompt


def validation_metrics(batch: SampleBatch) -> dict[str, float]:
    """Measure the samples of a validation.

    Args:
        batch: as many samples of each prompt, at least one.

    Returns:
        ``val/prompts``, ``val/samples`` (how many), ``val/failed`` (how many samples could not be judged);
        ``val/reward/mean``, ``std``, ``min``, ``max`` of those that have a reward, if there is one;
        ``val/response_length/mean`` and ``max`` (in tokens) and ``val/truncated`` (share that did not end by itself).
        Where the task says which samples are right: ``val/exact``, their share of those that were judged, and
        ``val/pass@k`` for k of 2, 4, 8 and so on below the samples of a prompt, and for these; of prompts all of whose
        samples were judged, if there is one.
    """
    lengths = batch.response_lengths
    _, group = batch.groups()
    counts = np.bincount(group)
    failed = np.array([bool(error) for error in batch.errors])
    metrics = {
        "val/prompts": float(len(counts)),
        "val/samples": float(len(batch)),
        "val/failed": float(failed.sum()),
        **{f"val/{name}": value for name, value in of_rewards(batch.rewards[~np.isnan(batch.rewards)]).items()},
        "val/response_length/mean": float(lengths.mean()),
        "val/response_length/max": float(lengths.max()),
        "val/truncated": float(1.0 - batch.finished.mean()),
    }
    exact = batch.exact[~failed]
    if len(exact) and np.isfinite(exact).all():
        metrics["val/exact"] = float(exact.mean())
        right = np.bincount(group, batch.exact == 1.0).astype(np.int64)
        judged = np.bincount(group, failed) == 0
        made = int(counts.min())
        metrics |= {f"val/pass@{k}": pass_at(k, right[judged], made) for k in _sizes(made) if judged.any()}
    return metrics


def pass_at(k: int, right: NDArray[np.int64], made: int) -> float:
    """Estimate without bias how often one of k samples of a prompt is right: 1 - C(made - right, k) / C(made, k), the
    mean over prompts (Chen et al.: "Evaluating Large Language Models Trained on Code", 2021).

    Args:
        k: at most `made`.
        right: of each prompt, how many of its samples are right.
        made: samples of each prompt.
    """
    return float(np.mean([1.0 - comb(made - count, k) / comb(made, k) for count in right.tolist()]))


def _sizes(made: int) -> list[int]:
    """The k of ``pass@k``; that of one sample is ``val/exact``."""
    powers = [1 << exponent for exponent in range(1, made.bit_length()) if 1 << exponent < made]
    return [*powers, made] if made > 1 else []


def shared_prompts(trained: Sequence[Prompt], validated: Sequence[Prompt]) -> int:
    """Count the prompts of a validation that say the same as one that is trained on."""
    known = {_said(prompt) for prompt in trained}
    return sum(_said(prompt) in known for prompt in validated)


def _said(prompt: Prompt) -> object:
    """All that a prompt says, as something to be looked up."""
    if prompt.messages is None:
        return prompt.text
    return tuple((message["role"], message["content"]) for message in prompt.messages)
