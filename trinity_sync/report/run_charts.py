"""The charts of a run's page: reward, loss, staleness, mismatch, where the time goes, times and sizes of syncs and
saves.
"""

from __future__ import annotations

from markupsafe import Markup

from trinity_sync.report import activity, charts
from trinity_sync.report.charts import Series
from trinity_sync.report.data import Run, smooth
from trinity_sync.tracking import units
from trinity_sync.tracking.mismatch import ABS_DIFF, ABS_DIFF_MAX, K3_KL
from trinity_sync.tracking.validation import EXACT, LOSS, REWARD

_MOST_PARTS = 7
_WHOLE_STEP = ("timing/step", "timing/total")


def reward(run: Run) -> Markup:
    """Draw the reward of each step, and its mean over ten."""
    points = run.series("reward/mean")
    return charts.line_chart(
        [
            Series(name="each step", points=points, style="faint"),
            Series(name="mean of the last 10 steps", points=smooth(points)),
        ],
        label="Mean reward by step",
        y_format=metric_text,
        width=1120,
        height=270,
        marks=_resumes(run),
        empty="No step has recorded a reward.",
    )


def validation(run: Run) -> Markup:
    """Draw the reward of each validation, and the share that was right where the task says it; of a supervised run the
    loss.
    """
    series = [
        Series(name=text, points=points, colour=colour)
        for colour, (name, text) in enumerate({REWARD: "reward", EXACT: "right", LOSS: "loss"}.items())
        if (points := sorted((step, value) for step, value in run.series(name) if value is not None))
    ]
    return charts.line_chart(
        series,
        label=f"{'Loss' if run.series(LOSS) else 'Reward'} of each validation by step",
        y_format=metric_text,
        marks=_resumes(run),
        empty="No step has been validated.",
    )


def loss(run: Run) -> Markup:
    """Draw the loss of each step."""
    return charts.line_chart(
        [Series(name="loss", points=run.series("loss"), colour=3)],
        label="Loss by step",
        y_format=metric_text,
        marks=_resumes(run),
        empty="No step has recorded a loss.",
    )


def timing(run: Run) -> Markup:
    """Draw what the seconds of a step go to."""
    xs, parts = step_parts(run)
    return charts.bar_chart(
        xs, parts, label="Seconds of each part of a step", y_format=units.seconds, empty="No step has recorded timings."
    )


def step_parts(run: Run) -> tuple[list[float], dict[str, list[float]]]:
    """Return the steps, and the seconds by part of a step: the largest parts, the others as one, and no totals."""
    names = sorted(
        {name for line in run.metrics for name in line if name.startswith("timing/") and name not in _WHOLE_STEP}
    )
    values = {
        name.removeprefix("timing/"): [max(0.0, units.finite(line.get(name)) or 0.0) for line in run.metrics]
        for name in names
    }
    ranked = sorted(values, key=lambda name: -sum(values[name]))
    parts = {name: values[name] for name in ranked[:_MOST_PARTS]}
    rest = [values[name] for name in ranked[_MOST_PARTS:]]
    if rest:
        parts[f"{len(rest)} others"] = [sum(column) for column in zip(*rest, strict=True)]
    steps = [units.finite(line.get("step")) for line in run.metrics]
    return [float(index + 1) if step is None else step for index, step in enumerate(steps)], parts


def staleness(run: Run) -> Markup:
    """Draw the mean staleness of the samples of each step."""
    return charts.line_chart(
        [Series(name="staleness", points=run.series("staleness/mean"), colour=1)],
        label="Mean staleness of the samples by step",
        y_format=metric_text,
        y_bounds=(0.0, 1.0),
        empty="No step has recorded staleness.",
    )


def mismatch(run: Run) -> Markup:
    """Draw how far the log-probs of explorers and trainer are from each other."""
    return charts.line_chart(
        [
            Series(name=text, points=run.series(name), colour=colour, dash=dash)
            for name, text, colour, dash in (
                (ABS_DIFF_MAX, "log-prob, largest difference", 3, 1),
                (ABS_DIFF, "log-prob, mean difference", 1, 0),
                (K3_KL, "divergence (k3)", 0, 0),
            )
        ],
        label="Mismatch of explorers and trainer by step",
        y_format=metric_text,
        log=True,
        marks=_resumes(run),
        empty="No step has recorded a mismatch.",
    )


def held(run: Run) -> Markup:
    """Draw which version each explorer held when a step began; of many explorers the oldest and the newest."""
    found = activity.held_by_step(run.metrics, run.events)
    steps = [step for step, _ in next(iter(found.values()), [])]
    curves = [
        Series(name=name, points=points, colour=index % charts.COLOURS, style="steps", dash=index % 4)
        for index, (name, points) in enumerate(found.items())
    ]
    if len(curves) > charts.COLOURS:
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
    trainer = Series(name="the trainer", points=[(step, step - 1) for step in steps], style="faint", colour=6)
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
            Series(
                name="publish: trainer blocked", points=run.measured("publish", "blocked_s"), colour=0, style="dots"
            ),
            Series(name="publish: until committed", points=run.measured("publish", "total_s"), colour=2, style="dots"),
            Series(name="load: explorer paused", points=run.measured("load", "paused_s"), colour=1, style="dots"),
            Series(name="load: until checked", points=run.measured("load", "total_s"), colour=3, style="dots"),
        ],
        label="Seconds of each publish and load by version",
        x_label="version",
        y_format=units.seconds,
        log=True,
        marks=_resumes(run),
        empty="No version has been published.",
    )


def moved(run: Run) -> Markup:
    """Draw the bytes of each version, whole and as carried."""
    return charts.line_chart(
        [
            Series(name=text, points=run.measured("publish", name), colour=colour, dash=dash)
            for name, text, colour, dash in (("bytes_full", "whole version", 6, 1), ("bytes_moved", "moved", 0, 0))
        ],
        label="Bytes of each version",
        x_label="version",
        y_format=units.size,
        y_bounds=(0.0, None),
        empty="No version has been published.",
    )


def saves(run: Run) -> Markup:
    """Draw the times of each checkpoint."""
    return charts.line_chart(
        [
            Series(name="trainer blocked", points=run.measured("commit", "blocked_s"), colour=0, style="dots"),
            Series(name="until committed", points=run.measured("commit", "total_s"), colour=2, style="dots"),
        ],
        label="Seconds of each checkpoint by step",
        y_format=units.seconds,
        log=True,
        marks=_resumes(run),
        empty="No checkpoint has been committed.",
    )


def metric_text(value: float) -> str:
    """Format the tick or point of a metric."""
    return f"{value:.4g}"


def _resumes(run: Run) -> dict[float, str]:
    attempts = run.record.get("attempts") or []
    starts = (item.get("resumed_from") for item in attempts)
    return {float(step): "resumed" for step in starts if step is not None}
