"""What all saves of a rank have in common: the ranks begin them together, and a save that fails ends no training.

Whatever one rank fails of is told to the monitor, which gives the step up, and to the other ranks, which then wait for
it in no collective call. The next save begins anew.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from trinity_sync.backends.base import Deadline
from trinity_sync.backends.meetings import Meeting, Meetings
from trinity_sync.checkpoint import CheckpointCoordinator


class Snapshotting(Protocol):
    """A copy that may still be under way."""

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the state may change; seconds waited."""
        ...


class Saver(ABC):
    """Saves of one rank. All methods are collective.

    Args:
        deadline: when what the engine holds changes.
        coordinator: the process's coordinator.
        meetings: the rank's meetings with the others; their limit is that of all waits of a save.
        part: name of the rank's part.
        lazy: copy during the next forward and backward where the engine allows it.
    """

    def __init__(
        self, deadline: Deadline, coordinator: CheckpointCoordinator, meetings: Meetings, part: str, *, lazy: bool
    ) -> None:
        self._coordinator = coordinator
        self._meetings = meetings
        self._timeout_s = meetings.timeout_s
        self._part = part
        self._lazy = lazy and deadline == "optimizer_step"
        self._copying: Snapshotting | None = None
        self._step = -1
        self._blocked_s = 0.0

    @abstractmethod
    def prepare(self) -> None:
        """Get ready for saves, after a training step and before the first save."""

    def save(self, step: int, folder: Path) -> float:
        """Begin to save the state after `step` into the staging folder `folder`. What it fails of fails the step at the
        monitor, and is not raised.

        Returns:
            Seconds in which training stood still so far; see `blocked_s`.
        """
        started = time.perf_counter()
        try:
            meeting = self._meetings.begin(f"step {step}", lambda: self._ready(step))
            try:
                self._begin(step, folder, meeting)
            except Exception as error:
                meeting.give_up(error)
                raise
        except Exception as error:
            self._coordinator.fail(step, self._part, error)
        self._step, self._blocked_s = step, time.perf_counter() - started
        return self._blocked_s

    def blocked_s(self, step: int) -> float:
        """Return the seconds in which training stood still for the save of `step`, or 0 where that was long ago."""
        return self._blocked_s if step == self._step else 0.0

    def finish(self) -> None:
        """Wait until the saves of this rank are in other hands, or done, and have these hurry; raises what the newest
        of them raised.
        """
        self._coordinator.wait_all()

    def _ready(self, step: int) -> None:
        """Wait until what was saved before is in other hands, or done."""
        self._wait_copied()
        self._coordinator.settle()

    @abstractmethod
    def _begin(self, step: int, folder: Path, meeting: Meeting) -> None:
        """Copy, and have the copy written in the background."""

    def _wait_copied(self) -> None:
        """Wait for the copy, on the training thread, before the state changes."""
        if self._copying is not None:
            self._blocked_s += self._copying.wait_until_copied(self._timeout_s)
            self._copying = None
