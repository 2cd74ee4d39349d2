"""Ctrl-C and SIGTERM: how they reach a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_seen = threading.Event()
_stop: threading.Event | None = None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end what runs inside as Ctrl-C does.

    Signal handlers exist in the main thread only; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: Any) -> None:
        if signum == signal.SIGTERM and _stop is not None and not _stop.is_set():
            _stop.set()
            return
        _seen.set()
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _seen.clear()


@contextlib.contextmanager
def finishing_steps(stop: threading.Event | None) -> Iterator[None]:
    """Let the first SIGTERM inside only set `stop`: the step under way is to be finished and saved.

    For the loops, around their steps: before the first one there is nothing to save, and a preempted run has no time
    for it.
    """
    global _stop
    before, _stop = _stop, stop
    try:
        yield
    finally:
        _stop = before


def check() -> None:
    """Raise the interrupt again where it was lost: Python drops what is raised inside a destructor or a callback of the
    garbage collector. To be called now and then by what runs for long.
    """
    if _seen.is_set():
        raise KeyboardInterrupt
