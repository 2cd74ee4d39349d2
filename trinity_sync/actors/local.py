"""An actor in a process of this machine or another, without Ray: `LocalServer` hosts it, `LocalHandle` calls it over a
connection (`host.channel`). A message is (id, method, pickled arguments) or (id, outcome, pickled result). Calls are
concurrent on one connection, and are answered in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import pickle
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from trinity_sync.actors.pending import CallChannel, Changes, DeathError, PendingCall
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.channel import LENGTH, Connection, Listener, length_of, pack
from trinity_sync.host.origin import error_text, origin

logger = logging.getLogger(__name__)

T = TypeVar("T")


# The calling side.


_SEND_S = 30.0
_MOST_IN_VAIN, _HOLDS_S = 5, 10.0
"""Reconnections in a row without an answer in between, before the handle gives up; a connection that lasted longer than
the second (seconds) starts the count again.
"""


class Link:
    """A connection to an actor's process, which has said that the actor is ready.

    Args:
        who: the actor's name in errors.
        timeout_s: limit for the actor to be ready, seconds.

    Attributes:
        hello: the process's first message, about itself.

    Raises:
        WaitTimeout: the actor is not ready.
        OSError, EOFError: the connection has ended.
    """

    def __init__(self, connection: Connection, who: str, timeout_s: float) -> None:
        self.connection = connection
        try:
            self.hello = connection.receive(timeout_s)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise WaitTimeout(who, "get ready", timeout_s) from None
            raise


class LocalCall(PendingCall[T]):
    """A call over a connection; see `PendingCall`.

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


class LocalHandle(CallChannel):
    """Calls an actor in a local process, from any thread.

    When the connection ends, `again` connects to the actor's next process, and all unanswered calls are repeated with
    their ids. Without `again`, or if it fails, these calls and all later ones fail.

    Args:
        link: the connection.
        again: returns another connection, given the reason for the end of the last one. It limits its own wait, and
            raises a `TrinityError` if there is none.
        send_s: limit for the other process to take a message, seconds; the connection ends after it. None: 30.
    """

    def __init__(self, link: Link, again: Callable[[str], Link] | None = None, send_s: float | None = None) -> None:
        self._again = again
        self._send_s = _SEND_S if send_s is None else send_s
        self._connection: Connection | None = link.connection
        self._over: str | None = None
        self._lock = threading.Lock()
        self._calls: dict[str, LocalCall[object]] = {}
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._in_vain, self._linked = 0, time.monotonic()
        self._pid = os.getpid()
        threading.Thread(target=self._read, args=(link.connection,), name="answers", daemon=True).start()

    def caller(self) -> tuple[str, str]:
        host = socket.gethostname()
        return host, f"{host}-{os.getpid()}"

    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> LocalCall[object]:
        name = f"{self._name}-{next(self._numbers)}"
        call: LocalCall[object] = LocalCall(who, what, pack((name, method, pickle.dumps((tuple(args), dict(kwargs))))))
        if os.getpid() != self._pid:
            call.future.set_exception(
                RunError(f"{who} cannot {what} for a fork of the process that is connected to it")
            )
            return call
        with self._lock:
            if self._over is not None:
                call.future.set_exception(DeathError(who, what, self._over))
                return call
            self._calls[name] = call
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the reading thread notices it, and repeats the call
                    self._connection.send(call.frame, self._send_s)
        return call

    def close(self) -> None:
        """End the connection; unanswered calls fail."""
        self._end("the connection was closed here")

    def _read(self, connection: Connection) -> None:
        """Deliver answers, over one connection after another. Runs in the handle's thread."""
        current: Connection | None = connection
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

    def _anew(self, why: str) -> Connection | None:
        """Connect again and repeat the unanswered calls; return None if the handle gives up."""
        with self._lock:
            self._connection = None
            if self._over is not None:
                return None
        self._in_vain = 1 if time.monotonic() > self._linked + _HOLDS_S else self._in_vain + 1
        while self._again is not None and self._in_vain <= _MOST_IN_VAIN:
            try:
                connection = self._again(why).connection
            except TrinityError as error:
                why = f"{why}; {error}"
                break
            except Exception as error:
                why = f"{why}; {type(error).__name__}: {error}"
                logger.exception("the connection could not be made again")
                break
            with self._lock:
                if self._over is not None:
                    connection.close()
                    return None
                try:
                    for call in self._calls.values():
                        connection.send(call.frame, self._send_s)
                except OSError as error:
                    self._in_vain += 1
                    why = str(error)
                    connection.close()
                    continue
                self._connection, self._linked = connection, time.monotonic()
            return connection
        self._end(why)
        return None

    def _end(self, why: str) -> None:
        self._over = self._over or why
        if (sending := self._connection) is not None:
            sending.end()  # before the lock: a thread may hold it while the other process does not read
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()
        for call in calls:
            call.future.set_exception(DeathError(call.who, call.what, why))


# The answering side, on an event loop.


_LOOK_S = 60.0
"""Longest wait for a change of the members, seconds."""
ANSWER, FORESEEN, FAILED = "answer", "foreseen", "failed"
"""Outcomes of a call: its result, a `TrinityError`, the text of any other error."""


@dataclass(frozen=True, eq=False)
class _Caller:
    """A connection, as a server sees it."""

    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _CurrentCall:
    """The call that the current task answers."""

    id: str
    caller: _Caller


_current: ContextVar[_CurrentCall] = ContextVar("current call")


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
        await _current.get().caller.gone.wait()
        return True


class LocalServer:
    """Accepts connections from the start (`listen`), and answers calls once it has an actor (`serve`). For one event
    loop.

    A connection starts with the server's `hello`. Its caller is a member from the first call until the connection ends.
    """

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._ready: asyncio.Future[tuple[object, Callable[[], object] | None]] = (
            asyncio.get_running_loop().create_future()
        )
        self._members: set[_Caller] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes = Changes()
        self._takes_more = True

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self._members)

    def listen(self, address: str, secret: bytes) -> int:
        """Begin to accept connections; return the port. OSError: the address does not belong to this machine."""
        loop = asyncio.get_running_loop()
        self._listener = Listener((address, 0), secret, lambda one: loop.call_soon_threadsafe(self._begin, one))
        return int(self._listener.address[1])

    def serve(self, body: object, hello: Callable[[], object] | None) -> None:
        """Answer calls from now on. `hello`: returns the first message to each caller; None: it was sent before."""
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
        for caller in self._members:
            caller.writer.close()

    async def close(self) -> None:
        """End all connections, and accept no others."""
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._ready.done():
            self._ready.cancel()

    async def answer(self, connection: Connection) -> None:
        """Answer the calls of a connection until it ends."""
        reader, writer = await asyncio.open_connection(sock=connection.socket)
        caller = _Caller(writer)
        try:
            body, hello = await asyncio.shield(self._ready)
            if hello is not None:
                await _send(caller, pack(hello()))
            while True:
                head = await reader.readexactly(LENGTH.size)
                call, method, arguments = pickle.loads(await reader.readexactly(length_of(head)))
                if not self._takes_more:
                    return
                if caller not in self._members:
                    self._members.add(caller)
                    self._changes.announce()
                self._start(_answer(_CurrentCall(call, caller), body, method, arguments))
        except (EOFError, OSError):  # the caller has ended
            pass
        finally:
            self._members.discard(caller)
            caller.gone.set()
            self._changes.announce()
            writer.close()

    def _begin(self, connection: Connection) -> None:
        if self._listener is None or self._listener.closed:
            connection.close()
        else:
            self._start(self.answer(connection))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(current: _CurrentCall, body: object, method: str, arguments: bytes) -> None:
    _current.set(current)
    try:
        args, kwargs = pickle.loads(arguments)
        frame = pack((current.id, ANSWER, pickle.dumps(await _called(body, method, args, kwargs))))
    except TrinityError as error:
        frame = pack((current.id, FORESEEN, pickled_error(error)))
    except Exception as error:
        frame = pack((current.id, FAILED, pickle.dumps(_where(error))))
    with contextlib.suppress(OSError):  # the caller has ended
        await _send(current.caller, frame)


async def _called(body: object, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    found = None if method.startswith("_") else getattr(body, method, None)
    if found is None:
        raise RunError(f"the actor has no method {method!r}")
    answer = found(*args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


def pickled_error(error: TrinityError) -> bytes:
    """Return the pickle of an error, or of its text where the class cannot be unpickled."""
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


async def _send(caller: _Caller, frame: bytes) -> None:
    if caller.gone.is_set():
        return
    caller.writer.write(frame)  # in one piece, so that answers do not mix
    await caller.writer.drain()
