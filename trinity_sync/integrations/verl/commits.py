"""Waiting for commits beside the trainer: rank 0 lets something follow each, and any rank may ask how they went."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.actors.pending import ANSWER_S
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.errors import WaitTimeout
from trinity_sync.integrations.verl.reading import held_throughout
from trinity_sync.protocol.parts import FULL, Kind, is_beside


class Commits:
    """Commits that one process waits for.

    Args:
        monitor: the checkpoint monitor.
        attempt: the run's attempt.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, monitor: MonitorClient, attempt: int, timeout_s: float) -> None:
        self._monitor = monitor
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []
        self._open: dict[tuple[int, Kind], None] = {}

    def expect(self, step: int, kind: Kind) -> None:
        """This process has a share in the commit; `wait` waits for it."""
        self._open[step, kind] = None

    def follow(self, step: int, kind: Kind, then: Callable[[str | None], None]) -> None:
        """Call `then` with the folder, in the background, when the step is committed. What it raises, or the commit, is
        told later.
        """

        def run() -> None:
            try:
                then(self._wait_for_trainer(step, kind))
            except Exception as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, name=f"commit-{kind}-{step}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def following(self) -> list[threading.Thread]:
        """Return the threads that wait for a commit, or do what follows one."""
        return list(self._threads)

    def raise_failures(self) -> None:
        """Raise what followed a commit and failed since the last call. Does not wait."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Wait until all commits are done, and what follows them. Raises what failed first.

        Raises:
            RunError: a step failed, on whichever rank; says why.
            WaitTimeout: it names what is missing.
        """
        waiting, self._open = list(self._open), {}
        for step, kind in waiting:
            try:
                self._wait_for(step, kind)
            except Exception as error:
                self._errors.append(error)
        for thread in self._threads:
            thread.join(self._timeout_s)
            if thread.is_alive():
                raise WaitTimeout("the work after a commit", "end", self._timeout_s)
        self.raise_failures()

    def drop(self) -> None:
        """The saves failed, which was told already: wait for no commit of theirs, and do not tell it again."""
        self._open.clear()
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._threads.clear()
        self._errors.clear()

    def _wait_for_trainer(self, step: int, kind: Kind) -> str | None:
        """As `_wait_for`, but what verl's trainer writes itself has all the time that it takes."""
        while True:
            try:
                return self._wait_for(step, kind)
            except WaitTimeout:
                awaited = self._monitor.status(step).result(self._timeout_s + ANSWER_S)["awaited"]
                if not awaited or not all(map(is_beside, awaited)):
                    raise

    def _wait_for(self, step: int, kind: Kind) -> str | None:
        call = self._monitor.wait_committed(step, self._attempt, self._timeout_s, kind=kind)
        # The monitor ends the wait itself, and names what is missing.
        return call.result(self._timeout_s + ANSWER_S)["path"]


def follow_with_copy(commits: Commits, root: Path, step: int, copy: Callable[[], None]) -> None:
    """Copy a step's folder to another place, in the background, when its full checkpoint is committed. It is held
    meanwhile, so that no limit of checkpoints deletes it.

    Args:
        commits: waits, and tells what is raised.
        root: the checkpoint folder.
        step: the step.
        copy: copies the folder.
    """

    def held(_: str | None) -> None:
        with held_throughout(root, str(step_dir(root, step)), "the copy to a remote place"):
            copy()

    commits.follow(step, FULL, held)
