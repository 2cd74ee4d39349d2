"""The signals that end a run: Ctrl-C, SIGTERM, SIGHUP, and those by which a queue announces a timeout.

The driver handles them, for the whole run: all other processes of a run leave them to it, so that a signal to all of
them (systemd, Slurm, a closed terminal) has the effect of a signal to the driver. They end by
`host.process.end_with_driver`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Set
from types import FrameType
from typing import TypeAlias

from trinity_sync.host.logs import log_failure
from trinity_sync.host.threads import in_background

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""

_Handler: TypeAlias = Callable[[int, FrameType | None], object]
SignalHandler: TypeAlias = _Handler | int | None

_seen = threading.Event()
_replaced: list[tuple[object, dict[int, SignalHandler]]] = []
"""Our handlers, each with the replaced ones by signal."""
_stop: threading.Event | None = None
_wake: int | None = None
"""The pipe of the innermost block for the numbers of signals. An event loop may have a pipe of its own."""
_shields = 0
_left = 0
_ends = _interrupted = False
_deadline = math.inf
"""The latest end of the run; by `time.monotonic`."""
_last_words: list[Callable[[], object]] = []
_TOLD = b"stopping ...\n"
_END = b"\0"
"""In place of the number of a signal."""
_UNWINDING_S = 1.0
"""During this time after an interrupt the next one is only noted: it would disturb the unwinding to shielded blocks."""
SAME_S = 2.0
"""A signal within this time after the first is the same one: systemd sends SIGHUP after SIGTERM, and a sweep forwards
to its jobs the signals that the queue sends them, too.
"""
REST_S = 6.0
"""Seconds of the time after a signal that are reserved for the end of the actors, the record and Ray."""
_WORDS_S = 2.0
_PYTHON_ENDS_S = 10.0
_SLICE_S = 1.0
_FOR_STEP, _FOR_ALL = 0.5, 0.85
"""Shares of the limit: for the current step; for everything except the last words."""


def ending_signals() -> list[signal.Signals]:
    """Return those of `ENDING` that end this run: an ignored SIGHUP (nohup) does not."""
    return [signum for signum in ENDING if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]


def end_program() -> None:
    """Note that this program ends with its outermost `interruptible` block. Once it was interrupted, further signals
    are ignored then: they would kill Python while it ends, and another exit code would be seen. Python ends within
    `_PYTHON_ENDS_S`.
    """
    global _ends
    _ends = True


@contextlib.contextmanager
def interruptible(*, sigterm_saves: bool = True, limit_s: float = 30.0) -> Iterator[None]:
    """Let SIGTERM, and SIGHUP where it is not ignored (nohup), end the block as Ctrl-C does.

    So do SIGUSR1 and SIGUSR2 where another handler exists, such as submitit's for a queue: that handler is called at
    the end, when the block is over and saved. Signal handlers exist in the main thread only; in others nothing changes.
    `limit_s`: timeout from the first signal to the end of the program, whatever it waits for, seconds. Half of it is
    for the current step. It does not apply to a queue's signals: its SIGTERM follows.
    """
    if threading.current_thread() is not (main := threading.main_thread()):
        yield
        return

    first, raised, ends = math.inf, -math.inf, _ends and not _replaced

    def interrupt(signum: int, frame: FrameType | None) -> None:
        global _interrupted
        nonlocal first, raised
        _interrupted = True
        if signum in handled:
            received.append(signum)
        else:
            _count_down(limit_s)
        first = min(first, time.monotonic())
        if signum in saving and _stop is not None and (not _stop.is_set() or time.monotonic() < first + SAME_S):
            _stop.set()
            return
        unheard = not _seen.is_set()
        _seen.set()
        if unheard:
            with contextlib.suppress(OSError):
                os.write(2, _TOLD)  # not `print`, which the handler may have interrupted
        if not _shields and time.monotonic() - raised > _UNWINDING_S:
            raised = time.monotonic()
            raise KeyboardInterrupt

    def give_step_up() -> None:
        nonlocal first
        first = -math.inf
        if _stop is not None and _stop.is_set():
            signal.pthread_kill(main.ident or 0, signal.SIGTERM)  # as if it came again

    received: list[int] = []
    handled = [signum for signum in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(signum))]
    ending = ending_signals()
    saving = {*handled, *(set(ending) - {signal.SIGINT} if sigterm_saves else ())}
    try:
        with (
            handling((*ending, *handled), interrupt, last=lambda: ends and _interrupted),
            _ended_in_time(frozenset(ending), limit_s, give_step_up),
        ):
            yield
    finally:
        _seen.clear()
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def handling(
    signums: Collection[int], handler: _Handler, *, last: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Handle signals so within the block, but not in forks of this process. `last`: whether they are ignored then."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    _replaced.append((handler, before))
    try:
        yield
    finally:
        _replaced.pop()
        ignored = ENDING if last() else ()
        if ignored:
            timer = threading.Timer(_PYTHON_ENDS_S, os._exit, [130])
            timer.daemon = True
            timer.start()
        for signum, replaced in before.items():
            signal.signal(signum, signal.SIG_IGN if signum in ignored else replaced)


@contextlib.contextmanager
def _ended_in_time(ending: Set[int], limit_s: float, give_step_up: Callable[[], None]) -> Iterator[None]:
    """Enforce the limit within the block, on a thread of its own: the main one may hang in a call that handles no
    signal.
    """
    global _deadline, _wake
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    others = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    outer, _wake = _wake, wake
    thread = threading.Thread(target=_watch, args=(woken, ending, limit_s, give_step_up), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        try:
            signal.set_wakeup_fd(others)
        except (OSError, ValueError):  # it was closed meanwhile
            signal.set_wakeup_fd(-1)
        _wake = outer
        if thread.is_alive():  # not in a fork, whose pipe is its parent's
            os.write(wake, _END)  # closing would not end the pipe while a fork lives
            thread.join()
        os.close(wake)
        os.close(woken)
        if outer is None:
            _deadline = math.inf
        elif _deadline < math.inf:
            os.write(outer, bytes([signal.SIGTERM]))  # the outer block ends, too


def _watch(woken: int, ending: Set[int], limit_s: float, give_step_up: Callable[[], None]) -> None:
    """Read the numbers of signals from a file descriptor (see `signal.set_wakeup_fd`), until `_END`."""
    heard, step_ends = False, math.inf
    while True:
        until = min(step_ends, _deadline) - time.monotonic()
        if select.select([woken], [], [], None if math.isinf(until) else max(0.0, until))[0]:
            numbers = os.read(woken, 64)
            if not heard and not ending.isdisjoint(numbers):
                heard, step_ends = True, time.monotonic() + limit_s * _FOR_STEP
                _count_down(limit_s)
            if _END in numbers:
                return
        elif time.monotonic() >= _deadline:
            _end_at_once(limit_s)
        else:
            step_ends = math.inf
            give_step_up()


def _count_down(limit_s: float) -> None:
    global _deadline
    _deadline = min(_deadline, time.monotonic() + limit_s * _FOR_ALL)


def _end_at_once(limit_s: float) -> None:
    for say in _last_words:
        with contextlib.suppress(Exception):
            in_background(say, "last words").exception(_WORDS_S)
    with contextlib.suppress(OSError):
        os.write(2, b"error: the run did not end within %d s of the signal; it ends\n" % round(limit_s * _FOR_ALL))
    os._exit(130)


@contextlib.contextmanager
def last_words(say: Callable[[], object]) -> Iterator[None]:
    """Call `say` before the program ends by timeout within the block, on another thread, with a limit of two seconds.

    Outer blocks come first.
    """
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def left(most_s: float, reserve_s: float = 0.0) -> float:
    """Return the time that something may take: `most_s`, or less after a signal, without `reserve_s` seconds for later
    work.
    """
    return max(0.0, min(most_s, _deadline - time.monotonic() - reserve_s))


def wait_until(ended: Callable[[float], object], most_s: float, reserve_s: float = 0.0) -> bool:
    """Wait as long as `left` allows, even if the signal comes meanwhile; return whether it has ended.

    `ended` waits so many seconds, and returns whether it has ended.
    """
    until = time.monotonic() + most_s
    while not ended(slice_s := left(min(_SLICE_S, until - time.monotonic()), reserve_s)):
        if slice_s == 0.0:
            return False
    return True


@contextlib.contextmanager
def left_to_driver() -> Iterator[None]:
    """Block `ENDING` in processes that are started in the block, and in theirs: the driver ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_driver() -> None:
    """Only count `ENDING` in this process.

    Its forks and the programs that it starts end by them as usual: a signal is neither blocked nor ignored, which they
    would inherit, unless it was ignored before (nohup).
    """
    _replaced.append((_count, before := {}))
    for signum in ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:
            before[signum] = signal.signal(signum, _count)
            signal.siginterrupt(signum, False)  # native libraries may not handle an interrupted call
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _count(signum: int, frame: FrameType | None) -> None:
    global _left
    _left += 1


def signals_left() -> int:
    """Return the number of signals that this process has left to the driver. A process that ended meanwhile may have
    ended by one.
    """
    return _left


def call_in_forks(forget: Callable[[], object]) -> None:
    """Call `forget` in every fork of this process, before the first signal reaches the fork: its parent may end it at
    once.
    """
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, signal.SIGUSR1, signal.SIGUSR2))

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def begin() -> None:
        try:
            forget()
        finally:
            release()

    os.register_at_fork(before=block, after_in_parent=release, after_in_child=begin)


def _forget() -> None:
    """Restore a fork's signals: the run and the pipe are its parent's."""
    global _seen, _stop, _wake, _deadline
    for ours, before in reversed(_replaced):
        for signum, handler in before.items():
            if signal.getsignal(signum) is ours:
                signal.signal(signum, handler)
    if _wake is not None and (another := signal.set_wakeup_fd(-1)) != _wake:
        signal.set_wakeup_fd(another)
    _seen, _stop, _wake, _deadline = threading.Event(), None, None, math.inf


call_in_forks(_forget)


@contextlib.contextmanager
def finishing_steps(stop: threading.Event | None) -> Iterator[None]:
    """Let the first SIGTERM inside, or signal of a queue, only set `stop`: the current step is finished and saved.

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
    """Only note an interrupt inside, so that a clean-up of bounded time can finish."""
    global _shields
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1


@contextlib.contextmanager
def failing_of_it() -> Iterator[None]:
    """Raise an interrupt in place of an error that follows it: a library may turn a `KeyboardInterrupt` into another
    error. The error is logged.
    """
    try:
        yield
    except Exception as error:
        if not _seen.is_set() and _deadline == math.inf:
            raise
        log_failure("what was interrupted", error)
        raise KeyboardInterrupt from error


def interrupted() -> bool:
    """Return whether there was an interrupt since `interruptible` began, so that no further wait is needed."""
    return _seen.is_set()


def check() -> None:
    """Raise the interrupt again if it was lost: Python drops exceptions of a destructor or a callback of the garbage
    collector.

    Long-running work calls it from time to time.
    """
    if _seen.is_set():
        raise KeyboardInterrupt
