"""A run or a sweep as JSON, for programs: all that the page of a sweep says. The keys are those of docs/sweeps.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from trinity_sync.report import curves
from trinity_sync.report.agreement import agreement
from trinity_sync.report.curves import Point
from trinity_sync.report.data import Run, Sweep
from trinity_sync.report.figures import BY_KEY, COLUMNS, Figure
from trinity_sync.report.marks import RULE
from trinity_sync.report.rows import Row, compare
from trinity_sync.report.thinning import thin

_MOST_POINTS = 300


def to_json(found: Run | Sweep) -> Mapping[str, object]:
    """Return the content of a run's summary.json as it is now, or the comparison of a sweep."""
    if isinstance(found, Run):
        return found.summary
    comparison, agreed = compare(found), agreement(found.runs)
    return {
        "path": found.path,
        "common": found.common,
        "columns": {
            column.key: {
                "title": column.title,
                "meaning": column.meaning,
                "better": column.better,
                "statistic": column.statistic,
                "tail": column.tail if column.statistic == "median" else None,
            }
            for column in COLUMNS
        },
        "tie": RULE,
        "rows": [_row(row) for row in comparison.rows],
        "jobs": [_job(row) for row in comparison.jobs],
        "digests": {
            "agree": agreed.agree,
            "jobs": agreed.jobs,
            "sets": agreed.sets,
            "versions": agreed.versions,
            "differs": agreed.differs and agreed.differs._asdict(),
            "text": agreed.text,
        },
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "settings": row.settings,
        "jobs": row.jobs,
        "seeds": row.seeds,
        "completed": sum(run.status == "completed" for run in row.runs),
        "figures": {key: {**_figure(key, one), "mark": row.marks.get(key)} for key, one in row.figures.items()},
        "reward_by_step": _points(curves.by_step(row.runs)),
        "reward_by_wall_s": _points(curves.by_wall(row.runs)),
    }


def _job(row: Row) -> dict[str, object]:
    (run,) = row.runs
    return {
        "job": run.path.name,
        "path": run.path,
        "overrides": run.overrides,
        "seed": next(iter(row.seeds), None),
        "status": run.status,
        "error": run.record.get("error"),
        "steps": run.summary["steps"],
        "total_steps": run.total_steps,
        "faults": row.faults,
        "notes": run.notes,
        "figures": {key: _figure(key, one) for key, one in row.figures.items()},
    }


def _figure(key: str, one: Figure) -> dict[str, object]:
    values = asdict(one)
    tail = values.pop("tail")
    return values if tail is None else {**values, BY_KEY[key].tail: tail}


def _points(points: Sequence[Point]) -> list[Point]:
    """Thin a curve by its mean."""
    kept = {x for x, _ in thin([(point.x, point.mean) for point in points], _MOST_POINTS)}
    return [point for point in points if point.x in kept]
