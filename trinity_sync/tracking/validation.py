"""What the validations of a run came to: figures of summary.json; and which there were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from trinity_sync.tracking import jsonl, units
from trinity_sync.tracking.jsonl import Record

REWARD, EXACT, LOSS = "val/reward/mean", "val/exact", "val/loss"


class ValidationFigures(TypedDict):
    """What was measured by the first and the last validation, and the best one with its step, of several the newest.
    `metric` is its name: the mean reward, where more is better, or the loss of a supervised run, where less is.
    """

    metric: str
    first: float
    last: float
    best: float
    best_step: int


def validation_figures(metrics: Sequence[Record]) -> ValidationFigures | None:
    """Work out ``validation`` in summary.json; None where nothing was validated.

    Args:
        metrics: lines of metrics.jsonl. In a free run that of a validation comes later than its step.
    """
    for name, sign in ((REWARD, 1.0), (LOSS, -1.0)):
        found = {
            step: value
            for line in metrics
            if (step := jsonl.metrics_step(line)) is not None and (value := units.finite(line.get(name))) is not None
        }
        if found:
            values = [found[step] for step in sorted(found)]
            best, step = max((sign * value, step) for step, value in found.items())
            return {"metric": name, "first": values[0], "last": values[-1], "best": sign * best, "best_step": step}
    return None


def was_validated(metrics: Path, step: int) -> bool:
    """Tell whether metrics.jsonl has a validation of the version of a step.

    Raises:
        RunError: it is damaged.
    """
    lines = (line for line in jsonl.read(metrics) if jsonl.metrics_step(line) == step)
    return any(name.startswith("val/") for line in lines for name in line)


def is_late(line: Record) -> bool:
    """Whether a line of metrics.jsonl is of a validation alone: of the version that a run begins with, or, in a free
    run, of one whose step has its line already.
    """
    return "timing/step" not in line and any(name.startswith("val/") for name in line)


def put_to_steps(metrics: Sequence[Record]) -> list[Record]:
    """Put what validations have measured into the lines of their steps, where these have one.

    Args:
        metrics: lines of metrics.jsonl, oldest first.
    """
    found: list[Record] = []
    places: dict[int | None, int] = {}
    for line in metrics:
        step = jsonl.metrics_step(line)
        if is_late(line) and step in places:
            found[places[step]] = {**line, **found[places[step]]}
        else:
            places[step] = len(found)
            found.append(line)
    return found
