"""What the monitor has to tell beyond the saves themselves, brought to the run's record while the run goes on."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

from trinity_sync.actors.monitor import Event, MonitorClient
from trinity_sync.actors.pending import Pending
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.interrupts import REST_S, interrupted, left

_INTERVAL_S = 1.0
_CALL_S = 10.0


class EventRelay:
    """Fetches the monitor's events (faults, copies to the mirror, what was pruned late) about once a second.

    Args:
        monitor: the checkpoint monitor.
        sink: gets each event: its name and its fields. Called in a thread of the relay's, and in that of `close`.
            What it knows nothing of (ValueError) it gets as a fault; what the disk refuses (RunError) it gets again.
    """

    def __init__(self, monitor: MonitorClient, sink: Callable[..., None]) -> None:
        self._monitor, self._sink = monitor, sink
        self._asked: Pending[list[Event]] | None = None
        self._fetched: deque[Event] = deque()
        self._answered = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fetch what is there, and stop. What a monitor that does not answer knows is lost."""
        self._closed.set()
        if interrupted() and not self._answered:
            return  # it is still starting: there is nothing to tell yet
        self._thread.join(left(_CALL_S + _INTERVAL_S, REST_S))
        if self._asked is not None:
            self._fetch()  # what was asked for earlier, and then what came since
        self._fetch()
        for event in self._fetched:
            print(f"not recorded: {event}", file=sys.stderr)

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self._fetch()

    def _fetch(self) -> None:
        try:
            self._asked = self._asked or self._monitor.drain_events()
            self._fetched += self._asked.result(left(_CALL_S, REST_S))
            self._asked = None
            self._answered = True
        except WaitTimeout:
            pass  # what it tells in the end is told to nobody else: the same answer is waited for next time
        except RunError:
            self._asked = None  # it is being restarted, or is gone: whoever needs it learns that from a call of its own
        while self._fetched:
            try:
                self._tell(self._fetched[0])
            except RunError:
                return  # a disk that stays full ends the run elsewhere
            self._fetched.popleft()

    def _tell(self, event: Event) -> None:
        fields = {key: value for key, value in event.items() if key not in ("event", "time", "attempt")}
        try:
            self._sink(event["event"], **fields)
        except (KeyError, TypeError, ValueError) as error:
            self._sink("fault", where="an event of the checkpoint monitor", error=f"{error}: {event}")
