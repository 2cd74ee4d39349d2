"""Hosts an actor in this process: serves its methods to whoever connects and knows the secret."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from trinity_sync.actors.changes import Changes
from trinity_sync.actors.local import frames
from trinity_sync.errors import RunError, TrinityError
from trinity_sync.host.origin import origin, told

logger = logging.getLogger(__name__)

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
            frames.keep_alive(writer.get_extra_info("socket"))
            await frames.have_proved(reader, writer, self._secret)
            body, hello = await asyncio.shield(self._ready)
            await _send(connection, frames.pack(hello()))
            await self._answer_calls(reader, connection, body)
        except (EOFError, OSError, TimeoutError, asyncio.CancelledError):  # the caller is gone, or we are
            pass
        except frames.ForeignPeerError as error:
            logger.warning("a connection from %s was refused: %s", writer.get_extra_info("peername"), error)
        finally:
            self._connections.discard(connection)
            self._members.discard(connection)
            connection.closed.set()
            self._changes.announce()
            writer.close()

    async def _answer_calls(self, reader: asyncio.StreamReader, connection: _Connection, body: object) -> None:
        while True:
            call, method, arguments = await frames.receive_next(reader)
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
            await _send(current.connection, frames.pack((current.id, how, said)))


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
