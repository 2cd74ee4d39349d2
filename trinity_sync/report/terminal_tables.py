"""A run or a sweep as plain text and as JSON, for `trinity-sync report` and for logs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest

from trinity_sync.report import run_charts
from trinity_sync.report.charts import RULE, Mark, thin
from trinity_sync.report.figures import BY_KEY, COLUMNS, Figure, detail
from trinity_sync.report.run_charts import Point
from trinity_sync.report.run_data import TARGET_REWARD, Run, Sweep, steps_to
from trinity_sync.report.run_page import facts
from trinity_sync.report.sweep_page import SweepRow, agreement, best, compare
from trinity_sync.tracking import units
from trinity_sync.tracking.run_end import closing_lines, lay_out, shorten

_FAULTS = "faults"
# The order in which a narrow terminal drops figures.
_LEAST_FIRST = (
    *("pause_s", "publish_s", "save_s", _FAULTS, "save_blocked_s", "not_training", "samples_per_s"),
    *("bytes_moved", "load_s", "blocked_s", "wall_s"),
)
_WITH_SPREADS = 5  # the first columns matter less than the spreads of the others
_SIGNS: Mapping[Mark | None, str] = {"best": "*", "tie": "="}


def render(found: Run | Sweep, width: int | None = None) -> str:
    """Render a run or sweep as plain text without colours or control characters; `width` in columns."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    runs = found.runs if isinstance(found, Sweep) else [found]
    lines = _sweep(found, width) if isinstance(found, Sweep) else _run(found, width)
    for run in runs:
        error = run.record.get("error") if isinstance(found, Sweep) else None  # a single run has it in its table
        notes = [*([f"{run.status}: {error}"] if error else []), *run.notes]
        lines += textwrap.wrap(f"{run.path.name}: {' '.join(notes)}", width) if notes else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _run(run: Run, width: int) -> list[str]:
    summary = run.summary
    steps = f"{summary['steps']} of {run.total_steps}" if run.total_steps is not None else str(summary["steps"])
    rows = [("run", run.name), ("status", f"{run.status}, {steps} steps"), *facts(run)]
    if run.record.get("error"):
        rows.append(("error", str(run.record["error"])))
    reached = steps_to(run)
    if reached is not None:
        rows.append((f"steps to {TARGET_REWARD}", str(reached)))
    rows += [(f"peak, {role}", units.size(peak)) for role, peak in summary["peak_memory"].items()]
    rows += closing_lines(summary, run.path)
    return [label + text for label, text in lay_out(rows, width)]


def _sweep(sweep: Sweep, width: int) -> list[str]:
    """Lay out a table, overrides one per line, in the given width."""
    comparison, agreed = compare(sweep), agreement(sweep.runs)
    rows = comparison.rows
    *_, narrowest = tables = list(_tables(rows))
    table = next((table for table in tables if len(table[0]) <= width), narrowest)
    below = [agreed.text] if agreed.agree is not None else []
    if any(row.marks for row in rows):
        below.append(f"* best of its column, = not distinguishable from it. {RULE}")
    if len(sweep.runs) > 1 and sweep.common:
        below.append(f"the same in all: {' '.join(sweep.common)}")
    found = best(comparison, shorten)
    return [
        *table,
        *(line for text in below for line in ("", *textwrap.wrap(text, width))),
        *(("", *textwrap.wrap(f"{found[0]}:", width), found[1]) if found is not None else ()),
    ]


def _tables(rows: Sequence[SweepRow]) -> Iterator[list[str]]:
    """Lay out the table ever narrower: without a few columns, then without spreads, then without more columns."""
    keys = [*(key for key in BY_KEY if any(key in row.figures for row in rows)), _FAULTS]
    for spreads, most in ((True, _WITH_SPREADS), (False, len(_LEAST_FIRST))):
        for gone in range(most + 1):
            yield _table(rows, [key for key in keys if key not in _LEAST_FIRST[:gone]], spreads=spreads)


def _table(rows: Sequence[SweepRow], keys: Sequence[str], *, spreads: bool) -> list[str]:
    titles = [BY_KEY[key].title if key in BY_KEY else "Faults" for key in keys]
    lines: list[Sequence[str]] = [["Job", "Overrides", "Status", "Steps", *titles]]
    for row in rows:
        settings = [*(row.settings or ("none",)), *([row.size] if row.size else [])]
        figures = [_figure(row, key) if spreads else _figure(row, key)[:1] for key in keys]
        lines += zip_longest([_jobs(row)], settings, [row.status], [row.steps], *figures, fillvalue="")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * wide for wide in widths])
    return ["  ".join(_aligned(line, widths)) for line in lines]


def _aligned(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for column, (text, wide) in enumerate(zip(line, widths, strict=True)):
        yield text.ljust(wide) if column < 3 else text.rjust(wide)


def _jobs(row: SweepRow) -> str:
    return ",".join(row.jobs) if len(row.jobs) <= 3 else f"{row.jobs[0]}..{row.jobs[-1]}"


def _figure(row: SweepRow, key: str) -> list[str]:
    """Return the lines of a figure: its value, and its spread if it has one."""
    if key == _FAULTS:
        return [str(row.faults)]
    if key not in row.figures:
        return ["-"]
    column, one = BY_KEY[key], row.figures[key]
    spread = detail(column, one, len(row.runs))
    return [f"{_SIGNS.get(row.marks.get(key), '')}{column.text(one.value)}", *([spread] if spread else [])]


# JSON: the content of the page of a sweep. docs/sweeps.md lists the keys.


_MOST_POINTS = 300


def to_json(found: Run | Sweep) -> Mapping[str, object]:
    """Return the current content of a run's summary.json, or the comparison of a sweep."""
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


def _row(row: SweepRow) -> Mapping[str, object]:
    return {
        "settings": row.settings,
        "jobs": row.jobs,
        "seeds": row.seeds,
        "completed": sum(run.status == "completed" for run in row.runs),
        "figures": {key: {**_figure_json(key, one), "mark": row.marks.get(key)} for key, one in row.figures.items()},
        "reward_by_step": _points(run_charts.by_step(row.runs)),
        "reward_by_wall_s": _points(run_charts.by_wall(row.runs)),
    }


def _job(row: SweepRow) -> Mapping[str, object]:
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
        "figures": {key: _figure_json(key, one) for key, one in row.figures.items()},
    }


def _figure_json(key: str, one: Figure) -> Mapping[str, object]:
    values = asdict(one)
    tail = values.pop("tail")
    return values if tail is None else {**values, BY_KEY[key].tail: tail}


def _points(points: Sequence[Point]) -> list[Point]:
    kept = {x for x, _ in thin([(point.x, point.mean) for point in points], _MOST_POINTS)}
    return [point for point in points if point.x in kept]
