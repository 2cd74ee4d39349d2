"""Starts a run's driver, and again where it has died (`--supervise`). ``python -IS .../supervisor.py N COMMAND ...
AGAIN ...``, with N words of the first command: a small program of the standard library, in the driver's process group.

Supervisor and driver write notes for each other. `launch.supervision` is the driver's part: it says how the run goes
on, and counts the restarts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypedDict

NOTES = "TRINITY_SYNC_SUPERVISOR"
"""Environment variable of the driver: the descriptor of the notes."""

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_PASSED_ON = {*_ENDING, signal.SIGUSR1, signal.SIGUSR2}
_IN_ORDER = (0, 2, 130)
"""Exit codes of a run that has completed, was refused or interrupted."""
_INTERRUPTED = 130
_PDEATHSIG = 1
_SHOW_CURSOR = b"\x1b[?25h"


class Note(TypedDict, total=False):
    """A line of the notes; by the driver, except for a death."""

    run: str  # path of run.json: an attempt has begun, with these further fields
    attempt: int
    arguments: list[str]  # of the command that goes on
    most: int  # restarts in all
    restarts: list[tuple[float, int]]
    story: list[str]
    worked: bool  # an attempt has done a step
    gpus_per_node: int  # the most that an attempt had
    over: bool  # this driver ends in order, or the run does
    died: str
    time: float  # Unix seconds of the death


class Notes:
    """Lines of JSON in a file in memory, which the driver inherits. A driver may die within a line."""

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor

    def append(self, note: Note) -> None:
        os.pwrite(self._file, b"\n%s\n" % json.dumps(note).encode(), os.fstat(self._file).st_size)

    def read(self) -> list[Note]:
        found = []
        for line in os.pread(self._file, os.fstat(self._file).st_size, 0).splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


def last_report(notes: Sequence[Note]) -> tuple[Note, list[Note]]:
    """Return what the driver has noted at the beginning of the newest attempt, and the deaths since."""
    at = max((number for number, note in enumerate(notes) if "run" in note), default=None)
    report = Note() if at is None else notes[at]
    return report, [note for note in notes[at or 0 :] if "died" in note]


def main(arguments: Sequence[str]) -> int:
    """Supervise a run to its end. Returns the exit code of the last driver; 1: the restarts are used up."""
    first = int(arguments[0]) + 1
    command, again = [*arguments[1:first]], arguments[first:]
    descriptor = os.memfd_create("notes", 0)  # inherited
    os.environ[NOTES], notes = str(descriptor), Notes(descriptor)
    for signum in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    awaited: set[int] = {
        signum for signum in (*_PASSED_ON, signal.SIGCHLD) if signal.getsignal(signum) != signal.SIG_IGN
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        seen = len(notes.read())
        code, passed = _driver_ended(_start(command, before), awaited)
        if -code in _ENDING:
            return _INTERRUPTED
        report, _ = last_report(notes.read())
        over = any("over" in note for note in notes.read()[seen:]) or _has_ended(report)
        if over or code in _IN_ORDER or -code in passed or passed & _ENDING:
            return code if code >= 0 else 128 - code
        how = f"the driver was killed by signal {-code}" if code < 0 else f"the driver ended with exit code {code}"
        if not report:
            _say(f"error: {how} before its run had begun")
            return code if code >= 0 else 128 - code
        notes.append(Note(died=how, time=time.time()))
        deaths = [note["died"] for note in last_report(notes.read())[1]]
        if len(deaths) > report["most"]:  # else the next driver decides
            _say(f"error: {'; then '.join(deaths)}. The restarts are used up (trainer.max_restarts={report['most']})")
            return 1
        if _ENDING & signal.sigpending():
            return _INTERRUPTED
        _say(f"warning: {how}; the run is resumed")
        command = [*again, *report["arguments"]]


def _start(command: list[str], mask: set[int]) -> int:
    """Start a driver in this process group, and return its pid. It gets SIGTERM where this process is killed."""
    supervisor = os.getpid()
    if child := os.fork():
        return child
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == supervisor:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execv(command[0], command)
    except OSError as error:
        _say(f"error: {command[0]} could not be started: {error.strerror}")
    finally:
        os._exit(2)


def _driver_ended(driver: int, awaited: set[int]) -> tuple[int, set[int]]:
    """Wait for the end of a driver, and pass signals on. Returns its exit code, or the negative number of the signal
    that has killed it, and the signals that came.
    """
    passed: set[int] = set()
    while True:
        came = signal.sigwaitinfo(awaited)
        if came.si_signo != signal.SIGCHLD:
            passed.add(came.si_signo)
            # a terminal sends these to the whole process group
            if came.si_code <= 0 or came.si_signo not in (signal.SIGINT, signal.SIGQUIT):
                os.kill(driver, came.si_signo)
            continue
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended:  # as the first process of a container, this one has other children too
            if ended == driver:
                return os.waitstatus_to_exitcode(status), passed
            ended, status = os.waitpid(-1, os.WNOHANG)


def _has_ended(report: Note) -> bool:
    """Return whether the record says that the run has ended; one that failed may be going on."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(Path(report["run"]).read_bytes())["status"] in ("completed", "interrupted")
    return False


def _say(text: str) -> None:
    cursor = _SHOW_CURSOR if os.isatty(2) else b""  # the driver's view may have hidden it
    with contextlib.suppress(OSError):
        os.write(2, b"%s%s\n" % (cursor, text.encode()))


def become(command: Sequence[str], again: Sequence[str]) -> NoReturn:
    """Become the supervisor of a command. `again`: the command that goes on with the run, before its arguments."""
    sys.stdout.flush()
    os.execv(
        sys.executable, [sys.executable, "-IS", str(Path(__file__).absolute()), str(len(command)), *command, *again]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
