"""The links of a sync: connections from each receiver to each sender, over which they tell each other how far they are.

A member that dies closes its connections, so the others know at once. Every wait has the limit of the sync. Who
connects has to know the sender's key, which travels through verl's driver and is drawn anew for each sync.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from queue import Empty, SimpleQueue

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.integrations.verl.weight_sync.membership import SenderAddress
from trinity_sync.weights.layout import PartLayout

_STRANGER_S = 10.0
"""Limit for who connects to prove that it belongs to the sync."""
_GRACE_S = 1.0
"""By then the kernel has told of a process that was killed."""


class _Receiver:
    """A receiver, as a sender sees it."""

    def __init__(self, name: str, wire: SyncConnection) -> None:
        self.name = name
        self.wire = wire
        self.taken = -1
        self.done: Done | None = None


class Hub:
    """A sender's end.

    Usage::

        hub = Hub(host, timeout_s)                   # tell the receivers hub.address
        hub.meet(receivers)
        hub.tell(Bucket(...))
        hub.wait_taken(0)
        hub.wait_done()
        hub.close()

    Args:
        host: an address of this node that receivers reach.
        timeout_s: limit of every wait, seconds.

    Raises:
        RunError: nobody can be let in at that address.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._receivers: list[_Receiver] = []
        self._came: SimpleQueue[tuple[int, SyncConnection] | OSError] = SimpleQueue()
        self._listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listening.bind((host, 0))
            self._listening.listen(128)
        except OSError as error:
            self._listening.close()
            raise RunError(f"receivers of the weights cannot connect to {host}, which is this node: {error}") from error
        self.address = SenderAddress(host, self._listening.getsockname()[1], secrets.token_bytes(32))

    def meet(self, receivers: Sequence[str]) -> None:
        """Wait until all receivers have connected, then refuse further connections."""
        threading.Thread(target=self._accept, name="let receivers in", daemon=True).start()
        met: dict[int, SyncConnection] = {}
        until = time.monotonic() + self._timeout_s
        try:
            while len(met) < len(receivers):
                late = next(name for index, name in enumerate(receivers) if index not in met)
                index, wire = self._next(late, until)
                if index in range(len(receivers)) and index not in met:
                    met[index] = wire
                else:
                    wire.close()
        except BaseException:
            for wire in met.values():
                wire.close()
            raise
        finally:
            self._let_nobody_in()
        self._receivers = [_Receiver(name, met[index]) for index, name in enumerate(receivers)]

    def _next(self, late: str, until: float) -> tuple[int, SyncConnection]:
        try:
            came = self._came.get(timeout=max(until - time.monotonic(), 0.001))
        except Empty:
            raise WaitTimeout(late, "connect to the sender of the weights", self._timeout_s) from None
        if isinstance(came, OSError):
            raise RunError(f"{late} cannot connect to the sender of the weights ({came})") from came
        return came

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError as error:  # also where nobody is to be let in any more
                self._came.put(error)
                return
            # Each by itself: a stranger who says nothing keeps nobody out.
            threading.Thread(target=self._let_in, args=(accepted,), name="let a receiver in", daemon=True).start()

    def _let_in(self, accepted: socket.socket) -> None:
        wire = SyncConnection(accepted, min(_STRANGER_S, self._timeout_s))
        try:
            deliver_challenge(wire.connection, self.address.key)
            answer_challenge(wire.connection, self.address.key)
            hello = wire.connection.recv()
        except (AuthenticationError, EOFError, OSError):
            wire.close()
            return
        if not isinstance(hello, ReceiverHello):
            wire.close()
            return
        wire.limit(self._timeout_s)
        self._came.put((hello.index, wire))
        if self._listening.fileno() < 0:  # too late: nobody looks there any more
            self._let_nobody_in()

    def _let_nobody_in(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # who waits in accept is woken
        self._listening.close()
        while not self._came.empty():
            if not isinstance(came := self._came.get(), OSError):
                came[1].close()

    def tell(self, message: FromSender) -> None:
        """Tell all receivers, once what they have said meanwhile was read."""
        while self._read(0):
            pass
        for receiver in self._receivers:
            try:
                receiver.wire.connection.send(message)
            except BlockingIOError:
                raise WaitTimeout(receiver.name, "read the next message about the weights", self._timeout_s) from None
            except OSError as error:
                self.check()
                raise RunError(f"{receiver.name} disconnected ({error})") from error

    def wait_taken(self, number: int) -> None:
        """Wait until all receivers have a bucket."""
        self._wait(lambda receiver: receiver.taken >= number, f"take bucket {number} of the weights", self._timeout_s)

    def wait_done(self) -> list[Done]:
        """Wait until all receivers have handed on the version; return what they say of it."""
        while late := [receiver for receiver in self._receivers if receiver.done is None]:
            if not self._read(self._timeout_s):
                raise WaitTimeout(late[0].name, "take and load the weights", self._timeout_s)
        return [receiver.done for receiver in self._receivers if receiver.done is not None]

    def check(self) -> None:
        """After an error of a transport: say which receiver is gone or has given up, if that is why."""
        with contextlib.suppress(WaitTimeout):
            self._wait(lambda receiver: receiver.done is not None, "end", _GRACE_S)

    def interrupt(self) -> None:
        """From another thread: end what is waited for here, with an error."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        for receiver in tuple(self._receivers):
            receiver.wire.interrupt()

    def give_up(self, why: str) -> None:
        """Tell whoever is still there that the version does not come, and let them go."""
        for receiver in self._receivers:
            _say(receiver.wire, Failed(why))
        self.close()

    def close(self) -> None:
        """Let the receivers go. May be called again."""
        self._let_nobody_in()
        for receiver in self._receivers:
            receiver.wire.close()
        self._receivers = []

    def _wait(self, reached: Callable[[_Receiver], bool], what: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while late := [receiver for receiver in self._receivers if not reached(receiver)]:
            if not self._read(max(until - time.monotonic(), 0.0)):
                raise WaitTimeout(late[0].name, what, timeout_s)

    def _read(self, timeout_s: float) -> bool:
        """Read one message of each receiver that says something in that time; return whether one does."""
        # of all that are not through, so that a death is noticed whoever is waited for
        open_ones = [receiver for receiver in self._receivers if receiver.done is None]
        ready = wait([receiver.wire.connection for receiver in open_ones], timeout_s)
        for receiver in open_ones:
            if receiver.wire.connection in ready:
                self._read_from(receiver)
        return bool(ready)

    def _read_from(self, receiver: _Receiver) -> None:
        try:
            message: FromReceiver = receiver.wire.connection.recv()
        except BlockingIOError:
            raise WaitTimeout(receiver.name, "finish the message that it began", self._timeout_s) from None
        except (EOFError, OSError) as error:
            raise RunError(f"{receiver.name} disconnected before it had all weights") from error
        if isinstance(message, Failed):
            raise RunError(f"{receiver.name} did not take the weights: {message.why}")
        if isinstance(message, BucketReceipt):
            receiver.taken = message.number
        else:
            receiver.done = message


class Spoke:
    """A receiver's end.

    Args:
        sender: the sender's name, for errors.
        address: where it is reached.
        index: which receiver this is.
        timeout_s: limit of every wait, seconds.

    Raises:
        RunError: the sender is gone, or does not know this receiver.
        WaitTimeout: it does not answer.
    """

    def __init__(self, sender: str, address: SenderAddress, index: int, timeout_s: float) -> None:
        self.sender = sender
        self._timeout_s = timeout_s
        try:
            connected = socket.create_connection((address.host, address.port), timeout_s)
        except TimeoutError:
            raise WaitTimeout(sender, f"answer at {address.host}:{address.port}", timeout_s) from None
        except OSError as error:
            raise RunError(f"{sender} cannot be reached at {address.host}:{address.port} ({error})") from error
        self._wire = SyncConnection(connected, timeout_s)
        try:
            answer_challenge(self._wire.connection, address.key)
            deliver_challenge(self._wire.connection, address.key)
            self._wire.connection.send(ReceiverHello(index))
        except BlockingIOError:
            self.close()
            raise WaitTimeout(sender, "let this receiver in", timeout_s) from None
        except (AuthenticationError, AssertionError, EOFError, OSError) as error:  # the second: it speaks otherwise
            self.close()
            raise RunError(f"{sender} has ended, or takes part in another sync ({error})") from error

    def receive(self, what: str) -> FromSender:
        """Wait for the next message."""
        try:
            message: FromSender = self._wire.connection.recv()
        except BlockingIOError:
            raise WaitTimeout(self.sender, what, self._timeout_s) from None
        except (EOFError, OSError) as error:
            raise RunError(f"{self.sender} disconnected before it could {what}") from error
        if isinstance(message, Failed):
            raise RunError(f"{self.sender} gave the weights up: {message.why}")
        return message

    def tell(self, message: FromReceiver) -> None:
        """Tell the sender."""
        try:
            self._wire.connection.send(message)
        except BlockingIOError:
            raise WaitTimeout(self.sender, "read the next message about the weights", self._timeout_s) from None
        except OSError as error:
            self.check()
            raise RunError(f"{self.sender} disconnected ({error})") from error

    def check(self) -> None:
        """After an error of a transport: say whether the sender is gone or has given up, if that is why."""
        until = time.monotonic() + _GRACE_S
        while wait([self._wire.connection], max(until - time.monotonic(), 0.0)):
            self.receive("send all weights")

    def interrupt(self) -> None:
        """From another thread: end what is waited for here, with an error."""
        self._wire.interrupt()

    def give_up(self, why: str) -> None:
        """Tell the sender, if it is there, that this receiver does not take the version; and let it go."""
        _say(self._wire, Failed(why))
        self.close()

    def close(self) -> None:
        """Let the sender go. May be called again."""
        self._wire.close()


def _say(wire: SyncConnection, message: Failed) -> None:
    """Tell who is there, and wait for nobody who does not read."""
    with contextlib.suppress(OSError):
        wire.limit(_GRACE_S)
        wire.connection.send(message)


# ---- the messages of a link


Source = tuple[int, int, int] | str | None
"""The place of a bucket's bytes: memory (pid, descriptor, inode), a file (path), or None: the group broadcasts them."""


@dataclass(frozen=True)
class ReceiverHello:
    """A receiver connects."""

    index: int  # of the receiver


@dataclass(frozen=True)
class BucketNotice:
    """A bucket is ready, or is being broadcast."""

    number: int  # from 0
    layout: PartLayout
    digest: bytes  # xxh3_128 of its bytes (16 bytes)
    source: Source


@dataclass(frozen=True)
class Working:
    """The sender makes progress, but has no bucket to read yet."""


@dataclass(frozen=True)
class End:
    """All buckets were sent."""

    step: int | None  # the trainer's global step; None: verl did not say
    buckets: int
    tensors: int
    digest: str | None  # of the version; None: it was not computed, or the sender has only shards


@dataclass(frozen=True)
class BucketReceipt:
    """A receiver has copied a bucket and all buckets before it."""

    number: int


@dataclass(frozen=True)
class Done:
    """A receiver has handed the whole version to its engine."""

    digest: str | None  # of the received version; None: it was not computed
    nbytes: int  # of the buckets of all senders


@dataclass(frozen=True)
class Failed:
    """The member that sends this gives the version up."""

    why: str


FromSender = BucketNotice | Working | End | Failed
FromReceiver = BucketReceipt | Done | Failed


class SyncConnection:
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
