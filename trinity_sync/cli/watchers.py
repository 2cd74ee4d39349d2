"""Watchers of a run and of a sweep: they feed a live view until the end, then print the result. `trinity-sync watch`
calls `watch_run` and `watch_sweep`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from trinity_sync.cli.sweep_jobs import SETTINGS, read_jobs
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.masking import masked_override
from trinity_sync.host.terminal import output_ended, printable
from trinity_sync.launch.start import resume_command
from trinity_sync.report.run_data import is_run, job_order, load_run
from trinity_sync.report.run_page import RunLine, SweepLine, run_line
from trinity_sync.tracking import units
from trinity_sync.tracking.events import LogLine, merged_lines
from trinity_sync.tracking.json_lines import Record
from trinity_sync.tracking.live import LiveView
from trinity_sync.tracking.run_end import render_summary, shorten
from trinity_sync.tracking.run_record import LockOwner, RunJson, lock_owner, read_record
from trinity_sync.tracking.run_state import RunState

_POLL_S = 0.5


def watch_run(folder: Path, view: LiveView, *, once: bool, wait_s: float) -> int:
    """Show a run until it ends, and then its result. `wait_s`: timeout of the run's start, seconds. Returns the exit
    code: 0 it completed, or `once` and it runs; 1 it ended otherwise.
    """
    watched, patience = RunWatch(folder, view), Patience(wait_s)
    while not (now := watched.look()).over:
        if now.stand != "not begun":
            patience.renew()
        elif once:
            raise RunError(f"the run in {folder} has not begun: no process holds the folder, and it has no run.json")
        elif patience.over:
            raise WaitTimeout(f"the run in {folder}", "begin", patience.waited_s)
        if once:
            view.console.print(view.render())
            return 0
        pause(view)
    view.close()
    return _tell_end(folder, view, now, watched.notes)


class Patience:
    """A timeout that can be renewed. `limit_s`: seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = monotonic()

    @property
    def waited_s(self) -> float:
        """Whole seconds since the last renewal."""
        return float(round(monotonic() - self._since))

    @property
    def over(self) -> bool:
        return monotonic() - self._since >= self._limit_s

    def renew(self) -> None:
        self._since = monotonic()


class RunWatch:
    """Feeds a view with the files that a run writes. `folder`: of the run. `view`: shows it. `label`, `above`: see
    `LiveView.show`.
    """

    def __init__(
        self, folder: Path, view: LiveView, *, label: str = "", above: Callable[[], RenderableType] | None = None
    ) -> None:
        self.folder = folder
        self._view, self._label, self._above = view, label, above
        self._run: FollowedRun | None = None
        self._begun: tuple[int | None, int] | None = None  # the attempt, and the time of its settings

    @property
    def notes(self) -> list[str]:
        """Skipped lines, one sentence each."""
        return self._run.notes if self._run is not None else []

    def look(self) -> RunStatus:
        """Show new lines, and return the run's state. Raises RunError if the folder is gone or cannot be read."""

        if not self.folder.is_dir():
            raise RunError(f"{self.folder} no longer exists: it was moved or deleted")
        now = standing(self.folder)  # before the lines: a run that has ended writes no more
        begun = (now.record["attempt"] if now.record is not None else None, _changed(self.folder))
        try:
            if self._run is None or begun != self._begun:
                self._begin(now)
            else:
                for line in self._run.lines():
                    self._view.take(line)
        except ReplacedError:
            self._begin(now)
        self._begun = begun
        return now

    def _begin(self, now: RunStatus) -> None:
        """Read all existing lines, and show the resulting state."""

        line = run_line(self.folder)
        trained = [f"{line.model} on {line.task}"] if line.model and line.task else []
        ranks = [f"{line.backend} x {line.ranks}", f"sync={line.sync}"] if line.backend and line.sync else []
        title, told = line.name or self.folder.name, ", ".join(trained + ranks)
        started = (now.record or {}).get("started") or time()
        state = RunState(line.total_steps, title=title, subtitle=told, began=started)
        self._run = FollowedRun(self.folder)
        for earlier in self._run.lines():
            state.take(earlier, started)
        attempt = now.record["attempt"] if now.record is not None else 0
        if attempt > state.attempt:
            state.begin(attempt, started)
        state.began = started
        self._view.show(state, label=self._label, above=self._above)


def _changed(folder: Path) -> int:
    """Return when the settings of a run were saved, in nanoseconds: a resume saves them when it starts."""
    try:
        return (folder / ".hydra" / "config.yaml").stat().st_mtime_ns
    except OSError:
        return 0


def pause(view: LiveView) -> None:
    """Wait before the next look. Raises BrokenPipeError if stdout is closed, RunError if the view has failed."""
    if output_ended():
        raise BrokenPipeError
    if view.failure is not None:
        raise RunError(f"the view cannot be shown here: {view.failure}; the run or sweep continues") from view.failure
    sleep(_POLL_S)


def _tell_end(folder: Path, view: LiveView, now: RunStatus, notes: list[str]) -> int:
    """Show the end of a run, as the run itself does; return the exit code."""

    run = load_run(folder)
    run.summary["status"] = now.stand
    ended = render_summary(run.summary, folder, total_steps=run.total_steps, error=now.error, resume=resume_command)
    view.console.print(ended, crop=False)
    sys.stdout.flush()
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if now.stand == "killed":
        raise RunError(killed(folder, now))
    return 0 if now.stand == "completed" else 1


def killed(folder: Path, now: RunStatus) -> str:
    """Explain how it is known that a run was killed."""
    host = (now.record or {}).get("host")
    elsewhere = f" (it ran on {host}: locks of other hosts are not seen on every file system)"
    return (
        f"the run in {folder} was killed: its run.json says that it is running, but no process holds its folder"
        f"{elsewhere if host not in (None, socket.gethostname()) else ''}"
    )


# -- a sweep: an overview of its jobs, and the running job as a run is shown


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
class _WatchedJob:
    now: RunStatus
    line: RunLine

    @property
    def steps(self) -> str:
        total = self.line.total_steps
        return str(self.line.steps) if total is None else f"{self.line.steps}/{total}"

    @property
    def runs(self) -> bool:
        return self.now.stand in ("starting", "running")


class SweepWatch:
    """The current jobs of a sweep. `folder`: of the sweep, absolute. `view`: shows it. Raises ConfigError: it is a
    folder neither of a sweep nor of runs.
    """

    def __init__(self, folder: Path, view: LiveView) -> None:
        self._folder, self._view = folder, view
        self._jobs: dict[Path, _WatchedJob] = {}
        self._is_sweep = (folder / SETTINGS).is_file()
        jobs: list[tuple[str, ...]] | None = None  # overrides of the planned jobs; None: a search, which are unknown
        if self._is_sweep:
            with contextlib.suppress(ConfigError):
                jobs = [tuple(map(masked_override, job.invocation.overrides)) for job in read_jobs(folder)]
        self._expected = None if jobs is None else len(jobs)
        self._shared = set.intersection(*map(set, jobs)) if jobs and len(jobs) > 1 else None
        self.refresh(quietly=True)
        if not self._is_sweep and not self._jobs:
            raise ConfigError(
                f"{folder} holds neither a run (run.json) nor a sweep (folders of runs); name one, such as "
                "outputs/NAME/DATE_TIME"
            )

    def refresh(self, *, quietly: bool = False) -> None:
        """Read all jobs again, except those that had ended. `quietly`: do not report changes. Raises RunError if the
        folder is gone or cannot be read.
        """
        try:
            folders = [child for child in self._folder.iterdir() if child.is_dir() and is_run(child)]
        except OSError as error:
            raise RunError(f"{self._folder} cannot be read: {error.strerror or error}") from error
        jobs = {}
        for folder in sorted(folders, key=job_order):
            now, before = _standing(folder), self._jobs.get(folder)
            ended = before is not None and before.now.stand == now.stand and not before.runs
            jobs[folder] = before if before is not None and ended else _WatchedJob(now=now, line=run_line(folder))
        earlier, self._jobs = self._jobs, jobs
        for folder, job in jobs.items():
            stand = job.now.stand
            if quietly or stand == "starting" or (folder in earlier and earlier[folder].now.stand == stand):
                continue
            self._view.say(f"job {self._named(folder)}: {stand}{f', {job.steps} steps' if job.now.over else ''}")

    @property
    def running(self) -> list[Path]:
        """The folders of running jobs."""
        return [folder for folder, job in self._jobs.items() if job.runs]

    @property
    def over(self) -> bool:
        """True if no further job is expected."""
        if self.running:
            return False
        ended = sum(job.now.over for job in self._jobs.values())
        return not self._is_sweep or (self._expected is not None and ended >= self._expected)

    @property
    def good(self) -> bool:
        """True if all jobs have completed."""
        completed = self._count().get("completed", 0)
        return completed == max(len(self._jobs), self._expected or 0) > 0

    @property
    def going_well(self) -> bool:
        """True if no job has failed."""
        return not any(job.now.over and job.now.stand != "completed" for job in self._jobs.values())

    @property
    def problems(self) -> list[str]:
        """Errors of jobs, one paragraph each."""
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
        """Render the counts, then one line per job, as far as there is room; `whole`: all jobs."""
        console = self._view.console
        jobs = self._jobs
        to_come = (self._expected or 0) - len(jobs)
        counts = [f"{count} {stand}" for stand, count in self._count().items()]
        counts += [f"{to_come} to come"] if to_come > 0 else []
        head = Text.assemble((printable(shorten(self._folder)), "bold"), f": {', '.join(counts) or 'no job has begun'}")
        room = len(jobs) if whole else max(2, console.height - _PANEL_LINES)
        # without room for all, the newest of each kind first
        shown = sorted(reversed(jobs), key=lambda folder: _INTEREST.get(jobs[folder].now.stand, 1))[:room]
        lines = [self._line(folder) for folder in jobs if folder in shown]
        hidden = len(jobs) - len(shown)
        return Group(head, *lines, *([Text(f"and {units.plural(hidden, 'other job')}", style="dim")] if hidden else []))

    def _line(self, folder: Path) -> Text:
        job = self._jobs[folder]
        figure = f"  {job.line.figure}" if job.line.figure else ""
        return Text.assemble(
            f"{printable(folder.name):>3}  ",
            (f"{job.now.stand:<11}", _STYLES.get(job.now.stand, "")),
            f"  {job.steps}{figure}  ",
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
    """Show a sweep until it ends: its jobs, and the running one; arguments as for `watch_run`. It ends when all of its
    jobs have ended, or if none starts within `wait_s` after the last one. Returns the exit code: 0 all jobs completed,
    or `once` and none has failed so far; 1 some did not complete.
    """
    sweep, patience = SweepWatch(folder, view), Patience(wait_s)
    current: RunWatch | None = None
    view.show(None, above=sweep.overview)
    while not sweep.over and (sweep.running or not patience.over):
        if current is None or current.folder not in sweep.running:
            running, current = sweep.running, None
            if running:
                current = RunWatch(running[0], view, label=f"job {running[0].name}: ", above=sweep.overview)
            else:
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


def _standing(folder: Path) -> RunStatus:
    """Return a job's state; a damaged job is reported at the end, and the others are watched."""
    try:
        return standing(folder)
    except ConfigError:
        return RunStatus(stand="unreadable", record=None, owner=None)


# Follows a run from another process: its status by lock and run.json, and its new lines. Each line is read once.


Stand = Literal["not begun", "starting", "running", "killed", "completed", "failed", "interrupted", "unreadable"]
"""``starting`` includes the end of a run; ``killed``: run.json says running, but no process has the lock."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run; `record` is None before there is a run.json, `owner` is the process that runs."""

    stand: Stand
    record: RunJson | None
    owner: LockOwner | None

    @property
    def over(self) -> bool:
        """Whether the run writes no more."""
        return self.stand in ("killed", "completed", "failed", "interrupted", "unreadable")

    @property
    def error(self) -> str | None:
        """The reason of a failure, one paragraph."""
        return None if self.record is None else self.record.get("error")


def standing(folder: Path) -> RunStatus:
    """Return the status of a run."""
    owner = lock_owner(folder)
    record = read_record(folder / "run.json") if (folder / "run.json").exists() else None
    status = record.get("status") if record is not None else None
    if owner is None and status == "running":
        owner = lock_owner(folder)  # it may have begun between the two reads
    stand: Stand
    match status:
        case "running":
            stand = "running" if owner else "killed"
        case "completed" | "failed" | "interrupted" if owner is None:
            stand = status
        case _:
            stand = "starting" if owner else "not begun"
    return RunStatus(stand=stand, record=record, owner=owner)


class ReplacedError(Exception):
    """The followed log was cut or replaced, as by a resume: read it from the beginning."""


class Tail:
    """Reads new lines of a log, which may be missing yet; `damaged` counts lines that are not JSON objects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._read = 0
        self._file: tuple[int, int] | None = None

    def read(self) -> Iterator[Record]:
        """Return the new whole lines. Raises ReplacedError if the log was cut or replaced."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                this = (found.st_dev, found.st_ino)
                if self._file not in (None, this) or found.st_size < self._read:
                    raise ReplacedError(str(self.path))
                self._file = this
                file.seek(self._read)
                rest = b""
                while chunk := file.read(_CHUNK):
                    *lines, rest = (rest + chunk).split(b"\n")
                    self._read += sum(len(line) + 1 for line in lines)
                    yield from self._objects(lines)
        except FileNotFoundError:
            if self._file is not None:
                raise ReplacedError(str(self.path)) from None
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _objects(self, lines: list[bytes]) -> Iterator[Record]:
        for line in lines:
            if not line.strip():
                continue
            try:
                record: object = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.damaged += 1


class FollowedRun:
    """Reads the new lines of a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")

    def lines(self) -> Iterator[LogLine]:
        """Return the new events and metrics by time; raises as `Tail.read`."""
        return merged_lines(self._events.read(), self._metrics.read())

    @property
    def notes(self) -> list[str]:
        """One sentence for each log with damaged lines."""
        return [
            f"{units.plural(tail.damaged, 'line')} of {tail.path} left out: no JSON objects"
            for tail in (self._metrics, self._events)
            if tail.damaged
        ]
