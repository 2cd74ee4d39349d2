"""The end of a verl program, which waits for nothing: what was saved last is finished first, and a failure is one.

SIGTERM and SIGHUP end such a program at once. Here they first wait for the save under way, while the trainer goes on:
it may be inside a collective call of that save. The program then ends as it would have ended without us.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from trinity_sync.host.interrupts import call_in_forks
from trinity_sync.integrations.verl.vendor import say

SIGNAL_S = 20.0
"""After a signal, saves under way have so long to be committed, seconds. Slurm and torchrun kill after 30 s."""

_SILENT_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_BY_HANDLER = 128
"""Added to the number of a signal in the pipe: our handler has written it, and not the interpreter."""


class Saves(ABC):
    """What has saves of a program: a checkpoint manager, or what follows their commits."""

    def settle_at_exit(self) -> None:  # noqa: B027 (not all have something to tell)
        """Tell what others wait for, when the main thread has ended. Does not wait for them."""

    @abstractmethod
    def finish(self, limit_s: float | None) -> None:
        """Return when all saves are complete, or have failed.

        Args:
            limit_s: after a signal, seconds: those under way, on a thread of its own, while the trainer goes on. None:
                at the end, after `settle_at_exit` of all.
        """


# Not weak: the trainer may be gone before the program's end, and what it saved last is still to be finished.
_managers: list[Saves] = []
_failed = False
_process: int

_libc = ctypes.CDLL(None)
_SIGACTION_BYTES = 256  # more than any libc's
_before: dict[int, tuple[Any, bytes]] = {}
"""What ours stand in for: the handler as Python knows it, and what the kernel calls, of which Python may not know: Ray
has a handler of its own.
"""
_pipe: tuple[int, int] | None = None
_due: dict[int, bool] = {}
"""Signals that came: whether the saves are finished, so that the handler of before is called."""
_no_signal, _ended = threading.Event(), threading.Event()
_no_signal.set()


class SavesOfWorkers(Saves):
    """The saves of a program under Ray, for its driver: at the driver's end Ray kills the workers at once."""

    def finish(self, limit_s: float | None) -> None:
        """Return when the saves under way are committed; errors as for `local_run.finish_saves_of_workers`."""
        from trinity_sync.integrations.verl.local_run import COMMIT_S, finish_saves_of_workers  # loads torch

        finish_saves_of_workers(COMMIT_S if limit_s is None else limit_s)


def finish_at_exit(manager: Saves) -> None:
    """Have the process end only when all saves of this manager are complete, or have failed; see `_heed_signals`."""
    global _process
    if not _managers:
        # Not `atexit`: from Python 3.12 on no thread can be started in what that calls. The interpreter waits for this
        # one before it calls anything.
        threading.Thread(target=_finish_after_main, name="saves-at-exit", daemon=False).start()
    _process = os.getpid()
    _managers.append(manager)
    _heed_signals()


def end_as_failed() -> None:
    """Give the process the exit code 1 if a save failed at its end. To be called by the handler that runs last."""
    if _failed and os.getpid() == _process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _finish_after_main() -> None:
    global _failed
    threading.main_thread().join()
    _no_signal.wait(2 * SIGNAL_S)
    if _ended.is_set():
        _within_limit("after a signal", [_finish])
    else:
        _failed = not _finish()


def _finish() -> bool:
    """Finish all saves; return whether none has failed."""
    done = [_aloud(manager.settle_at_exit) for manager in list(_managers)]
    return all([*done, *[_aloud(partial(manager.finish, None)) for manager in list(_managers)]])


def _aloud(do: Callable[[], None]) -> bool:
    try:
        do()
    except Exception as error:
        say(f"a checkpoint was lost at the end of the program: {error}")
        return False
    return True


# ---- signals


def _heed_signals() -> None:
    """Have SIGTERM and SIGHUP wait for the saves under way, once in a process. Nothing changes outside the main thread,
    where Python sets no handlers, and for a signal that is ignored.

    The handler that was there before is called afterwards. A handler that the program sets later replaces ours: it
    decides, and may call ours.
    """
    global _pipe
    if _pipe is not None or threading.current_thread() is not threading.main_thread():
        return
    _pipe = reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True).start()
    for number in _SIGNALS:
        action = _action(number)
        if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None):
            _before[number] = before, action
            signal.signal(number, _on_signal)
    # The interpreter writes to it at once. Our handler has to wait until the main thread leaves a collective call.
    another = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if another != -1:  # of an event loop, in which the main thread waits for signals
        signal.set_wakeup_fd(another)
    call_in_forks(_forget_signals)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _due.get(number):
        del _due[number]
        try:
            _before[number][0](number, frame)
        except BaseException:  # such as SystemExit: it ends the program
            _ended.set()
            raise
    elif number not in _due and _pipe is not None:
        with contextlib.suppress(BlockingIOError):  # full of signals, of which the first is enough
            os.write(_pipe[1], bytes([number + _BY_HANDLER]))


def _watch(reading: int) -> None:
    first = True
    while read := os.read(reading, 1):
        number = read[0] % _BY_HANDLER
        # A handler that replaced ours decides. Where it calls ours, that writes to the pipe, too. After the first
        # signal, the interpreter also writes when we send one.
        if number in _before and (read[0] > _BY_HANDLER or (first and signal.getsignal(number) is _on_signal)):
            first, process = False, os.getpid()
            _no_signal.clear()
            _due[number] = False
            with contextlib.suppress(Exception):  # such as that no thread can be started: the signal matters more
                finish = [partial(_aloud, partial(one.finish, SIGNAL_S)) for one in _managers]
                _within_limit(signal.Signals(number).name, finish)
            # `signal.signal` is for the main thread only. What the kernel calls now may still be Python's, and so ours.
            _libc.sigaction(number, _before[number][1], None)
            while select.select([reading], [], [], 0)[0]:  # what came meanwhile is the same signal
                os.read(reading, 1)
            # The main thread may hear of the first signal only now. It gets no turn between these two.
            _due[number] = True
            os.kill(process, number)
            _no_signal.set()


def _action(number: int) -> bytes:
    """Return the C library's ``struct sigaction``."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _libc.sigaction(number, None, action)
    return action.raw


def _within_limit(why: str, finish: Sequence[Callable[[], object]]) -> None:
    """Finish the saves side by side, within `SIGNAL_S`. A full pipe of the output delays nothing."""
    until = time.monotonic() + SIGNAL_S
    ends = [threading.Thread(target=one, daemon=True) for one in finish]
    text = f"{why}: the program ends when its checkpoint is committed, at most {SIGNAL_S:g} s from now"
    telling = threading.Timer(_SILENT_S, say, [text])
    telling.daemon = True
    for thread in (telling, *ends):
        thread.start()
    for end in ends:
        end.join(max(0.0, until - time.monotonic()))
    telling.cancel()
    if any(end.is_alive() for end in ends):
        text = f"{why}: a checkpoint was lost: it was not committed within {SIGNAL_S:g} s"
        lost = threading.Thread(target=say, args=[text], daemon=True)
        lost.start()
        lost.join(_SILENT_S)


def _forget_signals() -> None:
    """A fork saves nothing: signals mean to it what they meant before. The pipe is its parent's."""
    global _pipe
    if _pipe is None:
        return
    another = signal.set_wakeup_fd(-1)
    if another not in (-1, _pipe[1]):
        signal.set_wakeup_fd(another)
    for number, (before, action) in _before.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
            _libc.sigaction(number, action, None)
    for descriptor in _pipe:
        os.close(descriptor)
    _pipe = None
