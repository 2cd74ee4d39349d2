"""What the monitor has to tell beyond the saves themselves, brought to the run's record while the run goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from trinity_sync.actors.calls import Call
from trinity_sync.actors.monitor import Event, MonitorClient
from trinity_sync.errors import RunError, WaitTimeout

_INTERVAL_S = 1.0
_CALL_S = 10.0


class EventRelay:
    """Fetches the monitor's events (faults, copies to the mirror, what was pruned late) about once a second.

    Args:
        monitor: the checkpoint monitor.
        sink: gets each event: its name and its fields. Called in a thread of the relay's, and in that of `close`.
    """

    def __init__(self, monitor: MonitorClient, sink: Callable[..., None]) -> None:
        self._monitor, self._sink = monitor, sink
        self._asked: Call[list[Event]] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fetch what is there, and stop. What a monitor that does not answer knows is lost."""
        self._closed.set()
        self._thread.join(_CALL_S + _INTERVAL_S)
        if self._asked is not None:
            self._fetch()  # what was asked for earlier, and then what came since
        self._fetch()

    def _run(self) -> None:
        with contextlib.suppress(RunError):  # a disk that refuses the record ends the run elsewhere
            while not self._closed.wait(_INTERVAL_S):
                self._fetch()

    def _fetch(self) -> None:
        self._asked = self._asked or self._monitor.drain_events()
        try:
            events = self._asked.result(_CALL_S)
        except WaitTimeout:
            return  # what it tells in the end is told to nobody else: the same answer is waited for next time
        except RunError:
            self._asked = None
            return  # it is being restarted, or is gone: whoever needs it learns that from a call of its own
        self._asked = None
        for event in events:
            fields = {key: value for key, value in event.items() if key not in ("event", "time", "attempt")}
            self._sink(event["event"], **fields)
