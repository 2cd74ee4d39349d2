"""Connections between processes over TCP or a Unix socket. Both sides prove a secret before either unpickles anything,
each message is a pickle behind its length, and each wait has a limit. Used by local actors, by the workers of vLLM, by
the syncs of a verl program, and by node agents, which send data between messages.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from trinity_sync.errors import RunError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

SECRET_BYTES = 32
PROOF_S = 10.0
"""Limit of the proof, seconds: another program at the port may stay silent."""

LENGTH = struct.Struct("!Q")
MOST_BYTES = (1 << 31) - 1
"""Largest message; messages carry names and figures, not tensors."""

_NONCE = 32
_PROOF = 32
_PIECE = 1 << 20
_BACKLOG = 4096
_PAUSE_S = 0.1
# The death of the other machine is noticed after about 30 s of silence.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class ForeignPeerError(RunError):
    """The other end of a connection does not know the secret."""


def pack(message: object) -> bytes:
    """Return the frame of a message."""
    body = pickle.dumps(message)
    if len(body) > MOST_BYTES:
        raise RunError(f"a message of {len(body)} bytes is too large; the limit is {MOST_BYTES}")
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes | bytearray) -> int:
    """Return the length of the message that follows the head; OSError: it is over the limit."""
    length: int = LENGTH.unpack_from(head)[0]
    if length > MOST_BYTES:
        raise OSError(f"a message of {length} bytes is over the limit of {MOST_BYTES}")
    return length


class Connection:
    """A connected socket. One thread may send while another one receives.

    A fork of the process closes its copy, which would keep the connection open after the end of its parent.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._data = bytearray()  # of the message that has begun to arrive
        self._closing = threading.Lock()
        _connections.add(self)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Send a frame of `pack`; a failure ends the connection. Raises TimeoutError: the peer has not read all of it
        in time (seconds). Raises OSError: the connection is closed or broken.
        """
        until, rest = time.monotonic() + timeout_s, memoryview(frame)
        try:
            while rest:
                rest = rest[self._try(partial(self.socket.send, rest), select.POLLOUT, until) :]
        except OSError:
            self.end()
            raise

    def receive(self, timeout_s: float = math.inf) -> Any:
        """Wait for the next message. Raises TimeoutError: it has not come in time (seconds); a later call may get it.
        Raises EOFError, OSError: the connection is closed or broken.
        """
        until = time.monotonic() + timeout_s
        self._fill(LENGTH.size, until)
        self._fill(LENGTH.size + length_of(self._data), until)
        data, self._data = self._data, bytearray()
        return pickle.loads(memoryview(data)[LENGTH.size :])

    def send_data(self, data: memoryview, idle_s: float) -> None:
        """Send bytes that are no message. Errors as of `send`; any byte that is taken begins the timeout again."""
        while data:
            data = data[self._try(partial(self.socket.send, data), select.POLLOUT, time.monotonic() + idle_s) :]

    def receive_data(self, into: memoryview, idle_s: float) -> None:
        """Fill memory with bytes that are no message. Errors as of `receive`; any byte begins the timeout again."""
        while into:
            count = self._try(partial(self.socket.recv_into, into), select.POLLIN, time.monotonic() + idle_s)
            if not count:
                raise EOFError("the connection was closed")
            into = into[count:]

    def read(self, length: int, until: float) -> bytes:
        """Read so many bytes; errors as for `receive`."""
        self._fill(length, until)
        data, self._data = self._data, bytearray()
        return bytes(data)

    def end_reading(self) -> None:
        """Have this end receive no more, also in a thread that waits. It can still send."""
        self._shut(socket.SHUT_RD)

    def end(self) -> None:
        """End the connection, also for a thread that waits for a message."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. May be called again."""
        with self._closing:
            self.socket.close()

    def _shut(self, how: int) -> None:
        # with the lock: another file could get the number of a descriptor that is closed meanwhile
        with self._closing, contextlib.suppress(OSError):
            self.socket.shutdown(how)

    def _fill(self, length: int, until: float) -> None:
        while (missing := length - len(self._data)) > 0:
            piece = self._try(partial(self.socket.recv, min(missing, _PIECE)), select.POLLIN, until)
            if not piece:
                raise EOFError("the connection was closed")
            self._data += piece

    def _try(self, operation: Callable[[], T], event: int, until: float) -> T:
        """Return the result of the operation as soon as it does not block."""
        while True:
            try:
                return operation()
            except BlockingIOError:
                pass
            except TimeoutError as error:  # the kernel's
                raise ConnectionAbortedError("the other machine does not answer") from error
            poll = select.poll()
            try:
                poll.register(self.socket, event)
            except ValueError:  # its descriptor is -1
                raise ConnectionAbortedError("another thread has closed the connection") from None
            if not poll.poll(None if until == math.inf else max(until - time.monotonic(), 0.0) * 1000):
                raise TimeoutError("timed out")


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_fork() -> None:
    for connection in list(_connections):
        connection.socket.close()  # without the lock, which a thread of the parent may hold


os.register_at_fork(after_in_child=_close_in_fork)


def open_connection(address: Address, secret: bytes, timeout_s: float) -> Connection:
    """Connect to a listener, prove the secret to it and check its proof. `timeout_s`: limit for the connection, and for
    the proof, seconds. Raises ForeignPeerError: one side does not accept the other's proof. Raises EOFError, OSError:
    no process listens there, it is silent, or the connection broke.
    """
    if isinstance(address, str):
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(timeout_s)
    else:
        connected = socket.create_connection(address, timeout_s)
    try:
        if isinstance(address, str):
            connected.connect(address)
        connection = Connection(connected)
        until = time.monotonic() + timeout_s
        theirs = connection.read(_NONCE, until)
        ours = secrets.token_bytes(_NONCE)
        connection.send(ours + _proof(secret, b"client", theirs, ours), timeout_s)
        try:
            proof = connection.read(_PROOF, until)
        except EOFError:
            raise ForeignPeerError("it did not accept the secret") from None
        if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, ours)):
            raise ForeignPeerError("it does not know the secret")
    except BaseException:
        connected.close()
        raise
    return connection


def _proof(secret: bytes, side: bytes, servers: bytes, clients: bytes) -> bytes:
    """Return one side's proof. It contains the side's name, so it cannot be sent back as the other's."""
    return hmac.digest(secret, side + servers + clients, "sha256")


class Listener:
    """Accepts connections until it is closed. Each peer has a thread of its own, so a silent one delays no other.

    Args:
        address: where to listen; port 0: any.
        take: gets each connection whose peer has proved the secret, in the peer's thread; an error closes it.
        proof_s: limit of the proof, seconds.

    Attributes:
        address: where it listens.

    Raises:
        OSError: the address does not belong to this machine.
    """

    def __init__(
        self, address: Address, secret: bytes, take: Callable[[Connection], object], proof_s: float = PROOF_S
    ) -> None:
        self._secret, self._take, self._proof_s = secret, take, proof_s
        tcp = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listening = socket.socket(socket.AF_UNIX if isinstance(address, str) else tcp)
        try:
            self._listening.bind(address)
            self._listening.listen(_BACKLOG)
        except OSError:
            self._listening.close()
            raise
        name = self._listening.getsockname()
        self.address: Address = name if isinstance(name, str) else name[:2]
        threading.Thread(target=self._accept, name="peers connect", daemon=True).start()

    @property
    def closed(self) -> bool:
        return self._listening.fileno() < 0

    def close(self) -> None:
        """Accept no more connections. May be called again."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listening.close()

    def _accept(self) -> None:
        while not self.closed:
            try:
                accepted, peer = self._listening.accept()
                threading.Thread(target=self._meet, args=(accepted, peer), name="a peer connects", daemon=True).start()
            except (OSError, RuntimeError):  # such as a lack of descriptors or threads
                if not self.closed:
                    time.sleep(_PAUSE_S)

    def _meet(self, accepted: socket.socket, peer: object) -> None:
        try:
            connection = Connection(accepted)
            self._check(connection)
            if self.closed:
                raise EOFError
            self._take(connection)
        except (EOFError, OSError):  # the peer has ended or is silent
            accepted.close()
        except ForeignPeerError as error:
            logger.warning("a connection from %s was refused: %s", peer, error)
            accepted.close()
        except Exception:
            logger.exception("a connection from %s could not be taken", peer)
            accepted.close()

    def _check(self, connection: Connection) -> None:
        """Check the peer's proof of the secret, and prove the same."""
        until, ours = time.monotonic() + self._proof_s, secrets.token_bytes(_NONCE)
        connection.send(ours, self._proof_s)
        said = connection.read(_NONCE + _PROOF, until)
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", ours, theirs)):
            raise ForeignPeerError("it does not know the secret")
        connection.send(_proof(self._secret, b"server", ours, theirs), self._proof_s)
