"""The end of a verl program: its last saves are finished in the order in which they wait for each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from trinity_sync.integrations.verl import at_exit, local_run

PROGRAM = """
import threading
from trinity_sync.integrations.verl import at_exit

class Manager:
    def __init__(self, name, other=None):
        self.name, self.other, self.settled = name, other, threading.Event()

    def settle_at_exit(self):
        print(self.name, "settles", flush=True)
        self.settled.set()

    def finish(self, limit_s):
        worked = threading.Thread(target=lambda: None)  # which Python 3.12 refuses in atexit
        worked.start()
        worked.join()
        assert self.other is None or self.other.settled.wait(10)
        print(self.name, "ends", flush=True)
        {failure}

critic = Manager("critic")
at_exit.finish_at_exit(Manager("actor", critic))
at_exit.finish_at_exit(critic)
import atexit
atexit.register(at_exit.end_as_failed)
print("main ends", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_all_are_settled_before_one_is_waited_for(end: str) -> None:
    done = run("pass", end)
    assert done.stdout.split("\n")[:-1] == [
        "main ends",
        "actor settles",
        "critic settles",
        "actor ends",
        "critic ends",
    ]
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_is_told_and_is_the_exit_code_and_the_others_are_finished() -> None:
    done = run("raise RuntimeError('planted') if self.name == 'actor' else None", "")
    assert done.returncode == 1
    assert "trinity-sync: a checkpoint was lost at the end of the program: planted" in done.stderr
    assert "critic ends" in done.stdout


def run(failure: str, end: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(failure=failure, end=end)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


SIGNALLED = """
import ctypes, os, signal, subprocess, sys, threading, time
from trinity_sync.integrations.verl import at_exit

class Manager:
    calls = 0

    def settle_at_exit(self):
        pass

    def finish(self, limit_s):
        if limit_s is None:
            self.finish_at_exit()
        else:
            self.finish_at_signal()

    def finish_at_exit(self):
        print("finishes at exit", flush=True)

    def finish_at_signal(self):
        Manager.calls += 1
        print("finishes", Manager.calls, flush=True)
        sys.stdin.readline()
        print("committed", flush=True)

def in_a_collective_call():
    mutex = ctypes.create_string_buffer(64)  # which no signal interrupts
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def heed():
    at_exit.finish_at_exit(Manager())

def ready():
    print("ready", os.getpid(), flush=True)
"""
"""A program whose save is committed when it reads a line."""


class Signalled:
    """Such a program."""

    def __init__(self, source: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SIGNALLED + textwrap.dedent(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self, expected: str) -> str:
        assert self.process.stdout is not None
        read = b""
        while not read.endswith(b"\n") and (byte := os.read(self.process.stdout.fileno(), 1)):
            read += byte  # no more than the line: `communicate` does not see what Python has read ahead
        line = read.decode().strip()
        assert line.startswith(expected), line or self.process.communicate()[1]
        return line

    def sends(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def commits(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.says("committed")

    def ends(self) -> int:
        """Return the exit code."""
        self.rest = self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def start() -> Iterator[Callable[[str], Signalled]]:
    started: list[Signalled] = []

    def start(source: str) -> Signalled:
        started.append(Signalled(source))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdin, one.process.stdout, one.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("main", ["in_a_collective_call()", "time.sleep(60)"])
def test_a_signal_ends_the_program_when_its_save_is_committed(
    start: Callable[[str], Signalled], number: signal.Signals, main: str
) -> None:
    program = start(f"heed(); ready(); {main}")
    program.says("ready")
    program.sends(number)
    program.says("finishes 1")
    program.commits()
    assert program.ends() == -number


def test_the_same_signal_twice_is_one(start: Callable[[str], Signalled]) -> None:
    """torchrun passes on what a queue has sent to all processes."""
    program = start("heed(); ready(); time.sleep(60)")
    program.says("ready")
    program.sends(signal.SIGTERM)
    program.says("finishes 1")
    program.sends(signal.SIGTERM)
    program.sends(signal.SIGHUP)
    program.commits()
    assert (program.ends(), program.rest[0]) == (-signal.SIGTERM, "")


def test_a_save_that_is_not_committed_in_time_is_told_and_the_program_ends(start: Callable[[str], Signalled]) -> None:
    slow = "Manager.finish_at_signal = lambda self: time.sleep(60)"
    program = start(f"at_exit.SIGNAL_S = at_exit._SILENT_S = 0.2; {slow}; heed(); ready(); in_a_collective_call()")
    program.says("ready")
    program.sends(signal.SIGTERM)
    assert program.ends() == -signal.SIGTERM
    assert "SIGTERM: a checkpoint was lost: it was not committed within 0.2 s" in program.rest[1]


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "lambda number, frame: sys.exit(3)"])
@pytest.mark.parametrize("output", ["closed", "full"])
@pytest.mark.few(1)
def test_an_output_that_takes_nothing_keeps_no_program_from_its_end(
    start: Callable[[str], Signalled], output: str, handler: str
) -> None:
    """As of a terminal that is closed, which is what SIGHUP tells."""
    full = "os.set_blocking(2, False)\ntry:\n    while True: os.write(2, bytes(65536))\nexcept BlockingIOError: pass"
    program = start(
        f"at_exit._SILENT_S = 0.2\n{full if output == 'full' else ''}\nos.set_blocking(2, True)\n"
        f"signal.signal(signal.SIGHUP, {handler}); heed(); ready()\nwhile True: time.sleep(0.1)"
    )
    program.says("ready")
    if output == "closed":
        assert program.process.stderr is not None
        program.process.stderr.close()
    program.sends(signal.SIGHUP)
    program.says("finishes 1")
    time.sleep(0.5)  # something is said meanwhile
    program.commits()
    assert program.process.wait(60.0) == (-signal.SIGHUP if handler == "signal.SIG_DFL" else 3)


def test_a_save_that_fails_after_a_signal_is_told_and_changes_no_exit_code(start: Callable[[str], Signalled]) -> None:
    program = start("Manager.finish_at_signal = lambda self: 1 / 0; heed(); ready(); time.sleep(60)")
    program.says("ready")
    program.sends(signal.SIGTERM)
    assert program.ends() == -signal.SIGTERM
    assert "a checkpoint was lost at the end of the program: division by zero" in program.rest[1]


def test_the_handler_of_before_is_called_once_when_the_save_is_committed(start: Callable[[str], Signalled]) -> None:
    program = start("""
        def before(number, frame):
            print("before", number, flush=True)
            sys.exit(3)

        signal.signal(signal.SIGTERM, before)
        heed()
        ready()
        time.sleep(60)
    """)
    program.says("ready")
    program.sends(signal.SIGTERM)
    program.says("finishes 1")
    program.commits()
    assert (program.ends(), program.rest[0]) == (3, "before 15\nfinishes at exit\n")


@pytest.mark.parametrize("slow", [True, False])
def test_a_save_while_the_program_unwinds_after_a_signal_is_finished_in_time(
    start: Callable[[str], Signalled], slow: bool
) -> None:
    program = start(f"""
        at_exit.SIGNAL_S = 0.3 if {slow} else 60
        Manager.finish_at_signal = lambda self: None
        if {slow}:
            Manager.finish_at_exit = lambda self: time.sleep(60)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
        heed()
        ready()
        try:
            while True:
                time.sleep(0.1)
        finally:
            print("saves", flush=True)
    """)
    program.says("ready")
    program.sends(signal.SIGTERM)
    program.says("saves")
    assert program.ends() == 3
    assert program.rest[0] == ("" if slow else "finishes at exit\n")
    assert ("after a signal: a checkpoint was lost: it was not committed within 0.3 s" in program.rest[1]) == slow


def test_a_signal_ends_a_program_that_can_start_no_thread(start: Callable[[str], Signalled]) -> None:
    program = start("""
        def refused(thread):
            raise RuntimeError("can't start new thread")

        heed()
        threading.Thread.start = refused
        ready()
        time.sleep(60)
    """)
    program.says("ready")
    program.sends(signal.SIGTERM)
    assert program.ends() == -signal.SIGTERM


@pytest.mark.parametrize(("limit_s", "waited"), [(None, (local_run.COMMIT_S, 30.0)), (3.0, (3.0,))])
def test_the_saves_of_workers_have_the_time_of_a_commit_at_a_normal_end(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, waited: tuple[float, ...]
) -> None:
    """The files of the trainer, which has ended then, have less."""
    limits: list[tuple[float, ...]] = []
    monkeypatch.setattr(local_run, "finish_saves_of_workers", lambda *given: limits.append(given))
    at_exit.SavesOfWorkers().finish(limit_s)
    assert limits == [waited]


def test_a_handler_that_is_not_of_python_ends_the_program(start: Callable[[str], Signalled]) -> None:
    """As that of Ray in its drivers, though Python believes that its own is there."""
    program = start("""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGTERM, ctypes.cast(libc.abort, ctypes.c_void_p))
        heed()
        ready()
        in_a_collective_call()
    """)
    program.says("ready")
    program.sends(signal.SIGTERM)
    program.says("finishes 1")
    program.commits()
    assert program.ends() == -signal.SIGABRT


def test_a_handler_that_goes_on_gets_the_next_signal_after_the_next_save(start: Callable[[str], Signalled]) -> None:
    program = start("""
        signal.signal(signal.SIGTERM, lambda number, frame: print("before", flush=True))
        heed()
        ready()
        while True:
            time.sleep(0.1)  # a signal right before a sleep is heard of after it
    """)
    program.says("ready")
    for count in (1, 2):
        program.sends(signal.SIGTERM)
        program.says(f"finishes {count}")
        program.commits()
        program.says("before")


def test_a_handler_that_runs_late_is_not_called_for_a_signal_of_its_own(start: Callable[[str], Signalled]) -> None:
    """The main thread leaves its call when the saves are finished, and hears then only of the signal."""
    program = start("""
        libc, mutex, select = ctypes.CDLL(None), ctypes.create_string_buffer(64), at_exit.select.select

        def leaves_its_call(*descriptors):
            found = select(*descriptors)
            libc.pthread_mutex_unlock(mutex)
            time.sleep(0.3)
            return found

        at_exit.select.select = leaves_its_call
        signal.signal(signal.SIGTERM, lambda number, frame: print("before", flush=True))
        heed()
        libc.pthread_mutex_lock(mutex)
        ready()
        libc.pthread_mutex_lock(mutex)
        time.sleep(1.0)
        os._exit(0)
    """)
    program.says("ready")
    time.sleep(0.3)  # it is in the call
    program.sends(signal.SIGTERM)
    program.says("finishes 1")
    program.commits()
    assert (program.ends(), program.rest[0]) == (0, "before\n")


@pytest.mark.parametrize("chain", [True, False])
def test_a_handler_that_the_program_sets_later_decides(start: Callable[[str], Signalled], chain: bool) -> None:
    program = start(f"""
        heed()

        def later(number, frame):
            print("later", flush=True)
            if {chain}:
                ours(number, frame)
            else:
                sys.exit(4)

        ours = signal.signal(signal.SIGTERM, later)
        ready()
        time.sleep(60)
    """)
    program.says("ready")
    program.sends(signal.SIGTERM)
    program.says("later")
    if chain:
        program.says("finishes 1")
        program.commits()
    assert program.ends() == (-signal.SIGTERM if chain else 4)


def test_a_signal_that_is_ignored_stays_ignored(start: Callable[[str], Signalled]) -> None:
    """As under nohup."""
    program = start("signal.signal(signal.SIGHUP, signal.SIG_IGN); heed(); ready(); sys.stdin.readline()")
    program.says("ready")
    program.sends(signal.SIGHUP)
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    assert (program.ends(), program.rest) == (0, ("finishes at exit\n", ""))


def test_a_main_thread_that_fails_after_the_signal_ends_by_the_signal(start: Callable[[str], Signalled]) -> None:
    """Its peers are gone, so its collective call fails."""
    program = start("""
        heed()
        ready()
        while not Manager.calls:
            time.sleep(0.01)
        raise RuntimeError("a peer is gone")
    """)
    program.says("ready")
    program.sends(signal.SIGTERM)
    program.says("finishes 1")
    time.sleep(0.5)  # the main thread ends meanwhile
    program.commits()
    assert program.ends() == -signal.SIGTERM


def test_a_fork_ends_at_once_and_its_parent_does_not(start: Callable[[str], Signalled]) -> None:
    program = start("""
        heed()
        child = os.fork()
        if not child:
            ready()
            time.sleep(60)
        print("ended by", -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), Manager.calls, flush=True)
        os._exit(0)
    """)
    child = int(program.says("ready").split()[1])
    os.kill(child, signal.SIGTERM)
    program.says("ended by 15 0")
    assert program.ends() == 0


def test_a_signal_to_a_fork_that_has_just_begun_is_not_its_parents(start: Callable[[str], Signalled]) -> None:
    program = start("""
        heed()
        ready()
        for _ in range(100):
            if not (child := os.fork()):
                time.sleep(5)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        print("ended", Manager.calls, flush=True)
        os._exit(0)
    """)
    program.says("ready")
    program.says("ended 0")
    assert program.ends() == 0


@pytest.mark.parametrize("foreign", [True, False])
def test_a_fork_keeps_the_wakeup_descriptor_of_somebody_else_and_no_other(
    start: Callable[[str], Signalled], foreign: bool
) -> None:
    program = start(f"""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        heed()
        if {foreign}:
            signal.set_wakeup_fd(writing)
        child = os.fork()
        if not child:
            print("has", {{writing: "theirs", -1: "none"}}.get(signal.set_wakeup_fd(-1), "ours"), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        os._exit(0)
    """)
    program.says("has theirs" if foreign else "has none")
    assert program.ends() == 0


def test_a_process_outside_the_main_thread_keeps_its_signals(start: Callable[[str], Signalled]) -> None:
    program = start("thread = threading.Thread(target=heed); thread.start(); thread.join(); ready(); time.sleep(60)")
    program.says("ready")
    program.sends(signal.SIGTERM)
    assert (program.ends(), program.rest[0]) == (-signal.SIGTERM, "")


def test_the_waker_of_an_event_loop_stays(start: Callable[[str], Signalled]) -> None:
    program = start("""
        import asyncio

        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: print("usr1", flush=True))
            heed()
            ready()
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    program.says("ready")
    program.sends(signal.SIGUSR1)
    program.says("usr1")
    program.sends(signal.SIGTERM)
    program.says("finishes 1")
    program.commits()
    assert program.ends() == -signal.SIGTERM
