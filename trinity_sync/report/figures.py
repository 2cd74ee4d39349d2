"""The figures for the comparison of the jobs of a sweep: meaning, measurement, and better direction of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import stdev
from typing import Literal

from trinity_sync.report.run_data import TARGET_REWARD, Run, steps_to
from trinity_sync.tracking import json_lines, units
from trinity_sync.tracking.events import CommitEvent, E, LoadEvent, PublishEvent
from trinity_sync.tracking.summary import LOSS, REWARD, REWARD_STEPS, mean_steps, quantile, training_spans

Better = Literal["lower", "higher"]
Statistic = Literal["median", "mean", "single"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure with its spread: of a job, or of several jobs that differ by their seeds.

    Attributes:
        value: median or mean of the measurements; of several jobs the mean of their values.
        low, high: of a job the quartiles; of several jobs the lowest and highest value.
        least, most: the lowest and highest measurement; of several jobs as `low` and `high`.
        tail: of a job the 95th (or 5th) percentile, the bad end.
        count: the number of measurements of a job; of several jobs the number of jobs with a value.
        error: standard error of the value, over the jobs, or of a mean over its measurements; None: not known.
    """

    value: float
    low: float
    high: float
    least: float
    most: float
    tail: float | None
    count: int
    error: float | None = None


@dataclass(frozen=True)
class Column:
    """A measured quantity."""

    key: str  # its name in JSON
    title: str  # its name for people
    meaning: str  # a short description
    measure: Callable[[Run], Iterable[float | None]]  # returns the measurements of a job
    better: Better = "lower"  # the better direction
    statistic: Statistic = "median"  # the value of a job: median or mean of the measurements, or the only one
    text: Callable[[float], str] = units.seconds  # formats a value
    error: Callable[[Run], float | None] | None = None  # returns the standard error of a single measurement

    @property
    def tail(self) -> str:
        """The percentile at the bad end."""
        return "p95" if self.better == "lower" else "p5"


def figure(column: Column, measured: Iterable[float | None]) -> Figure | None:
    """Compute a figure of a job; None without measurements."""
    values = sorted(value for value in measured if value is not None)
    if not values:
        return None
    low, median, high = (_inside(values, share) for share in (0.25, 0.5, 0.75))
    value = sum(values) / len(values) if column.statistic == "mean" else median
    value = min(max(value, values[0]), values[-1])  # a sum of floats is rounded
    return Figure(
        value=value,
        low=min(low, value),
        high=max(high, value),
        least=values[0],
        most=values[-1],
        tail=_inside(values, 0.95 if column.better == "lower" else 0.05) if column.statistic == "median" else None,
        count=len(values),
        error=_error(values) if column.statistic == "mean" else None,
    )


def fold(figures: Sequence[Figure | None]) -> Figure | None:
    """Combine the figures of several jobs: the mean, with the lowest and highest. The figure of one job stays."""
    known = [one for one in figures if one is not None]
    if len(figures) == 1 or not known:
        return known[0] if known else None
    values = [one.value for one in known]
    least, most = min(values), max(values)
    value = min(max(sum(values) / len(values), least), most)
    within = math.hypot(*(one.error or 0.0 for one in known)) / len(known)  # few seeds may agree by chance
    spread = _error(values)
    error = None if spread is None else max(spread, within)
    return Figure(value=value, low=least, high=most, least=least, most=most, tail=None, count=len(known), error=error)


def _error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def figures(run: Run) -> dict[str, Figure | None]:
    """Compute all figures of a job, by the key of their column."""
    found = {column.key: figure(column, column.measure(run)) for column in COLUMNS}
    for column in COLUMNS:
        if column.error is not None and (one := found[column.key]) is not None:
            found[column.key] = replace(one, error=column.error(run))
    return found


def detail(column: Column, one: Figure, jobs: int) -> str:
    """Describe the spread of a figure of so many jobs: the bad end of a job's median, else the standard error."""
    if jobs == 1 and one.tail is not None:
        return f"{column.tail} {column.text(one.tail)}"
    words = f"± {column.text(one.error)}" if one.error else ""
    lacking = f"{one.count} of {jobs} jobs" if jobs > 1 and one.count < jobs else ""
    return ", ".join(filter(None, (words, lacking)))


def _inside(ordered: Sequence[float], share: float) -> float:
    value = quantile(ordered, share)
    assert value is not None, "of nothing there is no figure"
    return value


def _each(kind: type[E], measured: Callable[[E], float | None]) -> Callable[[Run], Iterable[float | None]]:
    return lambda run: [measured(event) for event in run.of(kind)]


def _training_s(run: Run) -> float | None:
    found = training_spans(run.record, run.metrics, run.events)
    return sum(end - begin for begin, end in found.values()) if found else None


def _lasts(run: Run, name: str = "reward/mean") -> Iterable[float | None]:
    values = [value for _, value in run.series(name) if value is not None]
    return values[-mean_steps(len(values)) :]


def _last_losses(run: Run) -> Iterable[float | None]:
    return [] if run.series("reward/mean") else _lasts(run, "loss")


def _last(run: Run, name: str) -> float | None:
    return max(((step, value) for step, value in run.series(name) if value is not None), default=(0, None))[1]


def _sampling_error(run: Run) -> float | None:
    """Return the standard error of the last validation's mean reward, over its samples."""
    std, samples = _last(run, "val/reward/std"), _last(run, "val/samples")
    return std / math.sqrt(samples) if std is not None and samples else None


def _samples_per_step(run: Run) -> float | None:
    prompts, each = run.setting("algorithm", "prompts_per_step"), run.setting("algorithm", "samples_per_prompt")
    if isinstance(prompts, int) and isinstance(each, int):
        return float(prompts * each)
    return units.finite(run.setting("algorithm", "batch_size"))


def _samples_per_s(run: Run) -> Iterable[float | None]:
    samples = _samples_per_step(run)
    return [] if samples is None else [samples / seconds for seconds in _timings(run, "timing/step") if seconds]


def _not_training(run: Run) -> Iterable[float | None]:
    pairs = zip(_timings(run, "timing/train"), _timings(run, "timing/step"), strict=True)
    return [max(0.0, 1 - train / step) for train, step in pairs if train is not None and step]


def _timings(run: Run, name: str) -> list[float | None]:
    return [units.finite(value) for value in json_lines.column(run.metrics, name)]


def _percent(value: float) -> str:
    return f"{value:.1%}" if value < 0.0995 else f"{value:.0%}"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


_metric = partial(Column, text=units.number, statistic="single")

COLUMNS = (
    _metric("reward", "Reward", f"of the last {REWARD_STEPS} steps", _lasts, better="higher", statistic="mean"),
    _metric(
        "loss", "Loss", f"of the last {REWARD_STEPS} steps of a run without rewards", _last_losses, statistic="mean"
    ),
    _metric(
        "validation",
        "Validation",
        "reward of the last validation",
        lambda run: [_last(run, REWARD)],
        better="higher",
        error=_sampling_error,
    ),
    _metric("validation_loss", "Validation loss", "of the last validation", lambda run: [_last(run, LOSS)]),
    _metric(
        "steps_to_target",
        f"Steps to {TARGET_REWARD}",
        f"the first step where the mean reward of {REWARD_STEPS} steps is {TARGET_REWARD}",
        lambda run: [steps_to(run)],
    ),
    Column("wall_s", "Training", "from the first step to the end", lambda run: [_training_s(run)], statistic="single"),
    Column(
        "samples_per_s", "Samples/s", "trained on, per second of a step", _samples_per_s, better="higher", text=_rate
    ),
    Column("not_training", "Not training", "share of a step that is not training", _not_training, text=_percent),
    Column(
        "blocked_s", "Blocked", "the trainer, per version published", _each(PublishEvent, lambda event: event.blocked_s)
    ),
    Column("publish_s", "Publish", "until a version is committed", _each(PublishEvent, lambda event: event.total_s)),
    Column("load_s", "Load", "until an explorer has checked a version", _each(LoadEvent, lambda event: event.total_s)),
    Column("pause_s", "Pause", "an explorer, per load", _each(LoadEvent, lambda event: event.paused_s)),
    Column(
        "save_blocked_s", "Save blocks", "trainer, per checkpoint", _each(CommitEvent, lambda event: event.blocked_s)
    ),
    Column("save_s", "Save", "until a checkpoint is committed", _each(CommitEvent, lambda event: event.total_s)),
    Column(
        "bytes_moved",
        "Moved",
        "bytes per version",
        _each(PublishEvent, lambda event: event.bytes_moved),
        statistic="mean",
        text=units.size,
    ),
)
RESULTS = COLUMNS[: [column.key for column in COLUMNS].index("not_training")]
"""What came of a job; the others are times and sizes."""

BY_KEY: Mapping[str, Column] = {column.key: column for column in COLUMNS}
