"""A process of one's own program for work that must not be felt here: a library that hangs, leaves threads behind, or
changes what belongs to the whole process. Used for mirrors, trackers and rewards.

It is no `multiprocessing.Process`: that would begin with the program of its parent, once more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from trinity_sync.host.interrupts import left_to_driver


def start_child(
    module: str, log: Path | None, message_s: int = 10, further: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``serve(descriptor)`` of a module in a process of its own, which leaves signals to the driver.

    Args:
        module: dotted name; its `serve` gets the file descriptor of its end of the connection, and must end when that
            is closed, that is, with this process.
        log: the child's own words are appended to it; None: they go to this process's standard error.
        message_s: for a message to be taken, and for the rest of one that has begun, in whole seconds; beyond that our
            end of the connection raises `BlockingIOError`.
        further: file descriptors that `serve` is given after its own.

    Returns:
        The process, and our end of the connection.

    Raises:
        OSError: it could not be started.
    """
    _open_standard_descriptors()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", message_s, 0))
    with ours, theirs, contextlib.ExitStack() as opened:
        output: int | IO[bytes] = 2
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = opened.enter_context(open(log, "ab"))
        given = [theirs.fileno(), *further]
        program = f"""
from trinity_sync.host.interrupts import leave_to_driver; leave_to_driver()
from trinity_sync.host.process import end_with_driver; end_with_driver()
from {module} import serve; serve({", ".join(map(str, given))})
"""
        opened.enter_context(left_to_driver())
        child = subprocess.Popen(
            [sys.executable, "-u", "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=given,
            # With -P, the child imports what we would: the working directory's files only where we look there.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            # Ctrl-C is for the run, which lets a copy finish. Not a session of its own: Linux may share the processors
            # out between sessions first, and there it would yield to nobody.
            process_group=0,
        )
        return child, Connection(ours.detach())


def _open_standard_descriptors() -> None:
    """Let those of 0, 1 and 2 that are closed be ``/dev/null``: an end of the connection there would be overwritten."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
