"""The handle of an actor in a local process, for the side that calls it."""

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
from trinity_sync.host.origin import origin, told

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: For a message to be taken, seconds: the process at the other end may be stopped.
_SEND_S = 30
#: A connection is made anew so often in a row without one answer in between, or so many seconds that it holds.
_MOST_IN_VAIN, _HOLDS_S = 5, 10.0


class Link:
    """A connection to an actor's process, which has proved that it knows the secret.

    Attributes:
        hello: what the process says of itself.
    """

    def __init__(self, address: str, port: int, secret: bytes, who: str, timeout_s: float) -> None:
        """Connect.

        Args:
            address, port: where it listens.
            secret: what both sides know.
            who: what errors call the actor.
            timeout_s: limit for it to be ready, seconds.

        Raises:
            ForeignPeerError: who listens there does not know the secret.
            WaitTimeout: it knows the secret, but is not ready.
            OSError, EOFError: nobody is there, or says nothing.
        """
        self._sock = socket.create_connection((address, port), timeout=PROOF_S)
        try:
            prove(self._sock, secret)
            keep_alive(self._sock)
            self._sock.settimeout(timeout_s)
            try:
                self.hello = receive(self._sock)
            except TimeoutError:
                raise WaitTimeout(who, "get ready", timeout_s) from None
            self._sock.settimeout(None)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        except BaseException:
            self._sock.close()
            raise
        _links.add(self)

    def send(self, frame: bytes) -> None:
        """Send a whole message; where that fails, the connection ends."""
        try:
            self._sock.sendall(frame)
        except OSError:
            self.end()
            raise

    def receive(self) -> Any:
        """Wait for the next message; errors as for `frames.receive`."""
        return receive(self._sock)

    def end(self) -> None:
        """End the connection, also for whoever is waiting for a message of it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_links() -> None:
    """A fork holds its parent's connections open, so their end would not be noticed before its own."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_forget_links)


class LocalCall(Pending[T]):
    """A call over a connection that is under way.

    Args:
        who: who was asked.
        what: what it is to do.
        frame: the message.
    """

    def __init__(self, who: str, what: str, frame: bytes) -> None:
        super().__init__(who, what)
        self.frame = frame
        self.future: Future[T] = Future()

    @property
    def owned(self) -> Sequence[object]:
        """Nothing: the connection is what tells of this process's end."""
        return ()

    def result(self, timeout_s: float) -> T:
        """Wait for the answer; errors as for `Pending`."""
        if not self.has_ended(timeout_s):
            raise WaitTimeout(self.who, self.what, timeout_s)
        return self.future.result()

    async def answer(self, timeout_s: float) -> T:
        """As `result`, on an event loop."""
        answered = asyncio.wrap_future(self.future)
        done, _ = await asyncio.wait([answered], timeout=timeout_s)  # it cancels nothing
        if not done:
            raise WaitTimeout(self.who, self.what, timeout_s)
        return answered.result()

    def is_answered(self) -> bool:
        """Tell whether it has ended well by now."""
        return self.future.done() and self.future.exception() is None

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait until it has ended, well or not, or the time is over; tell whether it has."""
        return bool(wait([self.future], timeout_s).done)


class LocalHandle(CallTransport):
    """Calls an actor in a local process. Any thread may.

    Where the connection ends, `again` makes another one, to the process that goes on in the place of the one that is
    gone, and all calls that are under way are made again, with their ids. Without `again`, or where that fails, they
    fail, and so do all later ones.

    Args:
        link: the connection.
        again: makes another connection; gets why the last one ended. It limits itself, and raises a `TrinityError`
            where there is none.
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
        """Name this process: its host's name, and that and its number."""
        host = socket.gethostname()
        return host, f"{host}-{os.getpid()}"

    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> LocalCall[Any]:
        """Begin a call; see `Transport`."""
        name = f"{self._name}-{next(self._numbers)}"
        call: LocalCall[Any] = LocalCall(who, what, pack((name, method, pickle.dumps((tuple(args), dict(kwargs))))))
        if os.getpid() != self._pid:
            call.future.set_exception(RunError(f"{who} cannot be asked to {what} by a fork of who is connected to it"))
            return call
        with self._lock:
            if self._over is not None:
                call.future.set_exception(MemberDied(who, what, self._over))
                return call
            self._calls[name] = call
            if self._link is not None:
                with contextlib.suppress(OSError):  # who reads notices it, and calls again
                    self._link.send(call.frame)
        return call

    def close(self) -> None:
        """End the connection; calls that are under way fail."""
        self._end("the connection was closed here")

    # ---- what comes

    def _read(self, link: Link) -> None:
        """Hand out answers, over one connection after another."""
        current: Link | None = link
        while current is not None:
            try:
                while True:
                    self._answered(*current.receive())
            except (EOFError, OSError) as error:
                why = str(error) or type(error).__name__
            except Exception as error:
                why = f"what it sent cannot be read: {type(error).__name__}: {error}"
            current.close()
            current = self._anew(why)

    def _answered(self, name: str, how: str, data: bytes) -> None:
        self._in_vain = 0
        with self._lock:
            call = self._calls.pop(name, None)
        if call is None:  # a call that was repeated is answered twice
            return
        try:
            answer = pickle.loads(data)
        except Exception as error:
            unread = f"{call.who} answered what cannot be read: {type(error).__name__}: {error}"
            call.future.set_exception(RunError(unread))
            return
        if how == ANSWER:
            call.future.set_result(answer)
        else:
            call.future.set_exception(
                answer if how == FORESEEN else RunError(f"{call.who} could not {call.what}: {answer}")
            )

    def _anew(self, why: str) -> Link | None:
        """Make another connection, and the calls again; None: it is over."""
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
                logger.exception("no other connection could be made")
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


# What goes over a connection: first the proof that both sides know the secret, then messages, each with its length.


SECRET_BYTES = 32
#: Limit of the proof, seconds: who listens there and is no actor of ours says nothing, or something else.
PROOF_S = 10.0

_NONCE = 32
_PROOF = 32
_LENGTH = struct.Struct("!Q")

# Of a machine that is gone without a word, the end is noticed after so many seconds.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class ForeignPeerError(RunError):
    """Who is at the other end of a connection does not know the secret."""


def pack(message: object) -> bytes:
    """Return a message as it goes over a connection."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def keep_alive(sock: socket.socket) -> None:
    """Have the death of the other machine noticed, and send small messages at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# ---- the side that calls, which blocks


def prove(sock: socket.socket, secret: bytes) -> None:
    """Prove to a server that this side knows the secret, and have it prove the same, within `PROOF_S`.

    Raises:
        ForeignPeerError: it does not know it, or does not take our word.
        OSError: the connection broke, or nothing came.
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


def receive(sock: socket.socket) -> Any:
    """Wait for the next message.

    Raises:
        EOFError: there will be none.
        OSError: the connection broke.
    """
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    return pickle.loads(_read(sock, length))


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


# ---- the side that answers, on an event loop


async def have_proved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Have a caller prove that it knows the secret, and prove the same.

    Raises:
        ForeignPeerError: it does not know it.
        TimeoutError: it did not say anything in time.
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


async def receive_next(reader: asyncio.StreamReader) -> Any:
    """As `receive`."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _proof(secret: bytes, side: bytes, servers: bytes, clients: bytes) -> bytes:
    """What only who knows the secret can say of the two numbers; `side`: whose word it is, which the other cannot
    send back as its own.
    """
    return hmac.digest(secret, side + servers + clients, "sha256")


# Hosts an actor in this process: serves its methods to whoever connects and knows the secret.


#: So often members are counted though nothing has changed, seconds.
_LOOK_S = 60.0
#: How the answer to a call ended.
ANSWER, FORESEEN, FAILED = "answer", "foreseen", "failed"


@dataclass(frozen=True, eq=False)
class _Connection:
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Current:
    """The call that is being answered."""

    id: str
    connection: _Connection


_current: ContextVar[_Current] = ContextVar("current call")


class LocalHost:
    """This process, as the `hosting.Host` of its actor.

    Args:
        restarted: the process of before was killed, and this one goes on in its place.
    """

    def __init__(self, *, restarted: bool = False) -> None:
        self._restarted = restarted

    @property
    def restarted(self) -> bool:
        """Whether this process goes on in the place of one that was killed."""
        return self._restarted

    def call_id(self) -> str:
        """Return the id that the caller gave the current call."""
        return _current.get().id

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for the end of the connection by which the current call came."""
        await _current.get().connection.closed.wait()
        return True


class LocalServer:
    """Accepts connections from the start, and answers calls once there is an actor. All on one event loop.

    A caller is told who this is (`serve`'s `hello`) before its first call. It counts as a member from that call on,
    until its connection ends.

    Args:
        secret: what a caller has to know.
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
        """How many callers are connected that have called."""
        return len(self._members)

    async def listen(self, address: str) -> int:
        """Begin to accept connections; return the port.

        Raises:
            OSError: the address is none of this machine's.
        """
        self._server = await asyncio.start_server(self._connected, address, 0, backlog=4096)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def serve(self, body: object, hello: Callable[[], object]) -> None:
        """Answer calls from now on.

        Args:
            body: the actor; its public methods may be called.
            hello: what a caller is told first; asked for each.
        """
        self._ready.set_result((body, hello))

    async def members_gone(self, *, first_s: float, grace_s: float, least_s: float = 0.0) -> None:
        """Return when no caller is connected any more.

        Args:
            first_s: how long to wait for the first one, seconds.
            grace_s: for so long none has been connected, seconds.
            least_s: not before so many seconds from now, as callers may be on their way back.
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
        """Answer no calls from now on, and end the members' connections. Who connects is told who this is, still."""
        self._takes_more = False
        for connection in self._members:
            connection.writer.close()

    async def close(self) -> None:
        """End all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.writer.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if not self._ready.done():
            self._ready.cancel()

    # ---- one connection

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        self._connections.add(connection)
        try:
            keep_alive(writer.get_extra_info("socket"))
            await have_proved(reader, writer, self._secret)
            body, hello = await asyncio.shield(self._ready)
            await _send(connection, pack(hello()))
            await self._answer_calls(reader, connection, body)
        except (EOFError, OSError, TimeoutError, asyncio.CancelledError):  # the caller is gone, or we are
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
            call, method, arguments = await receive_next(reader)
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
            how, said = ANSWER, pickle.dumps(await _called(body, method, args, kwargs))
        except TrinityError as error:
            how, said = FORESEEN, _foreseen(error)
        except Exception as error:
            how, said = FAILED, pickle.dumps(_where(error))
        with contextlib.suppress(OSError):  # whoever asked is gone
            await _send(current.connection, pack((current.id, how, said)))


async def _called(body: object, method: str, args: Sequence[object], kwargs: dict[str, Any]) -> object:
    found = None if method.startswith("_") else getattr(body, method, None)
    if found is None:
        raise RunError(f"there is no {method!r} to call")
    answer = found(*args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


def _foreseen(error: TrinityError) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # its class may take other arguments than it keeps
    except Exception:
        return pickle.dumps(RunError(str(error)))
    return data


def _where(error: BaseException) -> str:
    """Put an error that nobody foresaw into words, with where it was raised."""
    steps = traceback.extract_tb(error.__traceback__)
    if origin(error) is not None or not steps:  # the words have it
        return told(error)
    return f"{told(error)} ({steps[-1].filename}:{steps[-1].lineno})"


async def _send(connection: _Connection, frame: bytes) -> None:
    if connection.closed.is_set():
        return
    connection.writer.write(frame)  # whole, so that answers do not mix
    await connection.writer.drain()
