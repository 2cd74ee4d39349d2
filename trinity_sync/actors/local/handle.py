"""The handle of an actor in a local process, for the side that calls it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from trinity_sync.actors.local import frames
from trinity_sync.actors.local.server import ANSWER, FORESEEN
from trinity_sync.actors.pending import MemberDied, Pending, Transport
from trinity_sync.errors import RunError, TrinityError, WaitTimeout

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
        self._sock = socket.create_connection((address, port), timeout=frames.PROOF_S)
        try:
            frames.prove(self._sock, secret)
            frames.keep_alive(self._sock)
            self._sock.settimeout(timeout_s)
            try:
                self.hello = frames.receive(self._sock)
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
        return frames.receive(self._sock)

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


class LocalHandle(Transport):
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
        call: LocalCall[Any] = LocalCall(
            who, what, frames.pack((name, method, pickle.dumps((tuple(args), dict(kwargs)))))
        )
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
