"""Ending a process with another one, at once and whatever it is doing: in a library that holds Python's lock, too. The
kernel sees to it.

Who is to live longer holds one end of a pipe, into which nothing is written; who ends with it, the other.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with(lifeline: int) -> None:
    """Have the kernel kill this process and its group when the other end of a pipe is closed, as it is when the process
    that holds it has ended, however it did.

    Args:
        lifeline: file descriptor of the reading end.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline)
    if poll.poll(0):  # it was closed before the kernel was told
        os.killpg(os.getpgrp(), signal.SIGKILL)
