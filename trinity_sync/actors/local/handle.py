"""An actor in a process of this machine or another, without Ray: `LocalServer` hosts it, `LocalHandle` calls it over
TCP.

Both sides prove that they know a secret before either unpickles anything. A message is a pickled (id, method,
arguments) behind its length. Calls are concurrent on one connection, and are answered in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import itertools
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_sync.actors.pending import CallTransport, Changes, MemberDied, Pending
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.origin import error_text, origin

logger = logging.getLogger(__name__)

T = TypeVar("T")


# The frames: proof of the secret, then messages.


SECRET_BYTES = 32
PROOF_S = 10.0
"""Limit of the proof, seconds: another program at the port may stay silent."""

_NONCE = 32
_PROOF = 32
_LENGTH = struct.Struct("!Q")
_MOST_BYTES = (1 << 31) - 1
"""Largest message; calls carry names and figures, not tensors."""

# The death of the other machine is noticed after about 30 s of silence.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class ForeignPeerError(RunError):
    """The other end of a connection does not know the secret."""


def pack(message: object) -> bytes:
    """Return the frame of a message."""
    body = pickle.dumps(message)
    if len(body) > _MOST_BYTES:
        raise RunError(f"a message of {len(body)} bytes is too large; the limit is {_MOST_BYTES}")
    return _LENGTH.pack(len(body)) + body


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_BYTES:
        raise OSError(f"a message of {length} bytes is over the limit of {_MOST_BYTES}")
    return int(length)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice the death of the other machine, and send small messages at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def prove(sock: socket.socket, secret: bytes) -> None:
    """As the caller, prove the secret to the server and check the server's proof, within `PROOF_S`.

    Raises:
        ForeignPeerError: one side does not accept the other's proof.
        EOFError, OSError: the connection broke, or the server is silent.
    """
    until = time.monotonic() + PROOF_S
    theirs = _read(sock, _NONCE, until)
    ours = secrets.token_bytes(_NONCE)
    sock.sendall(ours + _proof(secret, b"client", theirs, ours))
    try:
        proof = _read(sock, _PROOF, until)
    except EOFError:
        raise ForeignPeerError("it did not accept the secret") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, ours)):
        raise ForeignPeerError("it does not know the secret")


async def have_proved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """As the server, check the caller's proof of the secret, and prove the same.

    Raises:
        ForeignPeerError: the caller does not know it.
        TimeoutError: the caller was silent for `PROOF_S`.
        EOFError, OSError: the connection broke.
    """
    async with asyncio.timeout(PROOF_S):
        ours = secrets.token_bytes(_NONCE)
        writer.write(ours)
        theirs, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
        if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
            raise ForeignPeerError("it does not know the secret")
        writer.write(_proof(secret, b"server", ours, theirs))
        await writer.drain()


def _proof(secret: bytes, side: bytes, servers: bytes, clients: bytes) -> bytes:
    """Return one side's proof. It contains the side's name, so it cannot be sent back as the other's."""
    return hmac.digest(secret, side + servers + clients, "sha256")


def _read(sock: socket.socket, length: int, until: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 0.001))
        piece = sock.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return bytes(data)


# The calling side.


_SEND_S = 30
"""Limit for the other process to take a message, seconds."""
_MOST_IN_VAIN, _HOLDS_S = 5, 10.0
"""Reconnections in a row without an answer in between, before the handle gives up; a connection that lasted longer than
the second (seconds) starts the count again.
"""


class Link:
    """A connection to an actor's process that has proved the secret.

    Args:
        address, port: where the process listens.
        who: the actor's name in errors.
        timeout_s: limit for the actor to be ready, seconds.

    Attributes:
        hello: the server's first message, about itself.

    Raises:
        ForeignPeerError: the process there does not know the secret.
        WaitTimeout: it knows the secret, but is not ready.
        OSError, EOFError: no process listens there, or it is silent.
    """

    def __init__(self, address: str, port: int, secret: bytes, who: str, timeout_s: float) -> None:
        self._sock = socket.create_connection((address, port), timeout=PROOF_S)
        try:
            prove(self._sock, secret)
            keep_alive(self._sock)
            self._sock.settimeout(timeout_s)
            try:
                self.hello = self.receive()
            except TimeoutError:
                raise WaitTimeout(who, "get ready", timeout_s) from None
            self._sock.settimeout(None)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        except BaseException:
            self._sock.close()
            raise
        _links.add(self)

    def send(self, frame: bytes) -> None:
        """Send a whole message; a failure ends the connection."""
        try:
            self._sock.sendall(frame)
        except OSError:
            self.end()
            raise

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError, OSError: the connection is closed or broken.
        """
        return pickle.loads(_read(self._sock, _length(_read(self._sock, _LENGTH.size))))

    def end(self) -> None:
        """End the connection, also for a thread that waits for a message."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._sock.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_links() -> None:
    """Close the parent's connections in a fork, which would keep them open after the parent's end."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_forget_links)


class LocalCall(Pending[T]):
    """A call over a connection; see `Pending`.

    Args:
        frame: the message.
    """

    def __init__(self, who: str, what: str, frame: bytes) -> None:
        super().__init__(who, what)
        self.frame = frame
        self.future: Future[T] = Future()

    @property
    def owned(self) -> Sequence[object]:
        """Nothing: the server notices the end of this process by its connection."""
        return ()

    def result(self, timeout_s: float) -> T:
        if not self.has_ended(timeout_s):
            raise WaitTimeout(self.who, self.what, timeout_s)
        return self.future.result()

    async def answer(self, timeout_s: float) -> T:
        answered = asyncio.wrap_future(self.future)
        done, _ = await asyncio.wait([answered], timeout=timeout_s)  # does not cancel the call
        if not done:
            raise WaitTimeout(self.who, self.what, timeout_s)
        return answered.result()

    def is_answered(self) -> bool:
        return self.future.done() and self.future.exception() is None

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return bool(wait([self.future], timeout_s).done)


class LocalHandle(CallTransport):
    """Calls an actor in a local process, from any thread.

    When the connection ends, `again` connects to the actor's next process, and all unanswered calls are repeated with
    their ids. Without `again`, or if it fails, these calls and all later ones fail.

    Args:
        link: the connection.
        again: returns another connection, given the reason for the end of the last one. It limits its own wait, and
            raises a `TrinityError` if there is none.
    """

    def __init__(self, link: Link, again: Callable[[str], Link] | None = None) -> None:
        self._again = again
        self._link: Link | None = link
        self._over: str | None = None
        self._lock = threading.Lock()
        self._calls: dict[str, LocalCall[Any]] = {}
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._in_vain, self._linked = 0, time.monotonic()
        self._pid = os.getpid()
        threading.Thread(target=self._read, args=(link,), name="answers", daemon=True).start()

    def caller(self) -> tuple[str, str]:
        host = socket.gethostname()
        return host, f"{host}-{os.getpid()}"

    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> LocalCall[Any]:
        name = f"{self._name}-{next(self._numbers)}"
        call: LocalCall[Any] = LocalCall(who, what, pack((name, method, pickle.dumps((tuple(args), dict(kwargs))))))
        if os.getpid() != self._pid:
            call.future.set_exception(
                RunError(f"{who} cannot {what} for a fork of the process that is connected to it")
            )
            return call
        with self._lock:
            if self._over is not None:
                call.future.set_exception(MemberDied(who, what, self._over))
                return call
            self._calls[name] = call
            if self._link is not None:
                with contextlib.suppress(OSError):  # the reading thread notices it, and repeats the call
                    self._link.send(call.frame)
        return call

    def close(self) -> None:
        """End the connection; unanswered calls fail."""
        self._end("the connection was closed here")

    def _read(self, link: Link) -> None:
        """Deliver answers, over one connection after another. Runs in the handle's thread."""
        current: Link | None = link
        while current is not None:
            try:
                while True:
                    self._answered(*current.receive())
            except (EOFError, OSError) as error:
                why = str(error) or type(error).__name__
            except Exception as error:
                why = f"its message cannot be read: {type(error).__name__}: {error}"
            current.close()
            current = self._anew(why)

    def _answered(self, name: str, how: str, data: bytes) -> None:
        self._in_vain = 0
        with self._lock:
            call = self._calls.pop(name, None)
        if call is None:  # a repeated call may be answered twice
            return
        try:
            answer = pickle.loads(data)
        except Exception as error:
            unread = f"the answer of {call.who} cannot be read: {type(error).__name__}: {error}"
            call.future.set_exception(RunError(unread))
            return
        if how == ANSWER:
            call.future.set_result(answer)
        else:
            call.future.set_exception(
                answer if how == FORESEEN else RunError(f"{call.who} could not {call.what}: {answer}")
            )

    def _anew(self, why: str) -> Link | None:
        """Connect again and repeat the unanswered calls; return None if the handle gives up."""
        with self._lock:
            self._link = None
            if self._over is not None:
                return None
        self._in_vain = 1 if time.monotonic() > self._linked + _HOLDS_S else self._in_vain + 1
        while self._again is not None and self._in_vain <= _MOST_IN_VAIN:
            try:
                link = self._again(why)
            except TrinityError as error:
                why = f"{why}; {error}"
                break
            except Exception as error:
                why = f"{why}; {type(error).__name__}: {error}"
                logger.exception("the connection could not be made again")
                break
            with self._lock:
                if self._over is not None:
                    link.close()
                    return None
                try:
                    for call in self._calls.values():
                        link.send(call.frame)
                except OSError as error:
                    self._in_vain += 1
                    why = str(error)
                    link.close()
                    continue
                self._link, self._linked = link, time.monotonic()
            return link
        self._end(why)
        return None

    def _end(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
            calls, self._calls = list(self._calls.values()), {}
            link, self._link = self._link, None
        if link is not None:
            link.end()
        for call in calls:
            call.future.set_exception(MemberDied(call.who, call.what, why))


# The answering side, on an event loop.


_LOOK_S = 60.0
"""Longest wait for a change of the members, seconds."""
ANSWER, FORESEEN, FAILED = "answer", "foreseen", "failed"
"""Outcomes of a call: its result, a `TrinityError`, the text of any other error."""


@dataclass(frozen=True, eq=False)
class _Connection:
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Current:
    """The call that the current task answers."""

    id: str
    connection: _Connection


_current: ContextVar[_Current] = ContextVar("current call")


class LocalHost:
    """This process as the `Host` of its actor.

    Args:
        restarted: this process continues for one that was killed.
    """

    def __init__(self, *, restarted: bool = False) -> None:
        self._restarted = restarted

    @property
    def restarted(self) -> bool:
        return self._restarted

    def call_id(self) -> str:
        return _current.get().id

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for the end of the current call's connection."""
        await _current.get().connection.closed.wait()
        return True


class LocalServer:
    """Accepts connections from the start, and answers calls once it has an actor (`serve`). For one event loop.

    A connection starts with the server's `hello`. Its caller is a member from the first call until the connection ends.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._server: asyncio.Server | None = None
        self._ready: asyncio.Future[tuple[object, Callable[[], object]]] = asyncio.get_running_loop().create_future()
        self._members: set[_Connection] = set()
        self._connections: set[_Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._changes = Changes()
        self._takes_more = True

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self._members)

    async def listen(self, address: str) -> int:
        """Begin to accept connections; return the port. OSError: the address does not belong to this machine."""
        self._server = await asyncio.start_server(self._connected, address, 0, backlog=4096)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def serve(self, body: object, hello: Callable[[], object]) -> None:
        """Answer calls from now on."""
        self._ready.set_result((body, hello))

    async def members_gone(self, *, first_s: float, grace_s: float, least_s: float = 0.0) -> None:
        """Return when no member is left.

        Args:
            first_s: wait for the first member, seconds.
            grace_s: time without a member, seconds.
            least_s: shortest wait, seconds, in which the callers of an earlier process can return.
        """
        clock = asyncio.get_running_loop().time
        least = clock() + least_s
        until = max(least, clock() + first_s)
        while self._members or clock() < until:
            if self._members:
                await self._changes.next(_LOOK_S)
                until = max(least, clock() + grace_s)
            else:
                await self._changes.next(until - clock())

    def take_no_more(self) -> None:
        """Answer no more calls, and end the members' connections. A new connection still gets the `hello`."""
        self._takes_more = False
        for connection in self._members:
            connection.writer.close()

    async def close(self) -> None:
        """End all connections, and accept no others."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.writer.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if not self._ready.done():
            self._ready.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        self._connections.add(connection)
        try:
            keep_alive(writer.get_extra_info("socket"))
            await have_proved(reader, writer, self._secret)
            body, hello = await asyncio.shield(self._ready)
            await _send(connection, pack(hello()))
            await self._answer_calls(reader, connection, body)
        except (EOFError, OSError, TimeoutError, asyncio.CancelledError):  # one of the two sides has ended
            pass
        except ForeignPeerError as error:
            logger.warning("a connection from %s was refused: %s", writer.get_extra_info("peername"), error)
        finally:
            self._connections.discard(connection)
            self._members.discard(connection)
            connection.closed.set()
            self._changes.announce()
            writer.close()

    async def _answer_calls(self, reader: asyncio.StreamReader, connection: _Connection, body: object) -> None:
        while True:
            head = await reader.readexactly(_LENGTH.size)
            call, method, arguments = pickle.loads(await reader.readexactly(_length(head)))
            if not self._takes_more:
                return
            if connection not in self._members:
                self._members.add(connection)
                self._changes.announce()
            task = asyncio.ensure_future(self._answer(_Current(call, connection), body, method, arguments))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answer(self, current: _Current, body: object, method: str, arguments: bytes) -> None:
        _current.set(current)
        try:
            args, kwargs = pickle.loads(arguments)
            frame = pack((current.id, ANSWER, pickle.dumps(await _called(body, method, args, kwargs))))
        except TrinityError as error:
            frame = pack((current.id, FORESEEN, _foreseen(error)))
        except Exception as error:
            frame = pack((current.id, FAILED, pickle.dumps(_where(error))))
        with contextlib.suppress(OSError):  # the caller has ended
            await _send(current.connection, frame)


async def _called(body: object, method: str, args: Sequence[object], kwargs: dict[str, Any]) -> object:
    found = None if method.startswith("_") else getattr(body, method, None)
    if found is None:
        raise RunError(f"the actor has no method {method!r}")
    answer = found(*args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


def _foreseen(error: TrinityError) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # fails for a class whose arguments are not those that it keeps
    except Exception:
        return pickle.dumps(RunError(str(error)))
    return data


def _where(error: BaseException) -> str:
    """Return the text of an unexpected error with the place where it was raised."""
    steps = traceback.extract_tb(error.__traceback__)
    if origin(error) is not None or not steps:  # the text has the place
        return error_text(error)
    return f"{error_text(error)} ({steps[-1].filename}:{steps[-1].lineno})"


async def _send(connection: _Connection, frame: bytes) -> None:
    if connection.closed.is_set():
        return
    connection.writer.write(frame)  # in one piece, so that answers do not mix
    await connection.writer.drain()
