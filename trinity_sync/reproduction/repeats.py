"""Where the end of one more run may lie, given those of a few: for runs that are not the same bit for bit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trinity_sync.reproduction.outcome import Outcome

LAST_STEPS = 10
"""Over which the end of a run is averaged."""
MOST = 11
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles 0.975 of Student's t for 1, 2, ... degrees of freedom."""
_JUDGED = ("reward/mean", "loss")
"""The first of these that a run has is what it is judged by."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Where 95 % of further runs end, as the spread of a few tells: prediction interval of normal values (Student)."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Work it out from 2 to `MOST` values."""
        number = len(values)
        half = _T[number - 2] * statistics.stdev(values) * math.sqrt(1 + 1 / number)
        middle = statistics.fmean(values)
        return cls(low=middle - half, high=middle + half)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def judged(outcome: Outcome) -> str | None:
    """The metric that a run is judged by; None: it has none of them."""
    names = {name for values in outcome.metrics.values() for name in values}
    return next((name for name in _JUDGED if name in names), None)


def end_of(outcome: Outcome, name: str) -> float | None:
    """The mean of a metric over the last steps; None where it was never finite there."""
    last = sorted(outcome.metrics)[-LAST_STEPS:]
    values = [value for step in last if (value := outcome.metrics[step].get(name)) is not None]
    return statistics.fmean(values) if values else None
