"""What the validations of a run came to: figures of summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from trinity_sync.tracking import jsonl, units
from trinity_sync.tracking.jsonl import Record

REWARD, EXACT = "val/reward/mean", "val/exact"


class ValidationFigures(TypedDict):
    """The mean reward of the first and the last validation, and the best one with its step, of several the newest."""

    reward_first: float
    reward_last: float
    reward_best: float
    best_step: int


def validation_figures(metrics: Sequence[Record]) -> ValidationFigures | None:
    """Work out ``validation`` in summary.json; None where nothing was validated.

    Args:
        metrics: lines of metrics.jsonl, oldest first.
    """
    found = [
        (value, step)
        for line in metrics
        if (step := jsonl.metrics_step(line)) is not None and (value := units.finite(line.get(REWARD))) is not None
    ]
    if not found:
        return None
    best, step = max(found)
    return {"reward_first": found[0][0], "reward_last": found[-1][0], "reward_best": best, "best_step": step}
