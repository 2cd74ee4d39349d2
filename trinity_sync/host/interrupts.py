"""The signals that end a run: Ctrl-C, SIGTERM, SIGHUP, and those by which a queue says that time is up.

The driver answers them, for the whole run: all other processes of a run leave them to it, so that a signal to all of
them (systemd, Slurm, a closed terminal) means what a signal to the driver means. What they end with is
`host.lifeline`.
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
from typing import Any

from trinity_sync.host.logs import log_failure
from trinity_sync.host.threads import in_background

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They end a run."""

_seen = threading.Event()
_replaced: list[tuple[object, dict[int, Any]]] = []
"""Our handlers, and for each of them those that it replaced, by signal."""
_stop: threading.Event | None = None
_wake: int | None = None
"""The pipe of the innermost block, which gets the numbers of signals. An event loop may have a pipe of its own."""
_shields = 0
_left = 0
_deadline = math.inf
"""When the run has to have ended; by `time.monotonic`."""
_last_words: list[Callable[[], object]] = []
_TOLD = b"stopping ...\n"
_END = b"\0"
"""In place of the number of a signal."""
_UNWINDING_S = 1.0
"""So long after an interrupt the next one is only noted: it would meet the way to what is shielded."""
SAME_S = 2.0
"""A signal so soon after the first is the same one: systemd sends SIGHUP after SIGTERM, and a sweep tells its jobs what
the queue has told them, too.
"""
REST_S = 6.0
"""Of the time after a signal, what is for the end of the actors, the record and Ray."""
_WORDS_S = 2.0
_SLICE_S = 1.0
_FOR_STEP, _FOR_ALL = 0.5, 0.85
"""Shares of the limit: for the step under way; for everything, but the last words."""


def ending_signals() -> list[signal.Signals]:
    """Return those of `ENDING` that end this run: a SIGHUP that is ignored (nohup) does not."""
    return [signum for signum in ENDING if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]


@contextlib.contextmanager
def interruptible(*, sigterm_saves: bool = True, limit_s: float = 30.0) -> Iterator[None]:
    """Let SIGTERM, and SIGHUP where it is not ignored (nohup), end what runs inside as Ctrl-C does.

    So do SIGUSR1 and SIGUSR2 where somebody handles them, such as submitit for a queue: the handler is called at the
    end, when what runs inside is over and saved. Signal handlers exist in the main thread only; in others nothing
    changes.

    Args:
        sigterm_saves: whether the first SIGTERM lets the step under way end, see `finishing_steps`. The signals of a
            queue always do.
        limit_s: from the first signal until the program has ended, whatever it waits for, seconds. Half of it is for
            the step under way. Signals of a queue are another matter: its SIGTERM follows.
    """
    if threading.current_thread() is not (main := threading.main_thread()):
        yield
        return

    first, raised = math.inf, -math.inf

    def interrupt(signum: int, frame: Any) -> None:
        nonlocal first, raised
        if signum in handled:
            told.append(signum)
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
                os.write(2, _TOLD)  # from a handler `print` could come into a `print` under way
        if not _shields and time.monotonic() - raised > _UNWINDING_S:
            raised = time.monotonic()
            raise KeyboardInterrupt

    def give_step_up() -> None:
        nonlocal first
        first = -math.inf
        if _stop is not None and _stop.is_set():
            signal.pthread_kill(main.ident or 0, signal.SIGTERM)  # as if it came again

    told: list[int] = []
    handled = [signum for signum in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(signum))]
    ending = ending_signals()
    saving = {*handled, *(set(ending) - {signal.SIGINT} if sigterm_saves else ())}
    try:
        with handling((*ending, *handled), interrupt), _ended_in_time(frozenset(ending), limit_s, give_step_up):
            yield
    finally:
        _seen.clear()
        if told:
            signal.raise_signal(told[0])


@contextlib.contextmanager
def handling(signums: Collection[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Have signals handled so within the block, but not in forks of this process."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    _replaced.append((handler, before))
    try:
        yield
    finally:
        _replaced.pop()
        for signum, replaced in before.items():
            signal.signal(signum, replaced)


@contextlib.contextmanager
def _ended_in_time(ending: Set[int], limit_s: float, give_step_up: Callable[[], None]) -> Iterator[None]:
    """Within the block, see to the limit on a thread of its own: the main one may stand in a call that never returns,
    and handles no signal then.
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
        except (OSError, ValueError):  # it has been closed meanwhile
            signal.set_wakeup_fd(-1)
        _wake = outer
        if thread.is_alive():  # not in a fork, whose pipe is its parent's
            os.write(wake, _END)  # the pipe's own end would not come while a fork lives
            thread.join()
        os.close(wake)
        os.close(woken)
        if outer is None:
            _deadline = math.inf
        elif _deadline < math.inf:
            os.write(outer, bytes([signal.SIGTERM]))  # who is around this ends, too


def _watch(woken: int, ending: Set[int], limit_s: float, give_step_up: Callable[[], None]) -> None:
    """Read the numbers of signals, until `_END`.

    Args:
        woken: file descriptor, see `signal.set_wakeup_fd`.
    """
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
    """Within the block, have something done before the program ends because time is up; those of outer blocks first.

    Args:
        say: called on another thread; has two seconds.
    """
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def left(most_s: float, reserve_s: float = 0.0) -> float:
    """Return how long something may take: `most_s`, or less where a signal has come.

    Args:
        reserve_s: for what comes after it, seconds.
    """
    return max(0.0, min(most_s, _deadline - time.monotonic() - reserve_s))


def wait_until(ended: Callable[[float], object], most_s: float, reserve_s: float = 0.0) -> bool:
    """Wait as long as `left` says, also where the signal comes meanwhile; return whether it has ended.

    Args:
        ended: waits so many seconds, and tells whether it has ended.
    """
    until = time.monotonic() + most_s
    while not ended(slice_s := left(min(_SLICE_S, until - time.monotonic()), reserve_s)):
        if slice_s == 0.0:
            return False
    return True


@contextlib.contextmanager
def left_to_driver() -> Iterator[None]:
    """Processes that are started in the block are not reached by `ENDING`, nor are theirs: the driver ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_driver() -> None:
    """Have `ENDING` do nothing in this process but count. Its forks and the programs that it starts are ended by them,
    as usual: a signal is neither blocked nor ignored, which they would inherit, unless it was ignored before (nohup).
    """
    _replaced.append((_count, before := {}))
    for signum in ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:
            before[signum] = signal.signal(signum, _count)
            signal.siginterrupt(signum, False)  # native libraries may not expect it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _count(signum: int, frame: Any) -> None:
    global _left
    _left += 1


def signals_left() -> int:
    """Return how many signals this process has left to the driver. What ends meanwhile may have ended by one."""
    return _left


def call_in_forks(forget: Callable[[], object]) -> None:
    """Call `forget` in every fork of this process, before the first signal reaches the fork: its parent may end it as
    soon as it is there.
    """
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, signal.SIGUSR1, signal.SIGUSR2))

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def begin() -> None:
        try:
            forget()
        finally:
            release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin)


def _forget() -> None:
    """Give a fork the signals as they were before: the run is its parent's, and so is the pipe."""
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
        if not _seen.is_set() and _deadline == math.inf:
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
