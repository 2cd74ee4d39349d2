"""The figures for the comparison of the jobs of a sweep: meaning, measurement, and better direction of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trinity_sync.report.run_data import TARGET_REWARD, E, Run, steps_to
from trinity_sync.tracking import units
from trinity_sync.tracking.events import CommitEvent, LoadEvent, PublishEvent
from trinity_sync.tracking.summary import REWARD_STEPS, mean_steps, quantile, training_spans

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
    """

    value: float
    low: float
    high: float
    least: float
    most: float
    tail: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Column:
    """A measured quantity."""

    key: str  # its name in JSON
    title: str  # its name for people
    meaning: str  # a short description
    better: Better  # the better direction
    statistic: Statistic  # the value of a job: median or mean of the measurements, or the only one
    text: Callable[[float], str]  # formats a value
    measure: Callable[[Run], Iterable[float | None]]  # returns the measurements of a job

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
    )


def fold(figures: Sequence[Figure | None]) -> Figure | None:
    """Combine the figures of several jobs: the mean, with the lowest and highest. The figure of one job stays."""
    known = [one for one in figures if one is not None]
    if len(figures) == 1 or not known:
        return known[0] if known else None
    values = [one.value for one in known]
    least, most = min(values), max(values)
    value = min(max(sum(values) / len(values), least), most)
    return Figure(value=value, low=least, high=most, least=least, most=most, tail=None, count=len(known))


def figures(run: Run) -> dict[str, Figure | None]:
    """Compute all figures of a job, by the key of their column."""
    return {column.key: figure(column, column.measure(run)) for column in COLUMNS}


def detail(column: Column, one: Figure, jobs: int) -> str:
    """Describe the spread of a figure of so many jobs; empty if it reads the same from end to end."""
    if jobs == 1 and one.tail is not None:
        return f"{column.tail} {column.text(one.tail)}"
    least, most = column.text(one.least), column.text(one.most)
    words = f"{least} to {most}" if least != most else ""
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


def _last_rewards(run: Run) -> Iterable[float | None]:
    values = [value for _, value in run.series("reward/mean") if value is not None]
    return values[-mean_steps(len(values)) :]


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
    return [units.finite(line.get(name)) for line in run.metrics]


def _percent(value: float) -> str:
    return f"{value:.1%}" if value < 0.0995 else f"{value:.0%}"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _column(
    key: str,
    title: str,
    meaning: str,
    measure: Callable[[Run], Iterable[float | None]],
    *,
    better: Better = "lower",
    statistic: Statistic = "median",
    text: Callable[[float], str] = units.seconds,
) -> Column:
    return Column(key=key, title=title, meaning=meaning, better=better, statistic=statistic, text=text, measure=measure)


COLUMNS = (
    _column(
        "reward",
        "Reward",
        f"of the last {REWARD_STEPS} steps",
        _last_rewards,
        better="higher",
        statistic="mean",
        text=units.number,
    ),
    _column(
        "steps_to_target",
        f"Steps to {TARGET_REWARD}",
        f"the first step where the mean reward of {REWARD_STEPS} steps is {TARGET_REWARD}",
        lambda run: [steps_to(run)],
        statistic="single",
        text=units.number,
    ),
    _column("wall_s", "Wall", "from the first step to the end", lambda run: [_training_s(run)], statistic="single"),
    _column(
        "samples_per_s",
        "Samples/s",
        "samples trained on, per second of a step",
        _samples_per_s,
        better="higher",
        text=_rate,
    ),
    _column("not_training", "Not training", "share of a step that is not training", _not_training, text=_percent),
    _column(
        "blocked_s", "Blocked", "the trainer, per version published", _each(PublishEvent, lambda event: event.blocked_s)
    ),
    _column("publish_s", "Publish", "until a version is committed", _each(PublishEvent, lambda event: event.total_s)),
    _column(
        "load_s",
        "Load",
        "until an explorer has loaded and checked a version",
        _each(LoadEvent, lambda event: event.total_s),
    ),
    _column("pause_s", "Pause", "an explorer, per load", _each(LoadEvent, lambda event: event.paused_s)),
    _column(
        "save_blocked_s",
        "Save blocks",
        "the trainer, per checkpoint",
        _each(CommitEvent, lambda event: event.blocked_s),
    ),
    _column("save_s", "Save", "until a checkpoint is committed", _each(CommitEvent, lambda event: event.total_s)),
    _column(
        "bytes_moved",
        "Moved",
        "bytes per version",
        _each(PublishEvent, lambda event: event.bytes_moved),
        statistic="mean",
        text=units.size,
    ),
)
BY_KEY: Mapping[str, Column] = {column.key: column for column in COLUMNS}
