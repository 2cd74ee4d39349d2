"""Background threads, and background work that yields the processor to training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread of its own, which does not keep the process alive; return the future of its result."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


def comes_true(condition: Callable[[], object], limit_s: float, poll_s: float) -> bool:
    """Look every `poll_s` seconds whether a condition is true, for at most `limit_s`; return whether it is."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(poll_s)
    return True


@contextlib.contextmanager
def deaths_told(tell: Callable[[str, BaseException], object]) -> Iterator[None]:
    """Report exceptions that end a thread of this process within the block; the traceback is logged.

    `tell` gets the thread's name and the exception, in that thread.
    """

    def report(death: threading.ExceptHookArgs) -> None:
        if death.exc_value is None or isinstance(death.exc_value, SystemExit):
            return
        who = f"thread {death.thread.name if death.thread else '?'}"
        logger.error("%s has ended", who, exc_info=death.exc_value)
        with contextlib.suppress(Exception):  # such as a full disk; the death is in the log
            tell(who, death.exc_value)

    before, threading.excepthook = threading.excepthook, report
    try:
        yield
    finally:
        threading.excepthook = before


_Pieces: TypeAlias = "SimpleQueue[tuple[Callable[[], object], Future[object]] | None]"

PATIENCE = 0.25
"""Fraction of the save's timeout during which writing yields to training."""

_here = threading.local()


class BackgroundWork:
    """Lets the `piece` calls of the thread that enters it yield the processor to training.

    Usage::

        with BackgroundWork(patience_s=75.0) as work:     # another thread: work.hurry()
            for data in source: piece(lambda: write(data))

    Args:
        patience_s: after this time it yields no more: on processors that are always full it would not end.
    """

    def __init__(self, patience_s: float) -> None:
        self._deadline = time.monotonic() + patience_s
        self._hurried = False
        self._pieces: _Pieces | None = None
        self._policy: int | None = None
        self._maker: int | None = None

    def hurry(self) -> None:
        """Stop yielding, because another thread waits. From any thread. The current piece gets a better scheduling
        class, if the system permits it.
        """
        self._hurried = True
        maker, policy = self._maker, self._policy
        if maker is not None and policy is not None:
            with suppress(OSError):  # no privileges, or it has ended
                os.sched_setscheduler(maker, policy, os.sched_param(0))

    def __enter__(self) -> BackgroundWork:
        _here.yielding = self
        self._policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
        return self

    def __exit__(self, *error: object) -> None:
        _here.yielding = None
        self._maker = None
        if self._pieces is not None:
            self._pieces.put(None)

    def _make(self, work: Callable[[], object]) -> object:
        if self._hurried or time.monotonic() >= self._deadline:
            return work()
        if self._pieces is None:
            pieces: _Pieces = SimpleQueue()
            try:
                in_background(partial(self._serve, pieces), "yielding")
            except RuntimeError:  # the limit of threads is reached
                self._hurried = True
                return work()
            self._pieces = pieces
        result: Future[object] = Future()
        self._pieces.put((work, result))
        return result.result()

    def _serve(self, pieces: _Pieces) -> None:
        run_when_idle()
        self._maker = threading.get_native_id()
        while (request := pieces.get()) is not None:
            work, result = request
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)


def piece(work: Callable[[], T]) -> T:
    """Make a call that takes milliseconds; it yields if a `BackgroundWork` is entered on this thread."""
    yielding: BackgroundWork | None = getattr(_here, "yielding", None)
    return work() if yielding is None else yielding._make(work)  # type: ignore[return-value]


def run_when_idle() -> None:
    """Run the calling thread, and those that it starts, only while a processor is idle, for good.

    Nothing changes on systems without such a scheduling class.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
