"""Ctrl-C, SIGTERM, and the signals by which a queue tells that time is up: how they reach a run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from trinity_sync.host.logs import log_failure

_seen = threading.Event()
_stop: threading.Event | None = None
_shields = 0
_TOLD = b"stopping ...\n"
_UNWINDING_S = 1.0
"""So long after an interrupt the next one is only noted: it would meet the way to what is shielded."""


@contextlib.contextmanager
def interruptible(*, sigterm_saves: bool = True) -> Iterator[None]:
    """Let SIGTERM end what runs inside as Ctrl-C does.

    So do SIGUSR1 and SIGUSR2 where somebody handles them, such as submitit for a queue: the handler is called at the
    end, when what runs inside is over and saved. Signal handlers exist in the main thread only; in others nothing
    changes.

    Args:
        sigterm_saves: whether the first SIGTERM lets the step under way end, see `finishing_steps`. The signals of a
            queue always do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    raised = -math.inf

    def interrupt(signum: int, frame: Any) -> None:
        if signum in handled:
            told.append(signum)
        if signum in saving and _stop is not None and not _stop.is_set():
            _stop.set()
            return
        nonlocal raised
        first = not _seen.is_set()
        _seen.set()
        if first:
            with contextlib.suppress(OSError):
                os.write(2, _TOLD)  # from a handler `print` could come into a `print` under way
        if not _shields and time.monotonic() - raised > _UNWINDING_S:
            raised = time.monotonic()
            raise KeyboardInterrupt

    told: list[int] = []
    handled = [signum for signum in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(signum))]
    saving = {*handled, *([signal.SIGTERM] if sigterm_saves else [])}
    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM, *handled)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _seen.clear()
        if told:
            signal.raise_signal(told[0])


@contextlib.contextmanager
def finishing_steps(stop: threading.Event | None) -> Iterator[None]:
    """Let the first SIGTERM inside, or signal of a queue, only set `stop`: the step under way is to be finished and
    saved.

    For the loops, around their steps: before the first one there is nothing to save, and a preempted run has no time
    for it.
    """
    global _stop
    before, _stop = _stop, stop
    try:
        yield
    finally:
        _stop = before


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Let what ends something end it: an interrupt inside is only noted. For ends that take a bounded time."""
    global _shields
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1


@contextlib.contextmanager
def failing_of_it() -> Iterator[None]:
    """What fails after an interrupt fails of it: a library may make another error of a `KeyboardInterrupt`. The error
    is logged, and the interrupt raised again.
    """
    try:
        yield
    except Exception as error:
        if not _seen.is_set():
            raise
        log_failure("what was interrupted", error)
        raise KeyboardInterrupt from error


def interrupted() -> bool:
    """Whether there has been an interrupt since `interruptible` began, so that nobody waits for what is not needed."""
    return _seen.is_set()


def check() -> None:
    """Raise the interrupt again where it was lost: Python drops what is raised inside a destructor or a callback of the
    garbage collector. To be called now and then by what runs for long.
    """
    if _seen.is_set():
        raise KeyboardInterrupt
