"""A supervisor starts its driver again where that has died, and in no other case. The drivers are small programs."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from trinity_sync.host import supervisor

LIMIT_S = 30
DRIVER = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})
from supervisor import NOTES, Note, Notes
notes = Notes(int(os.environ[NOTES]))

def say(text):
    os.write(1, (text + chr(10)).encode())

def begun(most=3):
    notes.append(Note(run="run.json", arguments=["more"], most=most, restarts=[], story=[]))

def die(signum=signal.SIGKILL):
    os.kill(os.getpid(), signum)

def hear(*signums):
    for signum in signums:
        signal.signal(signum, lambda number, frame: say(f"heard {{number}}"))

def wait():
    say("waits")
    end = time.monotonic() + {LIMIT_S}
    while time.monotonic() < end and not os.path.exists("go"):
        time.sleep(0.01)

say(" ".join(["driver", *sys.argv[1:]]))
"""


class Supervised:
    """A supervisor of such drivers: the first one, and that which goes on."""

    def __init__(self, first: str, again: str) -> None:
        python = [sys.executable, "-S", "-c"]
        command, more = [*python, DRIVER + first, "first"], [*python, DRIVER + again, "again"]
        self.line = [sys.executable, "-IS", str(supervisor.__file__), str(len(command)), *command, *more]

    def start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.line, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def run(self) -> tuple[int, str, str]:
        with self.start() as process:
            out, said = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, said


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not printed")


def driver_of(process: subprocess.Popen[str]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


def is_true(wanted: Callable[[], bool]) -> bool:
    ends = time.monotonic() + LIMIT_S
    while not wanted() and time.monotonic() < ends:
        time.sleep(0.01)
    return wanted()


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("die()", "the driver was killed by signal 9"),
        ("die(signal.SIGABRT)", "the driver was killed by signal 6"),
        ("os._exit(1)", "the driver ended with exit code 1"),  # as Ray ends a driver whose raylet has died
    ],
)
def test_a_run_whose_driver_has_died_is_resumed(death: str, said: str) -> None:
    told = "(report, deaths) = __import__('supervisor').last_report(notes.read()); say(deaths[0]['died'])"
    code, out, warned = Supervised(f"begun(); {death}", told).run()
    assert (code, out.splitlines()) == (0, ["driver first", "driver again more", said])
    assert warned == f"warning: {said}; the run is resumed\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("begun(); sys.exit(0)", 0),
        ("begun(); notes.append(Note(over=True)); os._exit(1)", 1),
        ("begun(); notes.append(Note(over=True)); die()", 128 + 9),
        ("begun(); os._exit(2)", 2),
        ("begun(); os._exit(130)", 130),
        ("begun(); die(signal.SIGTERM)", 130),  # a signal to all processes, which this one does not handle yet
        ("begun(); open('run.json', 'w').write(json.dumps({'status': 'completed'})); os._exit(1)", 1),
        ("begun(); open('run.json', 'w').write(json.dumps({'status': 'interrupted'})); die()", 128 + 9),
    ],
)
def test_a_run_that_has_ended_is_not(end: str, code: int) -> None:
    assert Supervised(end, "").run() == (code, "driver first\n", "")


def test_a_run_that_has_failed_but_may_be_going_on_is_resumed() -> None:
    failed = "begun(); open('run.json', 'w').write(json.dumps({'status': 'failed'})); os._exit(1)"
    assert Supervised(failed, "").run()[:2] == (0, "driver first\ndriver again more\n")


def test_a_driver_that_dies_before_its_run_has_begun_has_nothing_to_resume() -> None:
    said = "error: the driver was killed by signal 9 before its run had begun\n"
    assert Supervised("die()", "").run() == (128 + 9, "driver first\n", said)


def test_drivers_that_die_before_they_can_count_use_the_restarts_up() -> None:
    code, out, said = Supervised("begun(most=2); die()", "os._exit(1)").run()
    assert (code, out.splitlines()) == (1, ["driver first", *["driver again more"] * 2])
    assert said.splitlines()[-1] == (
        "error: the driver was killed by signal 9; then the driver ended with exit code 1; then the driver ended with "
        "exit code 1. The restarts are used up (trainer.max_restarts=2)"
    )


def test_a_driver_that_begins_an_attempt_has_counted_the_deaths_before() -> None:
    again = "begun(most=1); len(notes.read()) < 8 and die(); notes.append(Note(over=True)); sys.exit(1)"
    code, out, _ = Supervised("begun(most=1); die()", again).run()
    assert (code, out.count("again")) == (1, 4)


def test_a_torn_note_hides_no_other() -> None:
    torn = "begun(); os.pwrite(int(os.environ[NOTES]), b'{\"ov', os.fstat(int(os.environ[NOTES])).st_size); die()"
    assert Supervised(torn, "").run()[:2] == (0, "driver first\ndriver again more\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_are_passed_on(signum: int) -> None:
    with Supervised(f"begun(); hear({signum}); wait(); sys.exit(130)", "").start() as process:
        read_until(process, "waits")
        process.send_signal(signum)
        read_until(process, f"heard {signum}")
        Path("go").touch()
        assert process.wait(LIMIT_S) == 130


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_to_end_is_not_resumed_however_its_driver_ends(signum: int) -> None:
    with Supervised(f"begun(); hear({signum}); wait()", "").start() as process:
        read_until(process, "waits")
        process.send_signal(signum)
        read_until(process, "heard")
        driver_of(process).kill()
        assert process.wait(LIMIT_S) == 128 + 9


def test_a_driver_that_a_passed_signal_kills_is_not_resumed() -> None:
    with Supervised("begun(); wait()", "").start() as process:
        read_until(process, "waits")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 128 + signal.SIGUSR1


def test_a_sighup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = Supervised("begun(); wait(); sys.exit(3 * (signal.getsignal(1) != signal.SIG_IGN))", "").start()
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        read_until(process, "waits")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        Path("go").touch()
        assert process.wait(LIMIT_S) == 0


def test_signals_between_two_drivers_end_the_run() -> None:
    # the signal is pending when the supervisor looks at the death
    with Supervised("begun(); hear(15); os.kill(os.getppid(), 19); wait(); die()", "").start() as process:
        read_until(process, "waits")
        assert is_true(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        Path("go").touch()
        driver = driver_of(process)
        assert is_true(lambda: driver.status() == psutil.STATUS_ZOMBIE)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert (process.wait(LIMIT_S), process.stdout.read()) in ((130, ""), (128 + 9, ""))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_driver_does_not_outlive_its_supervisor(stopped: bool) -> None:
    with Supervised("begun(); wait()", "").start() as process:
        read_until(process, "waits")
        driver = driver_of(process)
        if stopped:
            process.send_signal(signal.SIGSTOP)
        process.kill()
        assert is_true(lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE)


def test_a_shell_stops_and_continues_both() -> None:
    with Supervised("begun(); wait()", "").start() as process:
        read_until(process, "waits")
        both = [psutil.Process(process.pid), driver_of(process)]
        os.killpg(process.pid, signal.SIGSTOP)
        assert is_true(lambda: {one.status() for one in both} == {psutil.STATUS_STOPPED})
        Path("go").touch()
        os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(LIMIT_S) == 0


@pytest.fixture
def terminal() -> Iterator[Callable[[str], int]]:
    """Starts a driver and its supervisor in the foreground of a terminal of their own; the terminal's descriptor."""
    started: list[tuple[int, int]] = []

    def start(code: str) -> int:
        line = Supervised(code, "").line
        pid, screen = pty.fork()
        if not pid:
            os.execv(line[0], line)
        started.append((pid, screen))
        read_from(screen, b"waits")
        return screen

    yield start
    for pid, screen in started:
        os.close(screen)
        os.waitpid(pid, 0)


def read_from(screen: int, text: bytes) -> bytes:
    found = b""
    while text not in found:
        found += os.read(screen, 1024)
    return found


def test_ctrl_c_in_a_terminal_comes_to_the_driver_once(terminal: Callable[[str], int]) -> None:
    screen = terminal("begun(); hear(2); wait(); say('ends'); sys.exit(130)")
    said = b""
    for _ in range(2):
        os.write(screen, b"\x03")
        said += read_from(screen, b"heard 2")
        time.sleep(0.1)
    Path("go").touch()
    assert (said + read_from(screen, b"ends")).count(b"heard 2") == 2


def test_the_end_of_a_terminal_comes_to_the_driver(terminal: Callable[[str], int]) -> None:
    heard = "signal.signal(1, lambda *_: (open('heard', 'w').close(), sys.exit(130)))"
    screen = terminal(f"begun(); {heard}; wait()")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, screen)  # closes the terminal
    os.close(null)
    assert is_true(Path("heard").exists)
