"""The page of a sweep: a comparison of its jobs, and their rewards on two charts."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from trinity_sync.report import charts, run_charts
from trinity_sync.report.charts import COLOURS, RULE, Mark, Series, marks
from trinity_sync.report.figures import BY_KEY, COLUMNS, RESULTS, Column, Figure, detail, figures, fold
from trinity_sync.report.run_charts import Point, metric_text
from trinity_sync.report.run_data import TARGET_REWARD, Run, Sweep
from trinity_sync.report.run_page import facts
from trinity_sync.tracking import units


def render(sweep: Sweep, now: float) -> str:
    """Render the page as HTML; `now` in Unix seconds, for the time of its making."""
    comparison, agreed = compare(sweep), agreement(sweep.runs)
    return charts.render(
        "sweep.html",
        title=f"Sweep {sweep.path.parent.name}/{sweep.path.name}",
        path=sweep.path,
        now=now,
        common=(" ".join(sweep.common) if len(sweep.runs) > 1 else "") or "the defaults",
        agreed=agreed,
        facts=[item for item in facts(sweep.runs[0]) if all(item in facts(run) for run in sweep.runs[1:])],
        tiles=_tiles(sweep, comparison, agreed),
        best=best(comparison, lambda path: str(path)),
        main=main_figure(comparison.rows),
        by_step=chart_by_step,
        by_wall=chart_by_wall,
        comparison=comparison,
        results=_recorded(comparison, RESULTS),
        times=_recorded(comparison, COLUMNS[len(RESULTS) :]),
        detail=detail,
        rule=RULE,
        pages={run.path.name for run in sweep.runs if (run.path / "report.html").exists()},
        notes=[
            (run.path.name, text)
            for run in sweep.runs
            for text in [*([str(run.record["error"])] if run.record.get("error") else []), *run.notes]
        ],
    )


def _recorded(comparison: SweepComparison, columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if any(column.key in row.figures for row in comparison.rows)]


def best(comparison: SweepComparison, name: Callable[[Path], str]) -> tuple[str, str] | None:
    """Return the text and the command to reproduce the leading completed row; None: nothing was compared."""
    row = comparison.rows[0]
    if len(comparison.rows) < 2 or not _completed(row) or _lead(row) == -math.inf:
        return None
    sure = "best" in (row.marks.get("reward"), row.marks.get("loss"))
    words = "Reproduce the best" if sure else "No job is distinguishable as the best; reproduce the one in the lead"
    return f"{words}, {row.label}", f"trinity-sync reproduce {shlex.quote(name(row.runs[0].path))}"


def _tiles(sweep: Sweep, comparison: SweepComparison, agreed: Agreement) -> list[tuple[str, str, str | None]]:
    done = sum(run.status == "completed" for run in sweep.runs)
    walls = [run.summary["wall_s"] for run in sweep.runs if run.summary["wall_s"] is not None]
    name = main_figure(comparison.rows)
    return [
        ("Runs", str(len(sweep.runs)), f"{done} completed"),
        *_leading(comparison, name, f"Best last {name}"),
        *_leading(comparison, "steps_to_target", f"Fewest steps to {TARGET_REWARD}"),
        *([("Digests", "agree" if agreed.agree else "differ", agreed.compared)] if agreed.agree is not None else []),
        ("Wall, all runs", units.seconds(sum(walls) if walls else None, "none"), None),
    ]


def _leading(comparison: SweepComparison, key: str, label: str) -> list[tuple[str, str, str | None]]:
    """Return the best value of a column and its row, if it is the best for sure; empty if no row has a value."""
    column = BY_KEY[key]
    having = [row for row in comparison.rows if key in row.figures]
    if not having:
        return []
    best = (min if column.better == "lower" else max)(having, key=lambda row: row.figures[key].value)
    sure = best.marks.get(key) == "best" or len(comparison.rows) == 1
    return [(label, column.text(best.figures[key].value), best.label if sure else "not distinguishable")]


# Rows: jobs that differ by their seed only share a row.


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One row."""

    settings: tuple[str, ...]  # the overrides that distinguish it
    runs: tuple[Run, ...]  # its jobs; several differ by seed only
    figures: Mapping[str, Figure]  # by the key of their column, where measured
    marks: Mapping[str, Mark]  # by the key of their column, where marked

    @property
    def jobs(self) -> list[str]:
        return [run.path.name for run in self.runs]

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for run in self.runs if (seed := _seed(run)) is not None})

    @property
    def label(self) -> str:
        """Its name in a legend."""
        if len(self.runs) == 1:
            return f"{self.jobs[0]}: {' '.join(self.settings)}" if self.settings else f"job {self.jobs[0]}"
        return f"{' '.join(self.settings) or 'all jobs'} ({self.size})"

    @property
    def size(self) -> str:
        """The number of its jobs and seeds; empty for one job."""
        jobs, seeds = len(self.runs), len(self.seeds)
        if jobs == 1:
            return ""
        return units.plural(seeds, "seed") if seeds == jobs else f"{jobs} jobs, {units.plural(seeds, 'seed')}"

    @property
    def status(self) -> str:
        """The status of its jobs, counted where they differ."""
        found = Counter(run.status for run in self.runs)
        return next(iter(found)) if len(found) == 1 else ", ".join(f"{n} {word}" for word, n in found.items())

    @property
    def steps(self) -> str:
        """Completed steps of planned ones, from the fewest to the most."""
        done = sorted({run.summary["steps"] for run in self.runs})
        planned = {run.total_steps for run in self.runs} - {None}
        text = str(done[0]) if len(done) == 1 else f"{done[0]} to {done[-1]}"
        return f"{text}/{planned.pop()}" if len(planned) == 1 else text

    @property
    def faults(self) -> int:
        """The number of faults of its jobs."""
        return sum(run.summary["faults"] for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class SweepComparison:
    """A compared sweep: `rows` fold jobs that differ by seed only, `jobs` are single and without marks."""

    rows: list[SweepRow]
    jobs: list[SweepRow]

    @property
    def folded(self) -> bool:
        """Whether a row has several jobs."""
        return len(self.rows) < len(self.jobs)


def compare(sweep: Sweep) -> SweepComparison:
    """Compute the figures of all jobs of a sweep, and group them."""
    jobs = []
    groups: dict[tuple[str, ...], list[SweepRow]] = {}
    for run in sweep.runs:
        found = {key: one for key, one in figures(run).items() if one is not None}
        jobs.append(SweepRow(settings=tuple(sweep.distinct(run)), runs=(run,), figures=found, marks={}))
        shared = tuple(text for text in jobs[-1].settings if not text.lstrip("+").startswith("seed="))
        # a job with unknown settings shares its row with no other
        key = shared if run.config_text is not None else (str(run.path),)
        groups.setdefault(key, []).append(jobs[-1])
    rows = sorted(
        (_folded(key, group) for key, group in groups.items()), key=lambda row: (not _completed(row), -_lead(row))
    )
    return SweepComparison(rows=_marked(rows), jobs=jobs)


def _completed(row: SweepRow) -> bool:
    return all(run.status == "completed" for run in row.runs)


def _lead(row: SweepRow) -> float:
    """Return the figure that ranks a row: its reward, or its loss below zero."""
    reward, loss = row.figures.get("reward"), row.figures.get("loss")
    return reward.value if reward is not None else -loss.value if loss is not None else -math.inf


def _folded(settings: tuple[str, ...], jobs: Sequence[SweepRow]) -> SweepRow:
    if len(jobs) == 1:
        return jobs[0]
    every = {column.key: fold([job.figures.get(column.key) for job in jobs]) for column in COLUMNS}
    return SweepRow(
        settings=settings,
        runs=tuple(run for job in jobs for run in job.runs),
        figures={key: one for key, one in every.items() if one is not None},
        marks={},
    )


def _marked(rows: list[SweepRow]) -> list[SweepRow]:
    words: list[dict[str, Mark]] = [{} for _ in rows]
    for column in COLUMNS:
        competing = [row.figures.get(column.key) if _competes(row, column.key) else None for row in rows]
        for row, mark in zip(words, marks(competing, column.better, column.text), strict=True):
            if mark is not None:
                row[column.key] = mark
    return [replace(row, marks=found) for row, found in zip(rows, words, strict=True)]


def _competes(row: SweepRow, key: str) -> bool:
    """Return whether all jobs completed and have this figure: a mean without the failed jobs would flatter."""
    one = row.figures.get(key)
    complete = len(row.runs) == 1 or (one is not None and one.count == len(row.runs))
    return complete and _completed(row)


def _seed(run: Run) -> int | None:
    for value in (run.record.get("seed"), run.setting("seed")):
        if isinstance(value, int):
            return value
    return None


# Charts: one curve per row, with a band for several jobs.


_METRICS = {"reward": "reward/mean", "loss": "loss"}
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (5 * 60.0, 60.0, "minutes"))


def main_figure(rows: Sequence[SweepRow]) -> str:
    """Return the key of the figure that ranks rows: the reward, or the loss of supervised runs."""
    return "loss" if any("loss" in row.figures for row in rows) else "reward"


def chart_by_step(rows: Sequence[SweepRow]) -> Markup:
    """Draw the main figure of all rows by step."""
    name = main_figure(rows)
    return _chart(rows, lambda runs: run_charts.by_step(runs, _METRICS[name]), f"Mean {name} by step", "step")


def chart_by_wall(rows: Sequence[SweepRow]) -> Markup:
    """Draw the main figure of all rows by training time, in hours, minutes or seconds."""
    name = main_figure(rows)
    longest = max((run.summary["wall_s"] or 0.0 for row in rows for run in row.runs), default=0.0)
    unit, word = next(((unit, word) for least, unit, word in _UNITS if longest >= least), (1.0, "seconds"))

    def points(runs: Sequence[Run]) -> list[Point]:
        return [point._replace(x=round(point.x / unit, 4)) for point in run_charts.by_wall(runs, _METRICS[name])]

    return _chart(rows, points, f"Mean {name} by training time", word)


def _chart(rows: Sequence[SweepRow], curve: Callable[[Sequence[Run]], list[Point]], label: str, x_label: str) -> Markup:
    return charts.line_chart(
        [_series(row, index, curve(row.runs), many=len(rows) > COLOURS) for index, row in enumerate(rows)],
        label=label,
        x_label=x_label,
        y_format=metric_text,
        empty="No job has recorded a step.",
    )


def _series(row: SweepRow, index: int, points: Sequence[Point], *, many: bool) -> Series:
    several = len(row.runs) > 1
    return Series(
        name=row.label,
        points=[(point.x, point.mean) for point in points],
        low=[(point.x, point.low) for point in points] if several else (),
        high=[(point.x, point.high) for point in points] if several else (),
        colour=index % COLOURS,
        dash=index // COLOURS if many else index % 4,
    )


# Comparison of the digests of jobs that should be equal, version by version.


# Settings that numbers do not depend on: transport, retention, folders, display.
_NO_MATTER = ("name", "live", "hydra", "tracker", "cluster", "retention")
_MATTERS_OF = {
    "sync": ("interval", "max_staleness", "what", "wire_dtype", "keep_fp32"),
    "checkpoint": ("resume_from",),
}


class DigestDifference(NamedTuple):
    """The first version that differs between two jobs, and both digests."""

    version: int
    job: str
    digest: str
    other_job: str
    other_digest: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Comparison of the digests of jobs."""

    jobs: int  # the number of jobs that were compared
    sets: int  # the number of sets of jobs that should be equal
    versions: int  # the number of versions with digests of at least two jobs of a set
    differs: DigestDifference | None  # the first difference

    @property
    def agree(self) -> bool | None:
        """Whether all are equal; None if there was nothing to compare."""
        return self.differs is None if self.versions else None

    @property
    def text(self) -> str:
        if self.differs is not None:
            one = self.differs
            return (
                f"digests differ: version {one.version} is {one.digest} in job {one.job}, {one.other_digest} in job "
                f"{one.other_job}"
            )
        if not self.versions:
            return (
                "digests not compared: no two reproducible jobs of one seed, and of the same settings up to sync, "
                "retention and checkpoint, have a version in common"
            )
        return f"digests agree: {self.compared}"

    @property
    def compared(self) -> str:
        """The number of jobs, sets and versions."""
        of = f" in {self.sets} sets" if self.sets > 1 else ""
        return f"{units.plural(self.jobs, 'job')}{of}, {units.plural(self.versions, 'version')}"


def agreement(runs: Sequence[Run]) -> Agreement:
    """Compare the digests of the jobs that should be equal, at each step that both published or committed.

    These jobs are reproducible and have the same settings, seed, packages, threads and hardware. Settings of transport,
    retention and saving may differ (of `sync` all but interval, staleness, content and dtypes, which change samples).
    """
    sets: dict[str, list[Run]] = {}
    for run in runs:
        if run.config and run.record.get("reproducible", True) and run.summary["digests"]:
            sets.setdefault(_computes(run), []).append(run)
    compared, counted, versions = 0, 0, 0
    first: DigestDifference | None = None
    for alike in sets.values():
        held: dict[int, list[tuple[Run, str]]] = {}
        for run in alike:
            for step, digest in run.summary["digests"].items():
                held.setdefault(int(step), []).append((run, digest))
        shared = {step: pairs for step, pairs in held.items() if len(pairs) > 1}
        versions += len(shared)
        counted += bool(shared)
        compared += len({run.path for pairs in shared.values() for run, _ in pairs})
        found = [found for step, pairs in shared.items() if (found := _first(step, pairs)) is not None]
        first = min([*found, *([first] if first else [])], default=None)
    return Agreement(jobs=compared, sets=counted, versions=versions, differs=first)


def _first(step: int, pairs: Sequence[tuple[Run, str]]) -> DigestDifference | None:
    (run, digest), *others = pairs
    return next(
        (
            DigestDifference(step, run.path.name, digest, other.path.name, found)
            for other, found in others
            if found != digest
        ),
        None,
    )


def _computes(run: Run) -> str:
    """Return the settings that decide the numbers of a run, as text."""
    settings = {name: value for name, value in run.config.items() if name not in {*_NO_MATTER, *_MATTERS_OF}}
    parts = [run.setting(name, key) for name, keys in _MATTERS_OF.items() for key in keys]
    place = [run.record.get(name) for name in ("seed", "packages", "threads", "hardware")]
    return json.dumps([settings, parts, place], sort_keys=True, default=str)
