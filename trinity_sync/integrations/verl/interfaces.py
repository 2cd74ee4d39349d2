"""What `saves.CommittedSaves` is given: what opens the run's monitor, and what copies the state of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.integrations.verl.run_monitor import RunMonitor


class OpensMonitor(Protocol):
    """Opens the monitor of a program that does not say at its start where its checkpoints go."""

    def __call__(self, local_path: str, loaded: str | None, timeout_s: float) -> RunMonitor:
        """Start the monitor, or find it. Collective.

        Args:
            local_path: what is saved first.
            loaded: what was loaded last; None: nothing.
            timeout_s: limit of each wait, seconds.
        """
        ...


class Copies(Protocol):
    """Copies of what a rank is to write, of one save after another."""

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        """Copy what this rank is to write; the copies before are not needed any more. Collective.

        Args:
            step: for errors.
            todo: names of contents.
            folder: where to write.
            staging: the step's staging folder, to which the entries of the files are relative.
            durable: what is written survives a power cut.

        Returns:
            What writes each content that is this rank's, by name.

        Raises:
            RunError: on every rank, where one could not.
        """
        ...

    def give_up(self, name: str, error: BaseException) -> None:
        """This rank cannot write one of the contents that were copied last: nobody who writes it with this rank waits
        for it. May be called on any thread.
        """
        ...

    def wait_until_copied(self) -> None:
        """Return when the state of which copies were taken last may change: lazy ones go on after `take` has returned,
        and what they fail of is raised by what writes them. Raises WaitTimeout.
        """
        ...
