"""Ctrl-C and SIGTERM: how they reach a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_seen = threading.Event()


@contextlib.contextmanager
def interruptible(stop: threading.Event | None) -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does; with `stop` the first SIGTERM only sets it. Signal handlers exist
    in the main thread only; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: Any) -> None:
        if signum == signal.SIGTERM and stop is not None and not stop.is_set():
            stop.set()
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


def check() -> None:
    """Raise the interrupt again where it was lost: Python drops what is raised inside a destructor or a callback of the
    garbage collector. To be called now and then by what runs for long.
    """
    if _seen.is_set():
        raise KeyboardInterrupt
