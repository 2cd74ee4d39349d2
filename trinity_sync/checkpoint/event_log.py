"""What the monitor has to tell: the run's events as they come, until somebody asks for them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from trinity_sync.actors.monitor import Event

_MOST = 10_000


class EventLog:
    """Events ``commit``, ``prune``, ``mirror`` and ``fault``, oldest first; of very many the oldest are forgotten.

    Args:
        attempt: the run's attempt.
        clock: Unix seconds.
    """

    def __init__(self, attempt: int, clock: Callable[[], float]) -> None:
        self._attempt = attempt
        self._clock = clock
        self._events: deque[tuple[Event, bool]] = deque(maxlen=_MOST)

    def add(self, event: str, *, told: bool = False, **fields: object) -> None:
        """Note that something happened. `told`: whoever waits for the step's commit learns of it anyway."""
        line: Event = {"event": event, "time": self._clock(), "attempt": self._attempt, **fields}
        self._events.append((line, told))

    def fault(self, where: str, error: object, *, told: bool = False) -> None:
        """Note that something went wrong; it goes to the actor's log, too."""
        text = str(error) or type(error).__name__
        print(f"fault: {where}: {text}", file=sys.stderr)
        self.add("fault", told=told, where=where, error=text)

    def drain(self, *, untold: bool) -> list[Event]:
        """Return all since the last call; with `untold` without those that are told anyway."""
        drained = [event for event, told in self._events if not (told and untold)]
        self._events.clear()
        return drained
