"""The steps that the book of commits knows, and when it forgets one. Used by `trinity_sync.protocol.commit`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from trinity_sync.protocol.parts import Kind
from trinity_sync.protocol.step import Step
from trinity_sync.protocol.turns import TurnQueue

#: How many settled steps are remembered, so that late and doubled reports of them are recognised.
_REMEMBERED = 256


class StepTable:
    """Steps by number: all that are open, and of the others the latest.

    Args:
        clock: returns seconds.
        turns: the writers' turns; a step that has one is open.
        committed: told a step, what this attempt has committed of it.
    """

    def __init__(self, clock: Callable[[], float], turns: TurnQueue, committed: Callable[[int], Kind | None]) -> None:
        self._clock = clock
        self._turns = turns
        self._committed = committed
        self._steps: dict[int, Step] = {}
        self._settled: deque[int] = deque()

    def __getitem__(self, step: int) -> Step:
        return self._steps[step]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(list(self._steps.values()))

    def get(self, step: int) -> Step | None:
        """Return what is known of the step; None: nothing, or nothing any more."""
        return self._steps.get(step)

    def is_open(self, entry: Step) -> bool:
        """Return whether something of the step is being saved or committed now."""
        if entry.committing is not None:
            return True
        if entry.failed is not None:
            return False
        return (entry.parts.any and not entry.settled) or bool(self._turns.of_step(entry.step))

    def touch(self, step: int) -> Step:
        """Return the step, of which something was heard just now; it begins where it is not known."""
        now = self._clock()
        entry = self._steps.get(step)
        if entry is None:
            entry = self._steps[step] = Step(step, now, now, committed=self._committed(step))
        entry.touched = now
        return entry

    def announce(self, step: int) -> Step:
        """Return the step as `touch` does, without what is known of an earlier checkpoint of it that was deleted."""
        entry = self.touch(step)
        if not entry.deleted or entry.failed is not None or self.is_open(entry):
            return entry
        del self._steps[step]
        with suppress(ValueError):
            self._settled.remove(step)
        return self.touch(step)

    def put(self, entry: Step) -> None:
        """Take up a step of an earlier life."""
        self._steps[entry.step] = entry

    def note_settled(self, entry: Step) -> None:
        """Remember the step as the latest where it is settled by now, or has failed, and forget the oldest."""
        if self.is_open(entry) or not (entry.parts.any or entry.failed) or entry.step in self._settled:
            return
        self._settled.append(entry.step)
        if len(self._settled) > _REMEMBERED:
            oldest = self._settled.popleft()
            if not self._turns.of_step(oldest) and not self.is_open(self._steps[oldest]):
                del self._steps[oldest]
