"""The end of a verl program: the newest saves are finished first, and a lost checkpoint makes the exit code 1.

SIGTERM and SIGHUP end a program at once. Here they wait for the save under way, while the trainer goes on, as it may be
in a collective call of that save. Then the program's own handler ends it.
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
"""Timeout, after a signal, for saves under way to be committed, seconds. Slurm and torchrun kill after 30 s."""

_SILENT_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_BY_HANDLER = 128
"""Added to a signal's number in the pipe by our handler; the interpreter writes the number alone."""


class Saves(ABC):
    """An owner of saves or of work that follows commits, such as a checkpoint manager."""

    def settle_at_exit(self) -> None:  # noqa: B027 (not all have something to tell)
        """Report what other processes wait for, when the main thread has ended. Does not wait for them."""

    @abstractmethod
    def finish(self, limit_s: float | None) -> None:
        """Wait until all saves are complete or have failed. `limit_s`: after a signal: timeout in seconds for the saves
        under way; called on a thread of its own while the trainer goes on. None: at the end of the program, after
        `settle_at_exit` of all owners.
        """


# Strong references: the trainer may be gone before its last save is finished.
_managers: list[Saves] = []
_failed = False
_process: int

_libc = ctypes.CDLL(None)
_SIGACTION_BYTES = 256  # more than any libc needs
_before: dict[int, tuple[Any, bytes]] = {}
"""The replaced handlers: Python's, and the kernel's action, which may be one that Python does not know, such as Ray's.
"""
_pipe: tuple[int, int] | None = None
_due: dict[int, bool] = {}
"""Signals that came; True when the saves are finished, so that the earlier handler may run."""
_no_signal, _ended = threading.Event(), threading.Event()
_no_signal.set()

_TRAINER_S = 30.0
"""Limit at the driver's end for the trainer's own files of a step whose other parts are in, seconds: after an error in
a save they never come.
"""


class SavesOfWorkers(Saves):
    """The saves of a program under Ray, for its driver: Ray kills the workers when the driver ends."""

    def finish(self, limit_s: float | None) -> None:
        """Wait until the saves under way are committed; errors as for `local_run.finish_saves_of_workers`."""
        from trinity_sync.integrations.verl.local_run import COMMIT_S, finish_saves_of_workers  # loads torch

        if limit_s is None:  # the trainer has ended as well, or ends now
            finish_saves_of_workers(COMMIT_S, _TRAINER_S)
        else:
            finish_saves_of_workers(limit_s)


def finish_at_exit(manager: Saves) -> None:
    """Delay the end of the process until all saves of this owner are complete or have failed; also after a signal."""
    global _process
    if not _managers:
        # Not `atexit`: from Python 3.12 on, its handlers cannot start threads. The interpreter waits for this thread
        # first.
        threading.Thread(target=_finish_after_main, name="saves-at-exit", daemon=False).start()
    _process = os.getpid()
    _managers.append(manager)
    _heed_signals()


def end_as_failed() -> None:
    """Set the exit code to 1 if a save failed at the end. Called by the exit handler that runs last."""
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
    """Finish all saves; return whether none failed."""
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
    """Let SIGTERM and SIGHUP wait for the saves under way, once in a process. Only in the main thread, where Python
    sets handlers, and not for an ignored signal.

    The earlier handler is called afterwards. A handler that the program sets later replaces ours and may call it.
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
    # The interpreter writes to it at once; our handler has to wait until the main thread leaves a collective call.
    another = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if another != -1:  # of an event loop in the main thread
        signal.set_wakeup_fd(another)
    call_in_forks(_forget_signals)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _due.get(number):
        del _due[number]
        try:
            _before[number][0](number, frame)
        except BaseException:  # SystemExit, for instance, ends the program
            _ended.set()
            raise
    elif number not in _due and _pipe is not None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of signals, and one is enough
            os.write(_pipe[1], bytes([number + _BY_HANDLER]))


def _watch(reading: int) -> None:
    first = True
    while read := os.read(reading, 1):
        number = read[0] % _BY_HANDLER
        # A handler that replaced ours decides, and may call ours, which also writes to the pipe. After the first
        # signal, the interpreter also writes when we send one.
        if number in _before and (read[0] > _BY_HANDLER or (first and signal.getsignal(number) is _on_signal)):
            first, process = False, os.getpid()
            _no_signal.clear()
            _due[number] = False
            with contextlib.suppress(Exception):  # for instance, no thread can be started: the signal matters more
                finish = [partial(_aloud, partial(one.finish, SIGNAL_S)) for one in _managers]
                _within_limit(signal.Signals(number).name, finish)
            # `signal.signal` works in the main thread only, and the kernel's action may still be Python's, and so ours.
            _libc.sigaction(number, _before[number][1], None)
            while select.select([reading], [], [], 0)[0]:  # the same signal again
                os.read(reading, 1)
            # The main thread may see the first signal only now. It does not run between these two lines.
            _due[number] = True
            os.kill(process, number)
            _no_signal.set()


def _action(number: int) -> bytes:
    """Return the C library's ``struct sigaction``."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _libc.sigaction(number, None, action)
    return action.raw


def _within_limit(why: str, finish: Sequence[Callable[[], object]]) -> None:
    """Finish the saves concurrently, within `SIGNAL_S`. Output to a full pipe delays nothing."""
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
        message = threading.Thread(target=say, args=[text], daemon=True)
        message.start()
        message.join(_SILENT_S)


def _forget_signals() -> None:
    """Restore the earlier handlers in a fork, which saves nothing. The pipe belongs to the parent."""
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
