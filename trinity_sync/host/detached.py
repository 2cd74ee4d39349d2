"""A process that outlives the one that starts it: of a session of its own, nobody's child, without anything that its
starter has open.
"""

from __future__ import annotations

import importlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.child_process import python

#: Says what came of the start; once. Who started the process goes on then.
Report = Callable[[bytes], None]


class KilledError(RunError):
    """A process ended before it said anything: somebody has killed it."""


def start_detached(module: str, given: bytes, *, who: str, timeout_s: float) -> bytes:
    """Start ``serve(given, report)`` of a module in a process of its own, and wait for its report.

    It is begun anew and not forked, so it has none of this process's sockets, threads or contexts of a GPU. The
    terminal's signals do not reach it, and it holds none of this process's output.

    Args:
        module: dotted name. Its `serve` gets a `Report` besides.
        who: what errors call it.
        timeout_s: limit for the report, seconds. A process that is late is left alone.

    Returns:
        What it reported.

    Raises:
        KilledError: it ended without a report, and without a word.
        RunError: it ended without a report; says what it printed.
        WaitTimeout: there is no report.
    """
    try:
        child = subprocess.Popen(
            python(f"from {__name__} import become; become({module!r})"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"{who} could not be started: {error}") from error
    try:
        reported, printed = child.communicate(given, timeout_s)
    except subprocess.TimeoutExpired:
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        raise WaitTimeout(who, "start", timeout_s) from None
    if not reported:
        lines = printed.decode(errors="replace").strip().splitlines()
        if not lines:
            raise KilledError(f"{who} could not start: it was killed")
        raise RunError(f"{who} could not start: {lines[-1]}")
    return reported


def become(module: str) -> None:
    """Be that process; its first line."""
    given = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    to_starter = os.dup(1)
    os.dup2(2, 1)  # a library that prints does not report

    def report(said: bytes) -> None:
        nonlocal to_starter
        if to_starter >= 0:
            _let_go_of_output()
            try:
                with os.fdopen(to_starter, "wb") as pipe:
                    pipe.write(said)
            except OSError:  # the starter is gone
                pass
            to_starter = -1

    importlib.import_module(module).serve(given, report)


def _let_go_of_output() -> None:
    """What is the starter's, that is a pipe, becomes ``/dev/null``; what is a log by now stays."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        if _is_pipe(number):
            os.dup2(nothing, number)
    os.close(nothing)


def _is_pipe(number: int) -> bool:
    return stat.S_ISFIFO(os.fstat(number).st_mode)
