"""What verl's trainer writes itself, beside the files of an engine: parts of a step that the monitor waits for, which
are in when the trainer goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.tracker_files import read_tracker
from trinity_sync.checkpoint.verl_folders import has_written
from trinity_sync.errors import WaitTimeout
from trinity_sync.protocol.parts import FULL, beside_file, beside_part, is_beside

#: At the end of the program other ranks have so long to write a file that is being written, seconds.
_OTHERS_S = 30.0
_POLL_S = 0.2


def trainer_file_names(files: Iterable[str | None]) -> list[str | None]:
    """Name the part of each rank; None: its trainer writes nothing. Rank 0 always has one, for all that is not told.

    Args:
        files: what the trainer writes on each rank, in the step's folder; see `CommittedSaves.trainer_file`.
    """
    return [
        beside_part(None) if rank == 0 else None if file is None else beside_part(file)
        for rank, file in enumerate(files)
    ]


class Beside:
    """This rank's part, of the save that was begun last.

    Args:
        monitor: the checkpoint monitor.
        attempt: the run's attempt.
        root: the checkpoint folder.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, monitor: MonitorClient, attempt: int, root: Path, timeout_s: float) -> None:
        self._monitor = monitor
        self._attempt = attempt
        self._root = root
        self._timeout_s = timeout_s
        self._awaited: tuple[int, str] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether this rank's part is to be told of still."""
        return self._awaited is not None

    def begin(self, step: int, parts: Sequence[str | None], rank: int) -> None:
        """A save has begun: its parts by rank, with the role's place in the step's folder."""
        part = parts[rank]
        self._awaited = (step, part) if part is not None else None

    def forget(self) -> None:
        """The save has failed."""
        self._awaited = None

    def went_on(self) -> None:
        """The trainer does other things than to save: its files are whole.

        Raises:
            RunError: the monitor is gone.
            WaitTimeout: it does not answer.
        """
        if self._awaited is not None:
            (step, part), self._awaited = self._awaited, None
            finished = self._monitor.notify_finished(step, part=part, attempt=self._attempt, files=[])
            finished.result(self._timeout_s)

    def settle(self) -> None:
        """The program ends: tell the monitor whether the trainer's files are there. They are where it has come to write
        the tracker, which its rank 0 does last, and on the others where their file is whole. Else the save fails. Where
        the tracker cannot be read now, that is left to the monitor's end.

        Rank 0 tells it of all, for it may have failed in a step that the others wait in for it.

        Raises:
            RunError: the monitor is gone.
            WaitTimeout: it does not answer; or another rank does not come to write its file. The monitor's end decides.
        """
        if self._awaited is None:
            return
        step, part = self._awaited
        file = beside_file(part)
        if file is None:
            tracker = read_tracker(self._root, FULL)
            if tracker.unreadable:
                return
            there = tracker.step == step
        else:
            there = has_written(step_dir(self._root, step), file)
        if there and file is None:
            self._tell_of_all(step)
            self._awaited = None
        elif there:
            self.went_on()
        else:
            self._awaited = None
            why = f"the program ended before its trainer had written {file or 'what belongs beside the engine files'}"
            self._monitor.fail_step(step, why, attempt=self._attempt).result(self._timeout_s)

    def _tell_of_all(self, step: int) -> None:
        deadline = time.monotonic() + _OTHERS_S
        while True:
            self._monitor.notify_beside(step, attempt=self._attempt).result(self._timeout_s)
            status = self._monitor.status(step).result(self._timeout_s)
            awaited = [part for part in status["awaited"] if is_beside(part)]
            if not awaited or status["state"] == "failed":  # of which nobody waits for a part
                return
            if time.monotonic() > deadline:
                raise WaitTimeout("verl's trainer", f"write what step {step} lacks ({', '.join(awaited)})", _OTHERS_S)
            time.sleep(_POLL_S)
