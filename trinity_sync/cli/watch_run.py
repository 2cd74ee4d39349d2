"""Watching a run: its lines go into a live view until it is over, then it is told how it ended."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep, time

from rich.console import RenderableType

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.terminal import output_ended
from trinity_sync.launch.resume import resume_command
from trinity_sync.report.data import load_run
from trinity_sync.report.overview import run_line
from trinity_sync.tracking.closing import render_summary
from trinity_sync.tracking.follow import FollowedRun, ReplacedError, Standing, standing
from trinity_sync.tracking.live import LiveView
from trinity_sync.tracking.run_state import RunState

_POLL_S = 0.5


def watch_run(folder: Path, view: LiveView, *, once: bool, wait_s: float) -> int:
    """Show a run until it is over, and then how it ended.

    Args:
        folder: of the run, absolute.
        view: where it is shown.
        once: only as it stands now.
        wait_s: how long it may take to begin, in seconds.

    Returns:
        The exit code: 0 it completed, or `once` and it goes on; 1 it ended otherwise.

    Raises:
        RunError: it did not begin, or was killed.
    """
    watched, patience = RunWatch(folder, view), Patience(wait_s)
    while not (now := watched.look()).over:
        if now.stand != "not begun":
            patience.renew()
        elif once:
            raise RunError(f"the run in {folder} has not begun: nobody works in it, and there is no run.json in it")
        elif patience.over:
            raise WaitTimeout(f"the run in {folder}", "begin", patience.waited_s)
        if once:
            view.console.print(view.render())
            return 0
        pause(view)
    view.close()
    return _tell_end(folder, view, now, watched.notes)


class Patience:
    """How long something is waited for.

    Args:
        limit_s: seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the last renewal, whole ones."""
        return float(round(monotonic() - self._since))

    @property
    def over(self) -> bool:
        """Whether it has been waited long enough."""
        return monotonic() - self._since >= self._limit_s

    def renew(self) -> None:
        """Begin to wait from now on."""
        self._since = monotonic()


class RunWatch:
    """Feeds a view with what a run writes.

    Args:
        folder: of the run.
        view: where it is shown.
        label, above: see `LiveView.show`.
    """

    def __init__(
        self, folder: Path, view: LiveView, *, label: str = "", above: Callable[[], RenderableType] | None = None
    ) -> None:
        self.folder = folder
        self._view, self._label, self._above = view, label, above
        self._run: FollowedRun | None = None
        self._begun: tuple[int | None, int] | None = None  # the attempt, and when its settings were saved

    @property
    def notes(self) -> list[str]:
        """What was passed over, one sentence each."""
        return self._run.notes if self._run is not None else []

    def look(self) -> Standing:
        """Show what is new, and return how the run stands.

        Raises:
            RunError: the folder is gone, or cannot be read.
        """

        if not self.folder.is_dir():
            raise RunError(f"{self.folder} is gone: somebody has moved or deleted it")
        now = standing(self.folder)  # before its lines are read: of one that is over, none comes later
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

    def _begin(self, now: Standing) -> None:
        """Take in all that there is already, and show where that has led."""

        line = run_line(self.folder)
        ranks = f"{line.backend} x {line.ranks}, sync={line.sync}" if line.backend and line.sync else ""
        started = (now.record or {}).get("started") or time()
        state = RunState(line.total_steps, title=line.name or self.folder.name, subtitle=ranks, began=started)
        self._run = FollowedRun(self.folder)
        for earlier in self._run.lines():
            state.take(earlier, started)
        attempt = now.record["attempt"] if now.record is not None else 0
        if attempt > state.attempt:
            state.begin(attempt, started)
        state.began = started
        self._view.show(state, label=self._label, above=self._above)


def _changed(folder: Path) -> int:
    """When the settings of a run were saved, in nanoseconds: those of a resume are, once it has begun."""
    try:
        return (folder / ".hydra" / "config.yaml").stat().st_mtime_ns
    except OSError:
        return 0


def pause(view: LiveView) -> None:
    """Wait before the next look.

    Raises:
        BrokenPipeError: stdout takes no more output.
        RunError: it cannot be shown for another reason.
    """
    if output_ended():
        raise BrokenPipeError
    if view.failure is not None:
        raise RunError(f"it cannot be shown here: {view.failure}; what was watched goes on") from view.failure
    sleep(_POLL_S)


def _tell_end(folder: Path, view: LiveView, now: Standing, notes: list[str]) -> int:
    """Show how a run ended, as the run itself does; return the exit code."""

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


def killed(folder: Path, now: Standing) -> str:
    """Say that a run was killed, and what that is told by."""
    host = (now.record or {}).get("host")
    elsewhere = f" (it ran on {host}: locks of other hosts are not seen on every file system)"
    return (
        f"the run in {folder} was killed: its run.json says that it is running, but no process holds its folder"
        f"{elsewhere if host not in (None, socket.gethostname()) else ''}"
    )
