"""A process of one's own program for work that must not be felt here: a library that hangs, leaves threads behind, or
changes what belongs to the whole process. Used for mirrors, trackers and rewards.

It is no `multiprocessing.Process`: that would begin with the program of its parent, once more.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from trinity_sync.host.interrupts import left_to_driver
from trinity_sync.host.logs import keep_short
from trinity_sync.host.terminal import open_missing

OWN_NAMES = "TRINITY_SYNC_OWN_NAMES"
"""Variable with the names of variables, between blanks, that look like Ray's and are the user's."""
_PIECE = 1 << 16
_CREDENTIALS = struct.Struct("iII")
_CONTROL = socket.CMSG_SPACE(_CREDENTIALS.size)  # no room for file descriptors, which would be open here then


class Channel:
    """Our end of the connection to a child, whose end is a `multiprocessing.connection.Connection`.

    The kernel names the sender of each piece, and only those of one process count: a fork of it, which has the
    connection open as well, can neither answer for it nor break its messages.

    Attributes:
        sender: that process; None: the next one that sends something.
        most_bytes: limit of one message; a longer one ends the connection.
    """

    def __init__(self, end: socket.socket, pid: int, message_s: float) -> None:
        self.sender: int | None = pid
        self.most_bytes = (1 << 31) - 1
        self._end, self._message_s = end, message_s
        self._end.setblocking(False)
        self._pidfd = os.pidfd_open(pid)
        self._close_pidfd = weakref.finalize(self, os.close, self._pidfd)
        self._data = bytearray()
        self._over = False

    @property
    def descriptors(self) -> tuple[int, int]:
        """File descriptors to wait for: one of them can be read when `poll` may have news."""
        return self._end.fileno(), self._pidfd

    def ended(self, within_s: float) -> bool:
        """Wait until the child has ended; tell whether it has."""
        return _readable((self._pidfd,), within_s)

    def send(self, message: object, limit_s: float | None = None) -> None:
        """Send a message.

        Args:
            limit_s: for the child to take it, seconds; None: the usual.

        Raises:
            TimeoutError: the child has not taken all of it within the limit; nothing can be sent any more.
            OSError: the connection is closed.
        """
        data = pickle.dumps(message)
        head = struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
        self._end.settimeout(limit_s or self._message_s)  # for all of it
        try:
            self._end.sendall(head + data)
        except TimeoutError:
            self._end.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            self._end.setblocking(False)

    def poll(self, within_s: float | None) -> bool:
        """Wait until `recv` returns or raises at once; tell whether it does.

        Args:
            within_s: limit, seconds; None: there is none.
        """
        until = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            gone = self.ended(0.0)  # before the rest is read: nothing comes after
            while not self._over and self._whole() is None and self._read() and time.monotonic() < until:
                pass
            self._over = self._over or gone
            if self._over or self._whole() is not None:
                return True
            if (left := until - time.monotonic()) <= 0:
                return False
            _readable(self.descriptors, left)

    def recv(self) -> Any:
        """Return the next message; without `poll` first, wait for it.

        Raises:
            EOFError: there is none, as the child has ended or closed the connection.
        """
        return pickle.loads(self.recv_bytes())

    def recv_bytes(self) -> bytes:
        """As `recv`, of bytes."""
        self.poll(None)
        if (whole := self._whole()) is None:
            raise EOFError("the connection was closed")
        message = bytes(self._data[whole])
        del self._data[: whole.stop]
        return message

    def close(self) -> None:
        """Close our end."""
        self._end.close()
        self._close_pidfd()

    def _whole(self) -> slice | None:
        """Where the first message is; None: there is no whole one."""
        if len(self._data) < 4:
            return None
        length = struct.unpack_from("!I", self._data)[0]
        self._over = self._over or length > self.most_bytes
        return slice(4, 4 + length) if length <= min(len(self._data) - 4, self.most_bytes) else None

    def _read(self) -> bool:
        """Take a piece; tell whether there was one."""
        try:
            data, control, _, _ = self._end.recvmsg(_PIECE, _CONTROL)
        except BlockingIOError:
            return False
        except OSError:
            data, control = b"", []
        self._over = not data
        for _, _, said in control:
            sender = _CREDENTIALS.unpack(said)[0]
            self.sender = self.sender or sender
            if sender == self.sender:
                self._data += data
        return bool(data)


def start_child(
    module: str, log: Path | None, message_s: float = 10, further: Sequence[int] = (), with_driver: bool = True
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start ``serve(descriptor)`` of a module in a process of its own, which leaves signals to the driver. It finds
    modules where this process does, and its environment is the user's.

    Args:
        module: dotted name; its `serve` gets the file descriptor of its end of the connection, and must end when that
            is closed, that is, with this process.
        log: the child's own words are appended to it, and it is kept short; None: they go to this process's standard
            error.
        message_s: limit for the child to take a message, in seconds; see `Channel`.
        further: file descriptors that `serve` is given after its own.
        with_driver: whether the kernel kills it at once when the driver is gone.

    Returns:
        The process, and our end of the connection.

    Raises:
        OSError: it could not be started.
    """
    open_missing()
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    theirs.setblocking(True)  # whatever `socket.setdefaulttimeout` says
    with theirs, contextlib.ExitStack() as opened:
        on_error = opened.enter_context(contextlib.ExitStack())
        on_error.push(ours)
        output: int | IO[bytes] = 2
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = opened.enter_context(open(log, "ab"))
            keep_short(log)
        given = [theirs.fileno(), *further]
        end = "from trinity_sync.host.process import end_with_driver; end_with_driver(); " if with_driver else ""
        program = (
            f"from trinity_sync.host.interrupts import leave_to_driver; leave_to_driver(); {end}"
            f"from {module} import serve; serve({', '.join(map(str, given))})"
        )
        opened.enter_context(left_to_driver())
        child = subprocess.Popen(
            python(program),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=given,
            env=users_environment(),
            # Ctrl-C is for the run, which lets a copy finish. Not a session of its own: Linux may share the processors
            # out between sessions first, and there it would yield to nobody.
            process_group=0,
        )
        channel = Channel(ours, child.pid, message_s)
        on_error.pop_all()
        return child, channel


def python(code: str) -> list[str]:
    """Return the command that runs code where this process's modules are found. Programs that it starts do not inherit
    that, as they would a PYTHONPATH.
    """
    # others are names of import hooks, such as that of packages that are installed as editable, or cannot be reached
    path = [str(Path(place).absolute()) if os.path.exists(place or ".") else place for place in sys.path]  # noqa: PTH110
    return [sys.executable, "-u", "-P", "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def own_names() -> dict[str, str]:
    """Return a variable that has `users_environment` keep what the user has set, for the processes of a run."""
    started = Path("/proc/self/environ").read_text(errors="replace").split("\0")
    return {OWN_NAMES: " ".join(filter(_looks_like_rays, (line.partition("=")[0] for line in started)))}


def users_environment() -> dict[str, str]:
    """Return the environment without the variables that Ray has added for its own processes."""
    own = os.environ.get(OWN_NAMES, "").split()
    return {name: value for name, value in os.environ.items() if name in own or not _looks_like_rays(name)}


def _looks_like_rays(name: str) -> bool:
    return name.startswith(("RAY_", "__RAY_", "PYTHONBREAKPOINT", "SPT_NOENV"))


def _readable(descriptors: Sequence[int], within_s: float) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s == math.inf else within_s * 1000))
