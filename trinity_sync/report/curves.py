"""The reward of a row, by step and by wall time: one curve, or the mean and the band of those of several seeds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from trinity_sync.report.data import Run, smooth
from trinity_sync.tracking import units
from trinity_sync.tracking.summary import training_spans

_GRID = 300
_REWARD = "reward/mean"

Curve = Sequence[tuple[float, float]]


class Point(NamedTuple):
    """A mean over jobs, with the lowest and highest of them."""

    x: float
    mean: float
    low: float
    high: float


def by_step(runs: Sequence[Run]) -> list[Point]:
    """Return the reward by step, each job's the mean of its last ten; at a step those count that have done it."""
    return fold([[(x, y) for x, y in smooth(run.series(_REWARD)) if y is not None] for run in runs])


def by_wall(runs: Sequence[Run]) -> list[Point]:
    """Return the same by the seconds since its first step began, without the starts of later attempts.

    Several jobs are read off at the same seconds, between whose steps they are interpolated.
    """
    curves = [_timed(run) for run in runs]
    if len(curves) > 1:
        xs = _grid(curves)
        curves = [read_off(curve, xs) for curve in curves]
    return fold(curves)


def fold(curves: Sequence[Curve]) -> list[Point]:
    """Make mean and band of several curves, at each x of those that have a value there."""
    values: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            values.setdefault(x, []).append(y)
    return [
        Point(x, min(max(sum(ys) / len(ys), min(ys)), max(ys)), min(ys), max(ys)) for x, ys in sorted(values.items())
    ]


def read_off(curve: Curve, xs: Sequence[float]) -> list[tuple[float, float]]:
    """Return the values of a curve at these places, interpolated; none before its first point or after its last."""
    places = [x for x, _ in curve]
    found = []
    for x in xs:
        after = bisect_left(places, x)
        if after == len(places) or (after == 0 and places[0] > x):
            continue
        (x1, y1), (x0, y0) = curve[after], curve[max(after - 1, 0)]
        share = (x - x0) / (x1 - x0) if x1 > x0 else 1.0
        found.append((x, y0 + (y1 - y0) * share))
    return found


def _grid(curves: Sequence[Curve]) -> list[float]:
    ends = [(curve[0][0], curve[-1][0]) for curve in curves if curve]
    if not ends:
        return []
    first, last = min(begin for begin, _ in ends), max(end for _, end in ends)
    return sorted({first + (last - first) * index / _GRID for index in range(_GRID)} | {end for _, end in ends})


def _timed(run: Run) -> list[tuple[float, float]]:
    """The smoothed reward by elapsed seconds, rising; steps whose time is not known are left out."""
    found = training_spans(run.record, run.metrics, run.events)
    starts: dict[object, float] = {}
    before = 0.0
    for number, (begin, end) in found.items():
        starts[number] = begin - before
        before += end - begin
    timed: list[tuple[float, float]] = []
    for line, (_, reward) in zip(run.metrics, smooth(_rewards(run)), strict=True):
        at, attempt = units.finite(line.get("time")), line.get("attempt")
        if at is None or reward is None or attempt not in starts:
            continue
        elapsed = at - starts[attempt]
        if not timed or elapsed > timed[-1][0]:
            timed.append((elapsed, reward))
    return timed


def _rewards(run: Run) -> list[tuple[float, float | None]]:
    return [(0.0, units.finite(line.get(_REWARD))) for line in run.metrics]
