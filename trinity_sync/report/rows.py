"""The rows of a comparison: jobs with the same settings but for the seed are one, with their mean and band."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trinity_sync.report.data import Run, Sweep
from trinity_sync.report.figures import COLUMNS, Figure, figures, fold
from trinity_sync.report.marks import Mark, marks
from trinity_sync.tracking import units


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        settings: the overrides that tell it from the others.
        runs: its jobs; several differ by seed only.
        figures: by the key of their column, those that there are.
        marks: by the key of their column, where there is one.
    """

    settings: tuple[str, ...]
    runs: tuple[Run, ...]
    figures: Mapping[str, Figure]
    marks: Mapping[str, Mark]

    @property
    def jobs(self) -> list[str]:
        """The names of its jobs."""
        return [run.path.name for run in self.runs]

    @property
    def seeds(self) -> list[int]:
        """The different seeds of its jobs."""
        return sorted({seed for run in self.runs if (seed := _seed(run)) is not None})

    @property
    def label(self) -> str:
        """What it is called in a legend."""
        if len(self.runs) == 1:
            return f"{self.jobs[0]}: {' '.join(self.settings)}" if self.settings else f"job {self.jobs[0]}"
        return f"{' '.join(self.settings) or 'all jobs'} ({self.size})"

    @property
    def size(self) -> str:
        """How many jobs and seeds it stands for; nothing for one job."""
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
        """The steps that were done, of those asked for; from the fewest to the most."""
        done = sorted({run.summary["steps"] for run in self.runs})
        asked = {run.total_steps for run in self.runs} - {None}
        text = str(done[0]) if len(done) == 1 else f"{done[0]} to {done[-1]}"
        return f"{text}/{asked.pop()}" if len(asked) == 1 else text

    @property
    def faults(self) -> int:
        """How many faults its jobs reported."""
        return sum(run.summary["faults"] for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A sweep, compared: `rows` by what varies beside the seed, `jobs` one by one and without marks."""

    rows: list[Row]
    jobs: list[Row]

    @property
    def folded(self) -> bool:
        """Whether some row stands for several jobs."""
        return len(self.rows) < len(self.jobs)


def compare(sweep: Sweep) -> Comparison:
    """Work out the figures of all jobs of a sweep, and group them."""
    jobs = []
    groups: dict[tuple[str, ...], list[Row]] = {}
    for run in sweep.runs:
        found = {key: one for key, one in figures(run).items() if one is not None}
        jobs.append(Row(settings=tuple(sweep.distinct(run)), runs=(run,), figures=found, marks={}))
        # of a job whose settings are not known nobody can say what it has in common with others
        known = run.config_text is not None
        key = tuple(text for text in jobs[-1].settings if not _is_seed(text)) if known else (str(run.path),)
        groups.setdefault(key, []).append(jobs[-1])
    return Comparison(rows=_marked([_folded(key, group) for key, group in groups.items()]), jobs=jobs)


def _folded(settings: tuple[str, ...], jobs: Sequence[Row]) -> Row:
    if len(jobs) == 1:
        return jobs[0]
    every = {column.key: fold([job.figures.get(column.key) for job in jobs]) for column in COLUMNS}
    return Row(
        settings=settings,
        runs=tuple(run for job in jobs for run in job.runs),
        figures={key: one for key, one in every.items() if one is not None},
        marks={},
    )


def _marked(rows: list[Row]) -> list[Row]:
    words: list[dict[str, Mark]] = [{} for _ in rows]
    for column in COLUMNS:
        competing = [row.figures.get(column.key) if _competes(row, column.key) else None for row in rows]
        for row, mark in zip(words, marks(competing, column.better, column.text), strict=True):
            if mark is not None:
                row[column.key] = mark
    return [replace(row, marks=found) for row, found in zip(rows, words, strict=True)]


def _competes(row: Row, key: str) -> bool:
    """Whether all jobs completed and have this figure: without the jobs that never got there a mean flatters."""
    one = row.figures.get(key)
    complete = len(row.runs) == 1 or (one is not None and one.count == len(row.runs))
    return complete and all(run.status == "completed" for run in row.runs)


def _is_seed(text: str) -> bool:
    return text.lstrip("+").partition("=")[0] == "seed"


def _seed(run: Run) -> int | None:
    for value in (run.record.get("seed"), run.setting("seed")):
        if isinstance(value, int):
            return value
    return None
