"""What the monitor has to tell that nobody waits for, until somebody asks for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trinity_sync.actors.monitor import Event
from trinity_sync.errors import TrinityError
from trinity_sync.host.logs import log_failure, story
from trinity_sync.host.origin import origin, told

_MOST = 10_000


class EventLog:
    """Keeps events that nobody waits for, oldest first, until they are asked for; of very many the oldest are dropped.

    They are ``mirror``, ``fault``, and ``prune`` of what was deleted late. What became of a step is not among them:
    `wait_committed` answers with it.

    Args:
        attempt: the run's attempt.
        clock: Unix seconds.
    """

    def __init__(self, attempt: int, clock: Callable[[], float]) -> None:
        self._attempt = attempt
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=_MOST)

    def add(self, event: str, **fields: object) -> None:
        """Note that something happened."""
        self._events.append({"event": event, "time": self._clock(), "attempt": self._attempt, **fields})

    def fault(self, where: str, error: object) -> None:
        """Note that something went wrong; it goes to the actor's log, too."""
        more: dict[str, object] = {}
        if isinstance(error, BaseException) and (found := origin(error)) is not None:
            more["traceback"] = found.traceback
        self.add("fault", where=where, error=log_fault(where, error), **more)

    def drain(self) -> list[Event]:
        """Return all since the last call."""
        drained = list(self._events)
        self._events.clear()
        return drained


def log_fault(where: str, error: object) -> str:
    """Write to the actor's log what went wrong, with its traceback where nobody foresaw it; return it as one text."""
    if isinstance(error, BaseException):
        log_failure(where, error)
        return str(error) if isinstance(error, TrinityError | OSError) else told(error)
    story.error("fault in %s: %s", where, error)
    return str(error)
