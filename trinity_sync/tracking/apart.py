"""A tracker in a process of its own: what its library starts, prints, sets for the whole process or waits for at its
end is not felt by the run, and whatever stands still there can be ended. `Trackers` puts those here that ask for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.child_process import Channel, start_child
from trinity_sync.host.origin import shortened
from trinity_sync.tracking.record import Status
from trinity_sync.tracking.trackers import TrackedRun, Tracker, tell_end

_START_S = 60.0
"""For Python to start and take the tracker; `Trackers` bounds the rest."""
_LAST_S = 10.0
"""For a process to end after its last answer, and for a tracker to be closed when the run's process has died."""

_Requests = SimpleQueue[tuple[str, tuple[object, ...]] | None]


class Apart:
    """Hands the calls of a tracker to a process of its own, and waits for each: `Trackers` bounds that.

    Args:
        tracker: not started yet; it is pickled.
        name: of its log, ``logs/tracker-<name>.log``.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker, self._name = tracker, name
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._log: Path | None = None

    def start(self, run: TrackedRun) -> None:
        """Start the process, and the tracker in it; errors as the tracker's own."""
        self._log = run.folder / "logs" / f"tracker-{self._name}.log"
        self._child, self._channel = start_child(__name__, self._log)
        try:
            self._ask("start", self._tracker, run)
        except BaseException:
            self.abandon()
            raise

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._ask("log", step, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """See `Tracker`."""
        if hasattr(self._tracker, "samples"):
            self._ask("samples", step, rows)

    def end(self, status: Status) -> None:
        """See `tell_end`."""
        self._ask("end", status)

    def close(self) -> None:
        """Close the tracker, and end the process."""
        try:
            self._ask("close")
            assert self._child is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_LAST_S)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the process, whatever it does; any thread."""
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a dead network disk may hold it for ever
                self._child.wait(_LAST_S)

    def _ask(self, method: str, *arguments: object) -> None:
        assert self._channel is not None, "`start` comes first"
        assert self._child is not None
        try:
            self._channel.send((method, arguments), _START_S if method == "start" else None)
            kind, text = self._channel.recv()
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_LAST_S)
            status = self._child.returncode
            what = f"does not answer ({error})" if status is None else f"has ended ({status})"
            raise RunError(f"its process {what}; see {self._log}") from None
        if kind == "refused":
            raise ConfigError(text)
        if kind == "failed":
            raise RunError(text)


# ---- the child


def serve(descriptor: int) -> None:
    """Run as the child: do what the parent asks for, one call after another, and end with it.

    Args:
        descriptor: file descriptor of the connection to the parent.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    process = os.getpid()
    requests: _Requests = SimpleQueue()
    threading.Thread(target=_listen, args=[connection, requests], daemon=True).start()
    tracker: Tracker | None = None
    while (request := requests.get()) is not None:
        method, arguments = request
        try:
            if method == "start":
                tracker, *arguments = arguments  # type: ignore[assignment]
            if method == "end":
                tell_end(tracker, *arguments)  # type: ignore[arg-type]
            else:
                getattr(tracker, method)(*arguments)
            answer = ("done", "")
        except Exception as error:
            kind = "refused" if isinstance(error, ConfigError) else "failed"
            answer = (kind, shortened(str(error)) or type(error).__name__)
        if os.getpid() != process:  # the tracker has forked, and this process was not asked
            os._exit(0)
        with contextlib.suppress(OSError):  # where the parent is gone `_listen` finds out
            connection.send(answer)
        if method == "close":
            os._exit(0)  # libraries leave threads and connections behind, for which nobody has to wait
    if tracker is not None:  # the run's process has died
        with contextlib.suppress(Exception):
            tell_end(tracker, "failed")
        with contextlib.suppress(Exception):
            tracker.close()
    os._exit(1)


def _listen(connection: Connection, requests: _Requests) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        pass
    except Exception:  # as of a class that cannot be imported here
        traceback.print_exc()
    requests.put(None)
    time.sleep(_LAST_S)
    os._exit(1)
