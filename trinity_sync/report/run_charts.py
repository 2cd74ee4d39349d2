"""The charts of a run's page, and its reward curves for the page of a sweep."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from trinity_sync.report import charts, timeline
from trinity_sync.report.charts import Series
from trinity_sync.report.run_data import Run, smooth
from trinity_sync.tracking import units
from trinity_sync.tracking.events import CommitEvent, LoadEvent, PublishEvent
from trinity_sync.tracking.json_lines import column
from trinity_sync.tracking.summary import ABS_DIFF, ABS_DIFF_MAX, EXACT, K3_KL, LOSS, REWARD, training_spans

_MOST_PARTS = 7
_WHOLE_STEP = ("timing/step", "timing/total")
_KL = ("reference/k3_kl", "reference/kl", "actor/kl_loss", "actor/reward_kl_penalty")
_LAYERS = set(map(str, range(1000)))  # as of `layer_of`; a damaged file may hold other numbers
_TRAINERS = 6
"""The colour of the trainer beside explorers."""


_TRAINING = {
    "Validation": ("Not trained on, by the version of the step", {REWARD: "reward", EXACT: "right"}),
    "Loss": ("Minimised; of a validation, that of its rows", {"loss": "training", LOSS: "validation"}),
    "KL": (
        "From the reference, nats a token",
        dict(zip(_KL, ("k3", "k1", "in the loss", "in the rewards"), strict=True)),
    ),
    "Response length": ("Tokens", {"response_length/mean": "mean", "response_length/max": "longest"}),
    "Truncated and flat": (
        "Share of responses without an end token, and of prompts whose rewards are all equal: they train nothing",
        {"response_length/truncated": "truncated responses", "reward/flat_groups": "flat groups"},
    ),
    "Gradient norm": ("Before clipping", {"grad_norm": "norm"}),
    "Clip fraction": (
        "Share of tokens that the policy loss clips",
        {"actor/pg_clipfrac": "all", "actor/pg_clipfrac_lower": "by clip_ratio_c"},
    ),
    "Entropy": ("Mean over tokens, nats", {"actor/entropy_loss": "entropy"}),
    "Learning rate": ("Of the step", {"lr": "rate"}),
    "Staleness": ("Steps completed before an update, minus the step whose weights sampled", {"staleness/mean": "mean"}),
    "Mismatch": (
        "Log-probs of the samples by explorers and by the trainer; powers of ten",
        {K3_KL: "divergence (k3)", ABS_DIFF: "log-prob, mean difference", ABS_DIFF_MAX: "log-prob, largest difference"},
    ),
}
"""The charts of the training section below the reward: hint, and metrics with their names."""


def training(run: Run) -> Iterator[tuple[str, str, Markup]]:
    """Return title, hint and chart of what was learned: the reward, if the run has any, and recorded metrics."""
    points = run.series("reward/mean")
    if points or not run.series("loss"):
        mean = Series(name="mean of the last 10 steps", points=smooth(points))
        curves = [Series(name="each step", points=points, style="faint", colour=6), mean]
        yield "Reward", "Mean of the samples", _by_step(run, "Mean reward", curves)
    for title, (hint, metrics) in _TRAINING.items():
        found = [
            (text, [point for point in run.series(name) if point[1] is not None]) for name, text in metrics.items()
        ]
        curves = [
            Series(name=text, points=sorted(points), colour=index)
            for index, (text, points) in enumerate(found)
            if points
        ]
        if curves:
            yield title, hint, _by_step(run, title, curves, log=title == "Mismatch")


def _by_step(run: Run, label: str, curves: Sequence[Series], *, log: bool = False) -> Markup:
    empty = "No step has recorded a reward."
    return charts.line_chart(
        curves, label=f"{label} by step", y_format=metric_text, log=log, marks=_resumes(run), empty=empty
    )


def timing(run: Run) -> Markup:
    """Draw the seconds of a step by part."""
    xs, parts = step_parts(run)
    return charts.bar_chart(
        xs, parts, label="Seconds of each part of a step", y_format=units.seconds, empty="No step has recorded timings."
    )


def step_parts(run: Run) -> tuple[list[float], dict[str, Sequence[float]]]:
    """Return the steps, and the seconds by part of a step: the largest parts, and the sum of the others."""
    lines = run.trained
    names = sorted({name for line in lines for name in line if name.startswith("timing/") and name not in _WHOLE_STEP})
    values: dict[str, Sequence[float]] = {
        name.removeprefix("timing/"): array("d", (max(0.0, units.finite(one) or 0.0) for one in column(lines, name)))
        for name in names
    }
    ranked = sorted(values, key=lambda name: -sum(values[name]))
    parts = {name: values[name] for name in ranked[:_MOST_PARTS]}
    rest = [values[name] for name in ranked[_MOST_PARTS:]]
    if rest:
        parts[f"{len(rest)} others"] = [sum(column) for column in zip(*rest, strict=True)]
    steps = map(units.finite, column(lines, "step"))
    return [float(index + 1) if step is None else step for index, step in enumerate(steps)], parts


def held(run: Run) -> Markup:
    """Draw the version of each explorer at the beginning of each step; of many explorers the oldest and the newest."""
    found = timeline.held_by_step(run.trained, run.events)
    steps = [step for step, _ in next(iter(found.values()), [])]
    curves = [
        Series(
            name=name, points=points, colour=index if index < _TRAINERS else index + 1, style="steps", dash=index % 4
        )
        for index, (name, points) in enumerate(found.items())
    ]
    if len(curves) >= charts.COLOURS:
        together = zip(steps, *([version for _, version in points] for points in found.values()), strict=True)
        known = [(step, [version for version in versions if version is not None]) for step, *versions in together]
        curves = [
            Series(
                name=f"the {word} of {len(found)} explorers",
                points=[(step, pick(versions) if versions else None) for step, versions in known],
                colour=colour,
                style="steps",
            )
            for colour, (word, pick) in enumerate({"newest": max, "oldest": min}.items())
        ]
    trainer = Series(name="the trainer", points=[(step, step - 1) for step in steps], style="faint", colour=_TRAINERS)
    return charts.line_chart(
        [trainer, *curves],
        label="Version held by each explorer by step",
        y_format=metric_text,
        marks=_resumes(run),
        empty="No explorer has loaded a version." if run.metrics else "No step has been done.",
    )


def latencies(run: Run) -> Markup:
    """Draw the times of each publish and load."""
    return charts.line_chart(
        [
            _dots("publish: trainer blocked", run.measured(PublishEvent, lambda event: event.blocked_s), 0),
            _dots("publish: until committed", run.measured(PublishEvent, lambda event: event.total_s), 2),
            _dots("load: explorer paused", run.measured(LoadEvent, lambda event: event.paused_s), 1),
            _dots("load: until checked", run.measured(LoadEvent, lambda event: event.total_s), 3),
        ],
        label="Seconds of each publish and load by version",
        x_label="version",
        y_format=units.seconds,
        log=True,
        marks=_resumes(run),
        empty="No version has been published.",
    )


def moved(run: Run) -> Markup:
    """Draw the bytes of each version, whole and as moved."""
    whole = run.measured(PublishEvent, lambda event: event.bytes_full)
    sent = run.measured(PublishEvent, lambda event: event.bytes_moved)
    return charts.line_chart(
        [Series(name="whole version", points=whole, colour=6, dash=1), Series(name="moved", points=sent, colour=0)],
        label="Bytes of each version",
        x_label="version",
        y_format=units.size,
        y_bounds=(0.0, None),
        empty="No version has been published.",
    )


def changed(run: Run) -> Markup | None:
    """Draw the share of the elements that each version changed; None without deltas."""
    points = run.measured(PublishEvent, lambda event: None if event.changed is None else 100 * event.changed)
    if all(value is None for _, value in points):
        return None
    return charts.line_chart(
        [Series(name="changed, percent", points=points, colour=0)],
        label="Share of the elements that each version changed",
        x_label="version",
        y_format=metric_text,
        y_bounds=(0.0, None),
    )


def changed_layers(run: Run) -> Markup | None:
    """Draw the share of each layer's elements that changed; None without deltas."""
    deltas = run.summary["deltas"]
    curves = []
    for colour, (versions, shares) in enumerate(deltas["by_layer"].items() if deltas else ()):
        points = sorted((float(layer), 100 * share) for layer, share in shares.items() if layer in _LAYERS)
        others = [f"{group} {100 * share:.2g}" for group, share in shares.items() if group not in _LAYERS]
        name = ", ".join([f"versions {versions}", *others])
        curves.append(Series(name=name, points=points, colour=colour, dash=colour))
    label, empty = "Share of each layer's elements that changed", "No tensor belongs to a layer."
    bounds = (0.0, None)
    chart = charts.line_chart(curves, label=label, x_label="layer", y_format=metric_text, y_bounds=bounds, empty=empty)
    return chart if curves else None


def break_even(run: Run) -> str | None:
    """Tell the rate of a link below which deltas pay; None where it was not measured."""
    found = run.summary["deltas"]
    if found is None or (rate := found["pays_below"]) is None or rate <= 0:
        return None
    encode, apply = (units.seconds(found[name]) for name in ("encode_s", "apply_s"))
    delta, full = units.size(found["bytes"]), units.size(run.summary["sync"]["bytes_full"])
    return (
        f"Deltas pay over a link of less than {units.size(rate)}/s: a delta has {delta} instead of {full}, and takes "
        f"{encode} to encode and {apply} to apply (medians of this run on this machine)."
    )


def saves(run: Run) -> Markup:
    """Draw the times of each checkpoint."""
    return charts.line_chart(
        [
            _dots("trainer blocked", run.measured(CommitEvent, lambda event: event.blocked_s), 0),
            _dots("until committed", run.measured(CommitEvent, lambda event: event.total_s), 2),
        ],
        label="Seconds of each checkpoint by step",
        y_format=units.seconds,
        log=True,
        marks=_resumes(run),
        empty="No checkpoint has been committed.",
    )


def _dots(name: str, points: Sequence[tuple[float, float | None]], colour: int) -> Series:
    return charts.thinned(Series(name=name, points=points, colour=colour, style="dots"), log=True)


def metric_text(value: float) -> str:
    """Format the tick or point of a metric."""
    return f"{value:.4g}"


def _resumes(run: Run) -> dict[float, str]:
    attempts = run.record.get("attempts") or []
    starts = (item.get("resumed_from") for item in attempts)
    return {float(step): "resumed" for step in starts if step is not None}


# Reward curves of one job, or mean and band of several seeds.


_GRID = 300
_REWARD = "reward/mean"

Curve = Sequence[tuple[float, float]]


class Point(NamedTuple):
    """A mean over jobs, with the lowest and highest value."""

    x: float
    mean: float
    low: float
    high: float


def by_step(runs: Sequence[Run], name: str = _REWARD) -> list[Point]:
    """Return a metric by step, each job's the mean of its last ten steps; a step counts the jobs that reached it."""
    return fold([[(x, y) for x, y in smooth(run.series(name)) if y is not None] for run in runs])


def by_wall(runs: Sequence[Run], name: str = _REWARD) -> list[Point]:
    """Return a metric by seconds since the first step, without the starts of later attempts.

    Curves of several jobs are interpolated at common times. A job that has ended keeps its last value, and the curve
    begins when each job has one: a mean of fewer jobs would jump.
    """
    curves = [curve for run in runs if (curve := _timed(run, name))]
    if len(curves) > 1:
        first, last = max(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)
        ends = {curve[-1][0] for curve in curves if curve[-1][0] >= first}
        xs = sorted({first + (last - first) * index / _GRID for index in range(_GRID)} | ends)
        curves = [[*read_off(curve, xs), *((x, curve[-1][1]) for x in xs if x > curve[-1][0])] for curve in curves]
    return fold(curves)


def fold(curves: Sequence[Curve]) -> list[Point]:
    """Return mean and band of several curves, at each x of those with a value there."""
    values: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            values.setdefault(x, []).append(y)
    return [
        Point(x, min(max(sum(ys) / len(ys), min(ys)), max(ys)), min(ys), max(ys)) for x, ys in sorted(values.items())
    ]


def read_off(curve: Curve, xs: Sequence[float]) -> list[tuple[float, float]]:
    """Interpolate a curve at these places; none before its first point or after its last."""
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


def _timed(run: Run, name: str) -> list[tuple[float, float]]:
    """Return the smoothed metric by elapsed seconds, ascending; steps without a time are left out."""
    found = training_spans(run.record, run.metrics, run.events)
    starts: dict[object, float] = {}
    before = 0.0
    for number, (begin, end) in found.items():
        starts[number] = begin - before
        before += end - begin
    timed: list[tuple[float, float]] = []
    values = smooth([(0.0, units.finite(value)) for value in column(run.metrics, name)])
    for line, (_, value) in zip(run.metrics, values, strict=True):
        at, attempt = units.finite(line.get("time")), line.get("attempt")
        if at is None or value is None or attempt not in starts:
            continue
        elapsed = at - starts[attempt]
        if not timed or elapsed > timed[-1][0]:
            timed.append((elapsed, value))
    return timed
