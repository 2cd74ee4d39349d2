"""The page of a sweep: the runs side by side, and their reward curves on one chart."""

from __future__ import annotations

from markupsafe import Markup

from trinity_sync.report import charts, templating
from trinity_sync.report.charts import COLOURS, Series
from trinity_sync.report.data import TARGET_REWARD, Run, Sweep, smooth, steps_to
from trinity_sync.report.run_charts import metric_text
from trinity_sync.tracking import units

HEAD = (
    "Job",
    "Overrides",
    "Status",
    "Steps",
    "Reward",
    f"Steps to {TARGET_REWARD}",
    "Wall",
    "Blocked",
    "p95",
    "Load",
    "p95",
    "Moved",
    "Faults",
)


def render(sweep: Sweep, now: float) -> str:
    """Render the page as HTML.

    Args:
        sweep: what was read.
        now: Unix seconds, for the note on when it was made.
    """
    return templating.render(
        "sweep.html",
        title=f"Sweep {sweep.path.parent.name}/{sweep.path.name}",
        sweep=sweep,
        path=sweep.path,
        now=now,
        common=(" ".join(sweep.common) if len(sweep.runs) > 1 else "") or "the defaults",
        tiles=_tiles(sweep),
        rewards=_rewards(sweep),
        head=HEAD,
        cells=cells,
        notes=[
            (run.path.name, text)
            for run in sweep.runs
            for text in [*([str(run.record["error"])] if run.record.get("error") else []), *run.notes]
        ],
    )


def cells(sweep: Sweep, run: Run) -> list[str]:
    """Return one row of the comparison, in the order of `HEAD`."""
    summary, sync = run.summary, run.summary["sync"]
    reached = steps_to(run)
    blocked, load = sync["publish"]["blocked_s"], sync["load"]["total_s"]
    return [
        run.path.name,
        " ".join(sweep.distinct(run)) or "none",
        run.status,
        f"{summary['steps']}/{run.total_steps}" if run.total_steps is not None else str(summary["steps"]),
        units.number(summary["reward_last"]),
        "-" if reached is None else str(reached),
        units.seconds(summary["wall_s"]),
        units.seconds(blocked["median"]),
        units.seconds(blocked["p95"]),
        units.seconds(load["median"]),
        units.seconds(load["p95"]),
        units.size(sync["bytes_moved"]),
        str(summary["faults"]),
    ]


def _tiles(sweep: Sweep) -> list[tuple[str, str, str | None]]:
    done = sum(run.status == "completed" for run in sweep.runs)
    scored = [(reward, run) for run in sweep.runs if (reward := run.summary["reward_last"]) is not None]
    best = max(scored, key=lambda item: item[0], default=None)
    reached = [(steps, run) for run in sweep.runs if (steps := steps_to(run)) is not None]
    quickest = min(reached, key=lambda item: item[0], default=None)
    walls = [run.summary["wall_s"] for run in sweep.runs if run.summary["wall_s"] is not None]
    return [
        ("Runs", str(len(sweep.runs)), f"{done} completed"),
        ("Best last reward", units.number(best[0]), _named(sweep, best[1])) if best else ("Best", "none", None),
        (f"Fewest steps to {TARGET_REWARD}", str(quickest[0]), _named(sweep, quickest[1]))
        if quickest
        else (f"Steps to {TARGET_REWARD}", "never", "by the mean of ten steps"),
        ("Wall, all runs", units.seconds(sum(walls) if walls else None, "none"), None),
    ]


def _rewards(sweep: Sweep) -> Markup:
    series = [
        Series(
            name=_named(sweep, run),
            points=smooth(run.series("reward/mean")),
            colour=index % COLOURS,
            dash=index // COLOURS if len(sweep.runs) > COLOURS else index % 4,
        )
        for index, run in enumerate(sweep.runs)
    ]
    return charts.line_chart(
        series,
        label="Mean reward by step of all runs",
        y_format=metric_text,
        width=1120,
        height=320,
        empty="No run has recorded a reward.",
    )


def _named(sweep: Sweep, run: Run) -> str:
    distinct = " ".join(sweep.distinct(run))
    return f"{run.path.name}: {distinct}" if distinct else f"job {run.path.name}"
