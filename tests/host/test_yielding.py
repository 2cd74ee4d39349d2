"""Work that yields: made by a thread of the lowest class, until somebody waits for it or it has yielded long enough."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from trinity_sync.host.threads import BackgroundWork, in_background, piece

LIMIT = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no class that yields")


def made() -> tuple[int, int]:
    """Which thread makes a piece, and its class."""
    return threading.get_ident(), os.sched_getscheduler(0)


def here() -> tuple[int, int]:
    return made()


def test_work_that_yields_is_made_by_one_thread_of_the_lowest_class() -> None:
    with BackgroundWork(LIMIT):
        found = {piece(made) for _ in range(3)}
    ((thread, policy),) = found
    assert thread != here()[0]
    assert policy == os.SCHED_IDLE


def test_other_work_is_made_where_it_is_asked_for() -> None:
    with BackgroundWork(LIMIT):
        other = in_background(lambda: (piece(made), here()), "other").result(LIMIT)
    assert other[0] == other[1]
    assert piece(made) == here()


def test_the_thread_itself_stays_in_its_class() -> None:
    before = here()
    with BackgroundWork(LIMIT):
        piece(made)
    assert here() == before


def test_work_yields_no_more_once_somebody_waits_for_it() -> None:
    with BackgroundWork(LIMIT) as work:
        assert piece(made) != here()
        in_background(work.hurry, "who waits").result(LIMIT)
        assert piece(made) == here()


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="it takes privileges to leave the class")
def test_the_piece_under_way_is_hurried_too() -> None:
    begun, hurried = threading.Event(), threading.Event()

    def long() -> tuple[int, int]:
        before = os.sched_getscheduler(0)
        begun.set()
        assert hurried.wait(LIMIT)
        return before, os.sched_getscheduler(0)

    with BackgroundWork(LIMIT) as work:

        def hurry() -> None:
            assert begun.wait(LIMIT)
            work.hurry()
            hurried.set()

        waiting = in_background(hurry, "who waits")
        assert piece(long) == (os.SCHED_IDLE, os.sched_getscheduler(0))
        waiting.result(LIMIT)


def test_work_does_not_yield_for_ever() -> None:
    with BackgroundWork(0.2) as work:
        assert piece(made) != here()
        threading.Event().wait(max(0.0, work._deadline - time.monotonic()))
        assert piece(made) == here()


@pytest.mark.parametrize("hurried", [False, True])
def test_what_a_piece_raises_comes_where_it_was_asked_for(hurried: bool) -> None:
    def broken() -> None:
        raise OSError(28, "No space left on device")

    with BackgroundWork(LIMIT) as work:
        if hurried:
            work.hurry()
        with pytest.raises(OSError, match="No space left"):
            piece(broken)
        assert piece(lambda: 7) == 7


def test_where_there_can_be_no_more_threads_work_does_not_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with BackgroundWork(LIMIT):
        assert [piece(made), piece(made)] == [here()] * 2


def test_the_thread_that_yields_ends_with_the_work() -> None:
    with BackgroundWork(LIMIT):
        thread = piece(threading.current_thread)
        assert thread.is_alive()
    thread.join(LIMIT)
    assert not thread.is_alive()


_PROGRAM = """
import os, sys, threading, time
from trinity_sync.host.threads import BackgroundWork, piece
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def work():
    until = time.thread_time() + 0.002
    while time.thread_time() < until: pass
with BackgroundWork(3600.0) as yielding:
    print("begun", flush=True)
    threading.Thread(target=lambda: (sys.stdin.readline(), yielding.hurry()), daemon=True).start()
    done = 0
    while not yielding._hurried:
        piece(work)
        done += 1
    for _ in range(100): piece(work)
print(done, flush=True)
"""

_BUSY = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while time.thread_time() < 1: pass
print("had a second", flush=True)
while True: pass
"""


def test_beside_a_process_that_fills_the_processor_it_gets_next_to_nothing_until_it_is_hurried() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE) as other,
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program,
    ):
        try:
            assert other.stdout is not None
            assert program.stdout is not None
            assert program.stdin is not None
            assert program.stdout.readline() == "begun\n"
            assert other.stdout.readline() == b"had a second\n"
            program.stdin.write("\n")
            program.stdin.flush()
            done = int(program.communicate(timeout=LIMIT)[0])
        finally:
            other.kill()
            program.kill()
    if os.sched_getscheduler(0) != os.SCHED_IDLE:  # else both have the same rights
        assert done < 250, "of about 500 with equal rights"
