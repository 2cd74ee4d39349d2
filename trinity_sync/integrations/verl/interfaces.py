"""What `saves.CommittedSaves` is given: what opens the run's monitor, and what copies the state of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.integrations.verl.local_run import RunMonitor


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


class SaveCopies(Protocol):
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


# What a save of verl's consists of: its contents by name, who writes each, to which file, and as which part.


MODEL, METADATA, OPTIMIZER, EXTRA, EXPORT = "model", "metadata", "optim", "extra_state", "hf_model"
STATE = "state"
"""All that the ranks of a Megatron engine write together, but for the model where it is saved already."""
DESCRIPTION = "description"
"""Beside the weights of a Megatron engine: the metadata of a save of the weights alone."""
WEIGHTS = (MODEL, METADATA, DESCRIPTION)
OF_FIRST_RANK = (METADATA, EXPORT, DESCRIPTION)


def writers(name: str, world_size: int) -> range:
    """The ranks that write this content."""
    return range(1 if name in OF_FIRST_RANK else world_size)


def part(name: str, rank: int) -> str:
    """The name of the part that this content of a rank is."""
    return name if name in OF_FIRST_RANK else f"{name}-rank-{rank:05d}"


def file(name: str, world_size: int, rank: int) -> str:
    """The name of the file in which verl keeps this content of a rank."""
    return f"{name}_world_size_{world_size}_rank_{rank}.pt"


def announcement(role: str) -> str:
    """A part without files: that the parts of this role are known. A full checkpoint waits for that of each role."""
    return f"{role}/announced"
