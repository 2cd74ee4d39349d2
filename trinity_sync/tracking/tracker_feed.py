"""Runs the trackers of a run in the background, each in a thread or a process of its own.

A tracker that cannot start stops the run before it begins. Later errors are reported once, as a fault, and the end of
the run waits for a tracker until its timeout.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from trinity_sync.errors import ConfigError, RunError, TrinityError
from trinity_sync.host.child_process import Child, start_child
from trinity_sync.host.interrupts import wait_until
from trinity_sync.host.origin import shortened
from trinity_sync.host.threads import in_background
from trinity_sync.tracking.run_record import Status
from trinity_sync.tracking.trackers import Names, TrackedRun, Tracker, call_end, named

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Timeout of a tracker's start and of its end, unless it has one."""
_PENDING = 10_000
"""The most pending calls of a tracker; further ones are dropped."""
_REST_S = 8.0
"""The part of the time after a signal that the end of the record and of Ray needs."""
_LATE_S = 1.0
"""Timeout of the end of a tracker that was late before."""

_What = Literal["metrics", "samples"]
_Kind = Literal["fails", "late", "full", "end", "samples"]


class Trackers:
    """All trackers of a run. After the start only `close` waits, and nothing is raised. Raises ConfigError if a tracker
    cannot start; the others are closed again. Unless they are `required`, the run goes on without it, and a fault says
    so.
    """

    def __init__(self, trackers: Iterable[Tracker], run: TrackedRun, *, required: bool = True) -> None:
        self._on_fault: Callable[[str, str], object] = lambda where, error: logger.warning("%s: %s", where, error)
        self._feeds = [_Feed(tracker, run, self._report_fault) for tracker in trackers]
        self._missed: list[tuple[str, str]] = []
        try:
            for feed in list(self._feeds):
                try:
                    feed.wait_started()
                except ConfigError as error:
                    if required:
                        raise
                    self._feeds.remove(feed)
                    feed.end("failed")
                    feed.wait_ended(time.monotonic())
                    self._missed.append((f"tracker {feed.name}", f"{error}; the run goes on without it"))
        except BaseException:
            self.close("failed")
            raise

    def report_faults(self, report: Callable[[str, str], object]) -> None:
        """Report faults to `report`, from any thread, until `close` returns; without it they are logged."""
        self._on_fault = report
        for where, error in self._missed:
            self._report_fault(where, error)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Hand the finite numbers among `values` to every tracker."""
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for feed in self._feeds:
            feed.give(partial(feed.tracker.log, step, named(feed.names, step, numbers)))

    def event(self, event: Mapping[str, object]) -> None:
        """Hand one line of events.jsonl to the trackers that take events. Any thread."""
        for feed in self._feeds:
            feed.give_optional("event", event)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Hand the samples of one step to the trackers that take samples."""
        for feed in self._feeds:
            feed.give_optional("samples", step, rows, what="samples")

    def close(self, status: Status) -> None:
        """Let every tracker take its pending calls, and close it; closing twice is fine."""
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.end(status)
        began = time.monotonic()
        for feed in feeds:
            feed.wait_ended(began)
        self._on_fault = lambda where, error: None  # the run's record has ended

    def _report_fault(self, where: str, error: str) -> None:
        with contextlib.suppress(TrinityError):  # the next write reports a full disk
            self._on_fault(where, error)


class _Feed:
    """One tracker, on a thread of its own."""

    def __init__(self, tracker: Tracker, run: TrackedRun, report: Callable[[str, str], object]) -> None:
        self.name = _name(tracker)
        self.names: Names = getattr(tracker, "names", "ours")
        self.tracker: Tracker = TrackerChild(tracker, self.name) if getattr(tracker, "apart", False) else tracker
        self._limit_s = float(getattr(tracker, "timeout_s", LIMIT_S))
        self._report = report
        self._reported: set[_Kind] = set()
        self._calls: SimpleQueue[tuple[_What, Callable[[], object]] | None] = SimpleQueue()
        self._since: float | None = None
        self._started: Future[None] = Future()
        self._ended = in_background(partial(self._serve, run), f"tracker {self.name}")

    def wait_started(self) -> None:
        """Wait for the start; raises ConfigError if it fails, or misses its timeout."""
        if not wait([self._started], self._limit_s).done:
            raise ConfigError(f"tracker {self.name} did not start within {self._limit_s:g} s")
        error = self._started.exception()
        if error is None or isinstance(error, ConfigError):
            return self._started.result()
        raise ConfigError(f"tracker {self.name} cannot start: {error or type(error).__name__}") from error

    def give(self, call: Callable[[], object], what: _What = "metrics") -> None:
        """Queue a call."""
        if self._is_late():
            self._report_fault(
                "late", f"has not answered for {self._limit_s:g} s; the run goes on, and it gets the rest later"
            )
        if self._calls.qsize() < _PENDING:
            self._calls.put((what, call))
        else:
            self._report_fault("full", f"is {_PENDING} calls behind and misses the next ones; metrics.jsonl has them")

    def give_optional(self, method: str, *arguments: object, what: _What = "metrics") -> None:
        """Queue a call of a method that the tracker may lack."""
        call = getattr(self.tracker, method, None)
        if callable(call):
            self.give(partial(call, *arguments), what)

    def end(self, status: Status) -> None:
        """Queue the end and the close."""
        self._calls.put(("metrics", partial(call_end, self.tracker, status)))
        self._calls.put(("metrics", self.tracker.close))
        self._calls.put(None)

    def wait_ended(self, began: float) -> None:
        """Wait until it is closed, until the limit since `began`, and then abandon it."""
        started = self._started.done()
        limit = 0.0 if not started else min(_LATE_S, self._limit_s) if self._is_late() else self._limit_s
        rest = began + limit - time.monotonic()
        if wait_until(lambda seconds: wait([self._ended], seconds).done, rest, _REST_S):
            return
        if started:
            count = max(self._calls.qsize() - 3, 0)
            behind = f", {count} calls behind" if count else ""
            waited = round(time.monotonic() - began, 1)
            self._report_fault(
                "end", f"was not done {waited:g} s after the end of the run{behind}; metrics.jsonl has all"
            )
            self._reported.add("fails")  # its calls fail once it is abandoned
        abandon = getattr(self.tracker, "abandon", None)
        if abandon is not None:
            abandon()

    def _serve(self, run: TrackedRun) -> None:
        try:
            self.tracker.start(run)
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while (taken := self._calls.get()) is not None:
            what, call = taken
            self._since = time.monotonic()
            try:
                call()
            except BaseException as error:  # also SystemExit of a library: it ends this thread only
                text = str(error) or type(error).__name__
                kind: _Kind = "samples" if what == "samples" else "fails"
                self._report_fault(kind, f"does not take the {what}, the run goes on without: {text}")
            finally:
                self._since = None

    def _is_late(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > self._limit_s

    def _report_fault(self, kind: _Kind, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(f"tracker {self.name}", text)


def _name(tracker: Tracker) -> str:
    """Return the tracker's name in the config: ``wandb`` for a `WandbTracker`."""
    name = type(tracker).__name__
    return name.removesuffix("Tracker").lower() if name.endswith("Tracker") else name


# A tracker in a process of its own: what its library starts, prints, sets for the whole process or waits for at its
# end is not felt by the run, and whatever stands still there can be ended. `Trackers` puts those here that ask for
# it.


_START_S = 60.0
"""For Python to start and take the tracker; `Trackers` bounds the rest."""
_LAST_S = 10.0
"""For a process to end after its last answer, and for a tracker to be closed when the run's process has died."""

_Requests = SimpleQueue[tuple[str, tuple[object, ...]] | None]


class TrackerChild:
    """Hands the calls of a tracker to a process of its own, and waits for each: `Trackers` bounds that. `tracker`: not
    started yet; it is pickled. `name`: of its log, ``logs/tracker-<name>.log``.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker, self._name = tracker, name
        self._child: Child | None = None
        self._log: Path | None = None

    def start(self, run: TrackedRun) -> None:
        """Start the process, and the tracker in it; errors as the tracker's own."""
        self._log = run.folder / "logs" / f"tracker-{self._name}.log"
        self._child = start_child(__name__, self._log)
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
        """See `call_end`."""
        self._ask("end", status)

    def close(self) -> None:
        """Close the tracker, and end the process."""
        try:
            self._ask("close")
            if self._child is not None:
                self._child.status(_LAST_S)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the process, whatever it does; any thread."""
        if self._child is not None:
            self._child.end()

    def _ask(self, method: str, *arguments: object) -> None:
        assert self._child is not None, "`start` comes first"
        try:
            self._child.pipe.send((method, arguments), _START_S if method == "start" else None)
            kind, text = self._child.pipe.recv()
        except (EOFError, OSError) as error:
            status = self._child.status(_LAST_S)
            what = f"does not answer ({error})" if status is None else f"has ended ({status})"
            raise RunError(f"its process {what}; see {self._log}") from None
        if kind == "refused":
            raise ConfigError(text)
        if kind == "failed":
            raise RunError(text)


# ---- the child


def serve(descriptor: int) -> None:
    """Run as the child: do what the parent asks for, one call after another, and end with it."""
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
                call_end(tracker, *arguments)  # type: ignore[arg-type]
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
            os._exit(0)  # without waiting for threads and connections that libraries leave behind
    if tracker is not None:  # the run's process has died
        with contextlib.suppress(Exception):
            call_end(tracker, "failed")
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
