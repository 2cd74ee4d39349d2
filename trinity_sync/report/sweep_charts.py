"""The charts of a sweep's page: reward by step and by wall time, one curve per row, a band where it is of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from trinity_sync.report import charts, curves
from trinity_sync.report.charts import COLOURS, Series
from trinity_sync.report.curves import Point
from trinity_sync.report.data import Run
from trinity_sync.report.rows import Row
from trinity_sync.report.run_charts import metric_text

_UNITS = ((3 * 3600.0, 3600.0, "hours"), (5 * 60.0, 60.0, "minutes"))


def reward_by_step(rows: Sequence[Row]) -> Markup:
    """Draw the reward of all rows by step."""
    return _chart(rows, curves.by_step, "Mean reward by step", "step")


def reward_by_wall(rows: Sequence[Row]) -> Markup:
    """Draw the reward of all rows by wall time, in the unit that suits the longest of them."""
    longest = max((run.summary["wall_s"] or 0.0 for row in rows for run in row.runs), default=0.0)
    unit, word = next(((unit, word) for least, unit, word in _UNITS if longest >= least), (1.0, "seconds"))

    def points(runs: Sequence[Run]) -> list[Point]:
        return [point._replace(x=round(point.x / unit, 4)) for point in curves.by_wall(runs)]

    return _chart(rows, points, "Mean reward by wall time", word)


def _chart(rows: Sequence[Row], curve: Callable[[Sequence[Run]], list[Point]], label: str, x_label: str) -> Markup:
    return charts.line_chart(
        [_series(row, index, curve(row.runs), many=len(rows) > COLOURS) for index, row in enumerate(rows)],
        label=label,
        x_label=x_label,
        y_format=metric_text,
        width=1120,
        height=320,
        empty="No job has recorded a reward.",
    )


def _series(row: Row, index: int, points: Sequence[Point], *, many: bool) -> Series:
    several = len(row.runs) > 1
    return Series(
        name=row.label,
        points=[(point.x, point.mean) for point in points],
        low=[(point.x, point.low) for point in points] if several else (),
        high=[(point.x, point.high) for point in points] if several else (),
        colour=index % COLOURS,
        dash=index // COLOURS if many else index % 4,
    )
