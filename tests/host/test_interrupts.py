"""Ctrl-C and SIGTERM end a run, whatever the interpreter does at that moment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import until
from trinity_sync.host import interrupts
from trinity_sync.host.child_process import start_child
from trinity_sync.host.interrupts import finishing_steps, interruptible


@dataclass
class Clock:
    """The time that signals are told apart by."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interrupts, "time", clock)
    return clock


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_and_handlers_are_as_before(signum: int) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signum)
    assert signal.getsignal(signum) is before
    interrupts.check()


@pytest.mark.parametrize("first", ["interrupts", "asks for a last save"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_an_interrupted_program_ends_leaves_its_exit_code(signum: int, first: str) -> None:
    saves = "finishing_steps(threading.Event())" if first == "asks for a last save" else "contextlib.nullcontext()"
    program = (
        "import atexit, contextlib, os, signal, sys, threading\n"
        "from trinity_sync.host.interrupts import end_program, finishing_steps, interruptible\n"
        f"atexit.register(os.kill, os.getpid(), {signum})\n"
        "end_program()\n"
        f"with contextlib.suppress(KeyboardInterrupt), interruptible(), interruptible(), {saves}:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "sys.exit(130)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 130


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_sigterm_may_ask_for_a_last_save(signum: int, clock: Clock) -> None:
    stop = threading.Event()
    with interruptible(), finishing_steps(stop):
        signal.raise_signal(signum)
        assert stop.is_set()
        interrupts.check()
        clock.now += 2.5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signum)


def test_signals_that_come_together_are_one(clock: Clock) -> None:
    with interruptible(), finishing_steps(threading.Event()):
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(signum)
            clock.now += 0.9
        interrupts.check()


def test_ctrl_c_right_after_sigterm_waits_for_no_step(clock: Clock) -> None:
    with interruptible(), finishing_steps(threading.Event()):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_sighup_that_is_ignored_is_left_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
            interrupts.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_that_takes_half_of_the_time_is_given_up() -> None:
    began = time.monotonic()
    with interruptible(limit_s=6.0), finishing_steps(threading.Event()):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(60.0)
        assert time.monotonic() - began > 2.5


def test_what_comes_after_a_signal_has_the_time_that_is_left(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_end_at_once", lambda limit_s: None)
    with interruptible(limit_s=30.0):
        assert interrupts.left(600.0, 5.0) == 600.0
        with finishing_steps(threading.Event()):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.left(10.0, 5.0) == 10.0
        clock.now += 20.0
        assert interrupts.left(10.0, 5.0) == pytest.approx(0.5)
        clock.now += 20.0
        assert interrupts.left(10.0) == 0.0
    assert interrupts.left(600.0) == 600.0


@pytest.mark.parametrize(("signal_at", "waited_s"), [(None, 60.0), (7.5, 7.5 + 25.5 - 6.0)])
def test_a_signal_shortens_a_wait_that_has_begun(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, signal_at: float | None, waited_s: float
) -> None:
    def passes(seconds: float) -> bool:
        clock.now += seconds
        if signal_at is not None and clock.now >= began + signal_at and not interrupts.interrupted():
            signal.raise_signal(signal.SIGTERM)
        return False

    monkeypatch.setattr(interrupts, "_end_at_once", lambda limit_s: None)
    began = clock.now
    with interruptible(limit_s=30.0), interrupts.shielded():
        assert not interrupts.wait_until(passes, 60.0, 6.0)
        assert clock.now - began == pytest.approx(waited_s, abs=1.0)
        assert interrupts.wait_until(lambda seconds: True, 0.0)


def test_the_time_goes_on_for_who_is_around_what_was_told_to_end(clock: Clock) -> None:
    with interruptible(limit_s=10.0):
        with interruptible(limit_s=30.0), finishing_steps(threading.Event()):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.left(600.0) <= 30.0
    assert interrupts.left(600.0) == 600.0


def interrupted_run(meanwhile: Callable[[int], object], descriptor: int) -> None:
    with interruptible():
        meanwhile(descriptor)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("closed", [False, True])
def test_a_wakeup_descriptor_of_somebody_else_is_left_alone_and_the_next_run_has_its_time(closed: bool) -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    before = signal.set_wakeup_fd(wake)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_run(os.close if closed else int, wake)
        assert interrupts.left(600.0) == 600.0
    finally:
        after = signal.set_wakeup_fd(before)
    assert after == (-1 if closed else wake)
    with contextlib.suppress(BlockingIOError):
        assert os.read(woken, 1) == b""
    os.close(woken)
    if not closed:
        os.close(wake)


def test_what_fails_while_the_last_step_is_done_fails_of_the_signal() -> None:
    with interruptible():
        with finishing_steps(threading.Event()):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), interrupts.failing_of_it():
            raise ValueError("a program that the reward had started is gone")


_STUCK = """
import ctypes, sys
from trinity_sync.host.interrupts import interruptible, last_words

def hang():
    raise SystemExit

def say(word):
    return last_words(lambda: print(word, flush=True))

with interruptible(limit_s=float(sys.argv[1])):
    with say("first"), last_words(hang), say("last"):
        mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        print("up", flush=True)
        lock(mutex)  # never returns, and no handler runs
"""


def test_a_program_that_hears_no_signal_ends_in_time_and_says_its_last_words() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        until(lambda: "futex" in Path(f"/proc/{process.pid}/wchan").read_text())
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said == "first\nlast\n"
    assert "error: the run did not end within 2 s of the signal" in error
    assert time.monotonic() - began > 1.5


_LEAVES = """
import os, subprocess, sys, time
from multiprocessing.connection import Connection

def serve(descriptor):
    connection = Connection(descriptor)
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    connection.send(program.pid)
    program.wait()
    connection.send(program.returncode)
    connection.recv()
"""


_FORKS = """
import os, signal, sys, time
from trinity_sync.host import interrupts

def fork():
    if child := os.fork():
        return child
    signal.alarm(60)  # the end of a fork that nothing else ends
    time.sleep(90)

def end(child, signum=signal.SIGTERM):
    os.kill(child, signum)
    ended_by.append(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

ended_by = []
if sys.argv[1] == "driver":
    with interrupts.interruptible(), interrupts.interruptible(limit_s=1.0):
        other = fork()
        for _ in range(20):
            end(fork())  # also before the fork has had a turn
        time.sleep(1.0)
else:
    interrupts.leave_to_driver()
    other = fork()
    for _ in range(20):  # of SIGINT, Python itself may lose one that comes so soon
        end(fork(), signal.SIGHUP)
end(other)
print(*ended_by)
"""


@pytest.mark.parametrize(("where", "signals"), [("driver", "15 " * 21), ("reward", "1 " * 20 + "15")])
def test_a_signal_to_a_fork_ends_that_alone_and_a_fork_that_lives_holds_nothing_up(where: str, signals: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, where], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, signals.split())
    assert "stopping" not in done.stderr
    assert time.monotonic() - began < 45


@pytest.mark.parametrize("signum", interrupts.ENDING)
def test_a_child_process_leaves_signals_to_the_driver_and_a_users_program_does_not(
    signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_signals.py").write_text(_LEAVES)
    monkeypatch.syspath_prepend(str(tmp_path))
    child, connection = start_child("leaves_signals", None)
    with contextlib.closing(connection), child:
        child.send_signal(signum)  # while it starts
        program = connection.recv()
        child.send_signal(signum)
        os.kill(program, signum)
        assert connection.recv() == -signum
        child.send_signal(signum)
        assert child.poll() is None
        child.kill()


def test_under_nohup_a_childs_programs_ignore_sighup_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "under_nohup.py").write_text(_IGNORES)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child, connection = start_child("under_nohup", None)
    finally:
        signal.signal(signal.SIGHUP, before)
    with contextlib.closing(connection), child:
        assert int(connection.recv(), 16) & 1 << signal.SIGHUP - 1
        child.kill()


_IGNORES = """
import subprocess
from multiprocessing.connection import Connection

def serve(descriptor):
    said = subprocess.run(["grep", "^SigIgn:", "/proc/self/status"], capture_output=True, text=True).stdout
    Connection(descriptor).send(said.split()[1])
"""


def test_programs_that_are_started_for_a_run_are_not_reached_by_its_signals() -> None:
    with interrupts.left_to_driver():
        program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    for signum in interrupts.ENDING:
        program.send_signal(signum)
    said, _ = program.communicate(b"alive", timeout=60)
    assert (said, program.returncode) == (b"alive", 0)


def test_where_no_step_is_under_way_there_is_nothing_to_save_and_sigterm_interrupts() -> None:
    stop = threading.Event()
    with interruptible():
        with finishing_steps(stop):
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert not stop.is_set()


def test_nothing_is_to_be_saved_where_nobody_asked_for_it() -> None:
    with interruptible(), finishing_steps(None), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_sigterm_may_be_meant_to_save_nothing() -> None:
    stop = threading.Event()
    with interruptible(sigterm_saves=False), finishing_steps(stop), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert not stop.is_set()


@pytest.fixture
def queue() -> Iterator[list[int]]:
    """The signals that came to a handler of SIGUSR2, such as submitit's."""
    told: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: told.append(signum))
    yield told
    signal.signal(signal.SIGUSR2, before)


def test_the_signal_of_a_queue_saves_and_comes_to_its_handler_when_all_is_over(queue: list[int]) -> None:
    stop = threading.Event()
    with interruptible(sigterm_saves=False), finishing_steps(stop):
        signal.raise_signal(signal.SIGUSR2)
        assert stop.is_set()
        assert queue == []
    assert queue == [signal.SIGUSR2]


def test_the_signal_of_a_queue_interrupts_where_there_is_nothing_to_save(queue: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGUSR2)
    assert queue == [signal.SIGUSR2]


def test_a_signal_that_nobody_handles_is_left_alone(queue: list[int]) -> None:
    with interruptible():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_destructor_swallowed_is_raised_again() -> None:
    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with interruptible():
        Swallows()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_elsewhere_than_in_the_main_thread_nothing_changes() -> None:
    def body() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_an_interrupt_is_answered_at_once_and_once(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    with interruptible():
        for clock.now in (100.0, 101.5):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert interrupts.interrupted()
    assert capfd.readouterr().err == "stopping ...\n"
    assert not interrupts.interrupted()


def test_an_interrupt_right_after_another_does_not_meet_the_way_to_the_end() -> None:
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.interrupted()


def test_what_ends_something_is_not_interrupted_and_the_interrupt_is_not_lost() -> None:
    ended = []
    with interruptible():
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
            ended.append(True)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert ended


def test_what_fails_after_an_interrupt_is_an_interrupt() -> None:
    with interruptible():
        with pytest.raises(ValueError, match="before"), interrupts.failing_of_it():
            raise ValueError("before")
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as found, interrupts.failing_of_it():
            raise ValueError("after")
    assert str(found.value.__cause__) == "after"
