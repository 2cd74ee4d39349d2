"""One number per metric of a trainer step, of what verl's engines and losses give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trinity_sync.tracking.summary import SKIPPED
from trinity_sync.trainer.algorithms.base import MISMATCH
from trinity_sync.trainer.algorithms.stale_ratios import as_means


def step_metrics(metrics: Mapping[str, Any], *, recomputed: bool) -> dict[str, float]:
    """Make the metrics of a step.

    Args:
        metrics: of verl's `train_mini_batch`: a number or a `Metric`, or a list of them with one entry per optimizer
            step, of which the mean counts, or the largest where the name ends with ``_max``.
            Of ``grad_norm`` those count that are finite: an optimizer step without has changed nothing.
        recomputed: the log-probs of the samples were recomputed, so that each optimizer step has measured the mismatch
            of the weights before all of them. Otherwise only the first has.

    Returns:
        By name, and under `SKIPPED` the optimizer steps whose gradient was not finite.
    """
    if not recomputed:
        metrics = {name: values[:1] if name.startswith(MISMATCH) else values for name, values in metrics.items()}
    found = as_means(
        {name: _number(value, max if name.endswith("_max") else np.mean) for name, value in metrics.items()}
    )
    norms = np.atleast_1d(metrics["grad_norm"])
    taken = norms[np.isfinite(norms)]
    found["grad_norm"] = float(taken.mean()) if len(taken) else math.nan
    return {**found, SKIPPED: float(len(norms) - len(taken))}


def _number(value: Any, reduce: Callable[[list[float]], Any]) -> float:
    if isinstance(value, list | tuple):
        return float(reduce([_number(item, reduce) for item in value]))
    if hasattr(value, "aggregate"):
        return _number(value.aggregate(), reduce)
    return float(value)
