"""Saves of a rank whose backend copies and writes its training state as a whole (`backends.base.WritesItself`), instead
of `state_saver.StateSaver`, which lays the tensors of a state out in shared memory for the node agent to write.

The training thread stands still while the save is planned and, at the optimizer's next step, for what is left of the
copy; a background thread of each rank writes. With ``checkpoint.snapshot=eager``, or where the engine's storage may
change at any time, the training thread waits for the whole copy.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from trinity_sync.backends.base import WritesItself
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.weights.copying import Copying


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
        lazy: copy during the next forward and backward where the engine allows it.
        timeout_s: limit of the wait for a copy, seconds.
    """

    def __init__(
        self, backend: WritesItself, coordinator: CheckpointCoordinator, part: str, *, lazy: bool, timeout_s: float
    ) -> None:
        self._backend = backend
        self._coordinator = coordinator
        self._part = part
        self._lazy = lazy and backend.deadline == "optimizer_step"
        self._timeout_s = timeout_s
        self._copying: Copying | None = None
        self._step = -1
        self._blocked_s = 0.0
        if self._lazy:
            backend.before_change(self._hold)

    def prepare(self) -> None:
        """Nothing: there is no segment to be made."""

    def save(self, step: int, folder: Path) -> float:
        """Begin to save the state after `step` into the staging folder `folder`. Collective.

        Returns:
            Seconds in which training stood still so far; see `blocked_s`.
        """
        started = time.perf_counter()
        self._hold()
        self._coordinator.settle()
        self._copying, write = self._backend.begin_save(folder / "actor", lazily=self._lazy)
        self._coordinator.save_async("full", write, step, part=self._part)
        self._step, self._blocked_s = step, time.perf_counter() - started
        return self._blocked_s

    def blocked_s(self, step: int) -> float:
        """Seconds in which training stood still for the save of `step`, or 0 where that was long ago."""
        return self._blocked_s if step == self._step else 0.0

    def finish(self) -> None:
        """Wait until this rank's saves are done; raises what the newest of them raised."""
        self._coordinator.wait_all()

    def _hold(self) -> None:
        """Called on the training thread before the state changes."""
        if self._copying is not None:
            self._blocked_s += self._copying.hold_until_copied(self._timeout_s)
            self._copying = None
