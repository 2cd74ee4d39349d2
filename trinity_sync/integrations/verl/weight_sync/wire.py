"""One connection of a sync: with a limit to each wait, and another thread may interrupt who waits at it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from multiprocessing.connection import Connection


class Wire:
    """A connection of a sync.

    Args:
        connected: the socket, which is the wire's from then on.
        timeout_s: limit of each wait, seconds; an operation that takes longer raises `BlockingIOError`.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self.connection = Connection(os.dup(connected.fileno()))
        self._closing = threading.Lock()
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Have the kernel end what takes longer from now on: also where half of a message has come."""
        seconds = int(timeout_s)
        limit = struct.pack("ll", seconds, max(int((timeout_s - seconds) * 1e6), 0 if seconds else 1))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def interrupt(self) -> None:
        """From another thread: there is nothing more to read. What is written still gets to the other end."""
        with self._closing, contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let the other end go. May be called again."""
        with self._closing:  # else who interrupts could meet another file that has got the number
            self.connection.close()
            self._socket.close()
