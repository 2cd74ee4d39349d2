"""Saves of a rank whose backend copies and writes its training state as a whole (`backends.base.WritesItself`), instead
of `state_saver.StateSaver`, which lays the tensors of a state out in shared memory for the node agent to write.

The training thread stands still for the copy; a background thread of each rank writes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from trinity_sync.backends.base import WritesItself
from trinity_sync.checkpoint import CheckpointCoordinator


class Saver(Protocol):
    """What the worker asks of either. All of them are collective."""

    def prepare(self) -> None:
        """After a training step, before the first save."""
        ...

    def save(self, step: int, folder: Path) -> float:
        """Begin to save into the staging folder; seconds in which training stood still so far."""
        ...

    def blocked_s(self, step: int) -> float:
        """Seconds in which training stood still for the save of `step`."""
        ...

    def finish(self) -> None:
        """Wait until the saves are in other hands, or done."""
        ...


class WholeSaver:
    """Saves of one rank.

    Args:
        backend: of the engine.
        coordinator: of this process.
        part: name of the rank's part.
    """

    def __init__(self, backend: WritesItself, coordinator: CheckpointCoordinator, part: str) -> None:
        self._backend = backend
        self._coordinator = coordinator
        self._part = part
        self._blocked: tuple[int, float] = (-1, 0.0)

    def prepare(self) -> None:
        """Nothing: there is no segment to be made."""

    def save(self, step: int, folder: Path) -> float:
        """Begin to save the state after `step` into the staging folder `folder`. Collective.

        Returns:
            Seconds in which training stood still.
        """
        started = time.perf_counter()
        self._coordinator.settle()
        write = self._backend.begin_save(folder / "actor")
        self._coordinator.save_async("full", write, step, part=self._part)
        self._blocked = (step, time.perf_counter() - started)
        return self._blocked[1]

    def blocked_s(self, step: int) -> float:
        """Seconds in which training stood still for the save of `step`, or 0 where that was long ago."""
        return self._blocked[1] if step == self._blocked[0] else 0.0

    def finish(self) -> None:
        """Wait until this rank's saves are done; raises what the newest of them raised."""
        self._coordinator.wait_all()
