"""When a validation takes place, and what is measured of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import of_rewards


@dataclass(frozen=True, kw_only=True)
class ValidationTimes:
    """When a validation takes place.

    Attributes:
        interval: steps between validations, 0 for the last step only.
        last: the run's last step, which is always validated.
        at_start: whether what a run begins with is validated.
    """

    interval: int
    last: int
    at_start: bool

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        return step == self.last or bool(self.interval and step % self.interval == 0)


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
