"""The end of a process together with all that it has started, in sessions of their own, too. Its keeper sees to it, the
parent of the process, which calls nobody's code.

Who is to live longer holds one end of a pipe, into which nothing is written; the keeper, the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trinity_sync.host.interrupts import leave_to_driver, left_to_driver

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_END_S = 20
"""For the kernel to end what is killed; a keeper waits no longer."""


def go_on_kept(lifeline: int, forwarded: signal.Signals, not_kept: Sequence[int]) -> None:
    """Go on in a fork of this process, which becomes its keeper. The fork leaves signals to the driver.

    The keeper ends as the fork does, after all that the fork has started. It ends everything at once when the other end
    of the pipe is closed, as it is when the process that holds it has ended, however it did.

    Args:
        lifeline: file descriptor of the reading end.
        forwarded: a signal that the keeper hands on.
        not_kept: file descriptors that the keeper closes.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()
    with left_to_driver():
        child = os.fork()
        if not child:
            leave_to_driver()
    if child:
        for descriptor in not_kept:
            os.close(descriptor)
        _keep(child, lifeline, forwarded)
    os.setpgid(0, 0)  # a signal to its own group does not reach the keeper
    prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(lifeline)
    if os.getppid() != keeper:
        os._exit(1)


def _keep(child: int, lifeline: int, forwarded: signal.Signals) -> NoReturn:
    signal.signal(forwarded, lambda signum, frame: os.kill(child, signum))
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(lifeline, select.POLLHUP)
    poll.poll()
    signal.signal(forwarded, signal.SIG_IGN)  # from now on the child may be no more
    signal.alarm(_END_S)
    status = 0
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            ended, how = os.waitpid(-1, 0)
            status = how if ended == child else status
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    with contextlib.suppress(OSError):  # SIGKILL has no other
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _descendants(pid: int) -> set[int]:
    """The children of a process, and theirs, as far as their parents live."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, set()).add(int(entry.name))
    found: set[int] = set()
    new = children.get(pid, set())
    while new:
        found |= new
        new = set().union(*(children.get(one, set()) for one in new)) - found
    return found
