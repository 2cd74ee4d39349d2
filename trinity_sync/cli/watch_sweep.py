"""Watching a sweep: its jobs at a glance, and the one that is running as `watch` shows a run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from trinity_sync.cli.sweeps import SETTINGS, read_jobs
from trinity_sync.cli.watch_run import Patience, RunWatch, killed, pause
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.masking import masked_override
from trinity_sync.host.terminal import printable
from trinity_sync.report.data import is_run, job_order
from trinity_sync.report.overview import RunLine, SweepLine, run_line
from trinity_sync.tracking import units
from trinity_sync.tracking.closing import shorten
from trinity_sync.tracking.follow import Standing, standing
from trinity_sync.tracking.live import LiveView

_PANEL_LINES = 14
_STYLES = {
    "completed": "green",
    "failed": "red",
    "killed": "red",
    "unreadable": "red",
    "interrupted": "yellow",
    "running": "cyan",
}
_INTEREST = {"running": 0, "starting": 0, "completed": 2, "not begun": 3}


@dataclass(kw_only=True)
class _Job:
    now: Standing
    line: RunLine

    @property
    def steps(self) -> str:
        total = self.line.total_steps
        return str(self.line.steps) if total is None else f"{self.line.steps}/{total}"

    @property
    def runs(self) -> bool:
        return self.now.stand in ("starting", "running")


class SweepWatch:
    """The jobs of a sweep as they stand.

    Args:
        folder: of the sweep, absolute.
        view: where it is shown.

    Raises:
        ConfigError: it is no folder of a sweep, nor of runs.
    """

    def __init__(self, folder: Path, view: LiveView) -> None:
        self._folder, self._view = folder, view
        self._jobs: dict[Path, _Job] = {}
        self._is_sweep = (folder / SETTINGS).is_file()
        jobs = _read_jobs(folder) if self._is_sweep else None
        self._expected = None if jobs is None else len(jobs)
        self._shared = set.intersection(*map(set, jobs)) if jobs and len(jobs) > 1 else None
        self.refresh(quietly=True)
        if not self._is_sweep and not self._jobs:
            raise ConfigError(
                f"{folder} holds neither a run (run.json) nor a sweep (folders of runs); name one, such as "
                "outputs/NAME/DATE_TIME"
            )

    def refresh(self, *, quietly: bool = False) -> None:
        """Look at all jobs; those that have ended are read once.

        Args:
            quietly: do not say what has become of them.

        Raises:
            RunError: the folder is gone, or cannot be read.
        """
        try:
            folders = [child for child in self._folder.iterdir() if child.is_dir() and is_run(child)]
        except OSError as error:
            raise RunError(f"{self._folder} cannot be read: {error.strerror or error}") from error
        jobs = {}
        for folder in sorted(folders, key=job_order):
            now, before = _standing(folder), self._jobs.get(folder)
            ended = before is not None and before.now.stand == now.stand and not before.runs
            jobs[folder] = before if before is not None and ended else _Job(now=now, line=run_line(folder))
        earlier, self._jobs = self._jobs, jobs
        for folder, job in jobs.items():
            stand = job.now.stand
            if quietly or stand == "starting" or (folder in earlier and earlier[folder].now.stand == stand):
                continue
            self._view.say(f"job {self._named(folder)}: {stand}{f', {job.steps} steps' if job.now.over else ''}")

    @property
    def running(self) -> list[Path]:
        """The folders of jobs that are running."""
        return [folder for folder, job in self._jobs.items() if job.runs]

    @property
    def over(self) -> bool:
        """Whether no further job is to be expected."""
        if self.running:
            return False
        ended = sum(job.now.over for job in self._jobs.values())
        return not self._is_sweep or (self._expected is not None and ended >= self._expected)

    @property
    def good(self) -> bool:
        """Whether all jobs have completed."""
        completed = self._count().get("completed", 0)
        return completed == max(len(self._jobs), self._expected or 0) > 0

    @property
    def going_well(self) -> bool:
        """Whether no job has ended otherwise than it should."""
        return not any(job.now.over and job.now.stand != "completed" for job in self._jobs.values())

    @property
    def problems(self) -> list[str]:
        """What went wrong with jobs, a paragraph each."""
        told = []
        for folder, job in self._jobs.items():
            if job.now.stand == "killed":
                told.append(f"job {folder.name}: {killed(folder, job.now)}")
            elif job.now.stand == "unreadable":
                told += [f"job {folder.name}: {problem}" for problem in job.line.problems]
            elif job.now.over and job.now.error:
                told.append(f"job {folder.name}: {job.now.error}")
        return told

    def overview(self, *, whole: bool = False) -> RenderableType:
        """Render the jobs: what they are counted by, then a line each, as many as there is room for.

        Args:
            whole: whether there is room for all.
        """
        console = self._view.console
        jobs = self._jobs
        to_come = (self._expected or 0) - len(jobs)
        counts = [f"{count} {stand}" for stand, count in self._count().items()]
        counts += [f"{to_come} to come"] if to_come > 0 else []
        head = Text.assemble((printable(shorten(self._folder)), "bold"), f": {', '.join(counts) or 'no job has begun'}")
        room = len(jobs) if whole else max(2, console.height - _PANEL_LINES)
        # the newest of each kind first, where there is no room for all
        shown = sorted(reversed(jobs), key=lambda folder: _INTEREST.get(jobs[folder].now.stand, 1))[:room]
        lines = [self._line(folder) for folder in jobs if folder in shown]
        hidden = len(jobs) - len(shown)
        return Group(head, *lines, *([Text(f"and {units.plural(hidden, 'other job')}", style="dim")] if hidden else []))

    def _line(self, folder: Path) -> Text:
        job = self._jobs[folder]
        reward = f"  reward {units.number(job.line.reward)}" if job.line.reward is not None else ""
        return Text.assemble(
            f"{printable(folder.name):>3}  ",
            (f"{job.now.stand:<11}", _STYLES.get(job.now.stand, "")),
            f"  {job.steps}{reward}  ",
            (self._settings(folder), "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )

    def _named(self, folder: Path) -> str:
        settings = self._settings(folder)
        return f"{folder.name} ({settings})" if settings else folder.name

    def _settings(self, folder: Path) -> str:
        line = self._jobs[folder].line
        if self._shared is not None:
            own = [text for text in line.overrides if text not in self._shared]
        else:
            own = SweepLine(path=self._folder, jobs=[job.line for job in self._jobs.values()]).distinct(line)
        return printable(" ".join(own))

    def _count(self) -> Counter[str]:
        return Counter(job.now.stand for job in self._jobs.values())


def watch_sweep(folder: Path, view: LiveView, *, once: bool, wait_s: float) -> int:
    """Show a sweep until it is over: its jobs, and the one that is running; arguments as for `watch_run`.

    It is over when all of its jobs have ended, or none has begun for `wait_s` after the last one.

    Returns:
        The exit code: 0 all jobs completed, or `once` and none has failed so far; 1 some did not.
    """
    sweep, patience = SweepWatch(folder, view), Patience(wait_s)
    current: RunWatch | None = None
    view.show(None, above=sweep.overview)
    while not sweep.over and (sweep.running or not patience.over):
        if current is None or current.folder not in sweep.running:
            current = next(_watches(sweep, view), None)
            if current is None:
                view.show(None, above=sweep.overview)
        if current is not None:
            current.look()
            patience.renew()
        if once:
            view.console.print(view.render())
            return 0 if sweep.going_well else 1
        pause(view)
        sweep.refresh()
    view.close()
    view.console.print(sweep.overview(whole=True))
    for problem in sweep.problems:
        view.console.print(Text(problem, style="red"), soft_wrap=True)
    return 0 if sweep.good else 1


def _watches(sweep: SweepWatch, view: LiveView) -> Iterator[RunWatch]:
    for folder in sweep.running:
        yield RunWatch(folder, view, label=f"job {folder.name}: ", above=sweep.overview)


def _standing(folder: Path) -> Standing:
    """As `standing`; what is wrong with one job is told at the end, and the others are watched."""
    try:
        return standing(folder)
    except ConfigError:
        return Standing(stand="unreadable", record=None, owner=None)


def _read_jobs(folder: Path) -> list[tuple[str, ...]] | None:
    """Read the overrides of the jobs that a sweep is to have; None where they are not known before they run."""
    with contextlib.suppress(ConfigError):
        return [tuple(map(masked_override, job.invocation.overrides)) for job in read_jobs(folder)]
    return None
