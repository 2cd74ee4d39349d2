"""The links of a sync: connections (`host.channel`) from each receiver to each sender, over which they report progress.

A member that dies closes its connections, so the others notice at once. Every wait has the limit of the sync. A
receiver proves the sender's key, which travels through verl's driver and is drawn anew for each sync.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import NamedTuple

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.channel import (
    PROOF_S,
    SECRET_BYTES,
    Connection,
    ForeignPeerError,
    Listener,
    open_connection,
    pack,
)
from trinity_sync.weights.layout import PartLayout

_GRACE_S = 1.0
"""By then the kernel has closed the connections of a killed process."""


class SenderAddress(NamedTuple):
    """The address of a sender, and the secret that a receiver has to prove."""

    host: str
    port: int
    key: bytes


class _ReceiverState:
    """A receiver, as a sender sees it."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.connection = connection
        self.taken = -1
        self.done: VersionReceipt | None = None


class Hub:
    """A sender's end.

    Usage::

        hub = Hub(host, timeout_s)                   # give hub.address to the receivers
        hub.meet(receivers)
        hub.tell(BucketNotice(...))
        hub.wait_taken(0)
        hub.wait_done()
        hub.close()

    Args:
        host: an address of this node that receivers reach.
        timeout_s: limit of every wait, seconds.

    Raises:
        RunError: the address does not belong to this node.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._receivers: list[_ReceiverState] = []
        self._connected: SimpleQueue[tuple[int, Connection] | None] = SimpleQueue()
        key = secrets.token_bytes(SECRET_BYTES)
        try:
            self._listener = Listener((host, 0), key, self._take, min(PROOF_S, timeout_s))
        except OSError as error:
            raise RunError(f"receivers of the weights cannot connect to {host}, which is this node: {error}") from error
        self.address = SenderAddress(host, int(self._listener.address[1]), key)

    def meet(self, receivers: Sequence[str]) -> None:
        """Wait until all receivers have connected, then refuse further connections."""
        met: dict[int, Connection] = {}
        until = time.monotonic() + self._timeout_s
        try:
            while len(met) < len(receivers):
                late = next(name for index, name in enumerate(receivers) if index not in met)
                index, connection = self._next(late, until)
                if index in range(len(receivers)) and index not in met:
                    met[index] = connection
                else:
                    connection.close()
        except BaseException:
            for connection in met.values():
                connection.close()
            raise
        finally:
            self._stop_listening()
        self._receivers = [_ReceiverState(name, met[index]) for index, name in enumerate(receivers)]

    def _next(self, late: str, until: float) -> tuple[int, Connection]:
        try:
            connected = self._connected.get(timeout=max(until - time.monotonic(), 0.001))
        except Empty:
            raise WaitTimeout(late, "connect to the sender of the weights", self._timeout_s) from None
        if connected is None:
            raise RunError(f"{late} did not connect to the sender of the weights before the sync was interrupted")
        return connected

    def _take(self, connection: Connection) -> None:
        """Receive the receiver's index; in its thread of the listener."""
        index = connection.receive(min(PROOF_S, self._timeout_s))
        self._connected.put((index, connection))
        if self._listener.closed:  # too late
            self._stop_listening()

    def _stop_listening(self) -> None:
        self._listener.close()
        with contextlib.suppress(Empty):  # two threads may be here
            while True:
                if (connected := self._connected.get_nowait()) is not None:
                    connected[1].close()

    def tell(self, message: FromSender) -> None:
        """Send a message to all receivers, after their messages so far were read."""
        while self._read(0):
            pass
        frame = pack(message)
        for receiver in self._receivers:
            try:
                receiver.connection.send(frame, self._timeout_s)
            except TimeoutError:
                raise WaitTimeout(receiver.name, "read a message about the weights", self._timeout_s) from None
            except OSError as error:
                self.check()
                raise RunError(f"{receiver.name} disconnected ({error})") from error

    def wait_taken(self, number: int) -> None:
        """Wait until all receivers have a bucket."""
        self._wait(lambda receiver: receiver.taken >= number, f"take bucket {number} of the weights", self._timeout_s)

    def wait_done(self) -> list[VersionReceipt]:
        """Wait until all receivers have handed the version to their engines; return their reports."""
        while late := [receiver for receiver in self._receivers if receiver.done is None]:
            if not self._read(self._timeout_s):
                raise WaitTimeout(late[0].name, "take and load the weights", self._timeout_s)
        return [receiver.done for receiver in self._receivers if receiver.done is not None]

    def check(self) -> None:
        """After an error of a transport: raise that of a receiver that is gone or has given up, if any."""
        with contextlib.suppress(WaitTimeout):
            self._wait(lambda receiver: receiver.done is not None, "end", _GRACE_S)

    def interrupt(self) -> None:
        """End the wait of another thread here, with an error."""
        self._connected.put(None)
        for receiver in tuple(self._receivers):
            receiver.connection.end_reading()

    def give_up(self, why: str) -> None:
        """Tell the receivers that the version does not come, and disconnect them."""
        for receiver in self._receivers:
            _say(receiver.connection, TransferFailure(why))
        self.close()

    def close(self) -> None:
        """Disconnect the receivers. May be called again."""
        self._stop_listening()
        for receiver in self._receivers:
            receiver.connection.close()
        self._receivers = []

    def _wait(self, reached: Callable[[_ReceiverState], bool], what: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while late := [receiver for receiver in self._receivers if not reached(receiver)]:
            if not self._read(max(until - time.monotonic(), 0.0)):
                raise WaitTimeout(late[0].name, what, timeout_s)

    def _read(self, timeout_s: float) -> bool:
        """Read one message of each receiver that sends one in that time; return whether any does."""
        # of all that are not done, so that each death is noticed, also in the wait for another receiver
        undone = [receiver for receiver in self._receivers if receiver.done is None]
        ready = wait([receiver.connection.socket for receiver in undone], timeout_s)
        for receiver in undone:
            if receiver.connection.socket in ready:
                self._read_from(receiver)
        return bool(ready)

    def _read_from(self, receiver: _ReceiverState) -> None:
        try:
            message: FromReceiver = receiver.connection.receive(self._timeout_s)
        except TimeoutError:
            raise WaitTimeout(receiver.name, "finish the message that it began", self._timeout_s) from None
        except (EOFError, OSError) as error:
            raise RunError(f"{receiver.name} disconnected before it had all weights") from error
        if isinstance(message, TransferFailure):
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
        place = f"{address.host}:{address.port}"
        try:
            self._connection = open_connection((address.host, address.port), address.key, timeout_s)
            self._connection.send(pack(index), timeout_s)
        except TimeoutError:
            raise WaitTimeout(sender, f"answer at {place}", timeout_s) from None
        except (ForeignPeerError, EOFError, OSError) as error:
            raise RunError(
                f"{sender} cannot be reached at {place}: it is gone, or takes part in another sync ({error})"
            ) from error

    def receive(self, what: str) -> FromSender:
        """Wait for the next message."""
        try:
            message: FromSender = self._connection.receive(self._timeout_s)
        except TimeoutError:
            raise WaitTimeout(self.sender, what, self._timeout_s) from None
        except (EOFError, OSError) as error:
            raise RunError(f"{self.sender} disconnected before it could {what}") from error
        if isinstance(message, TransferFailure):
            raise RunError(f"{self.sender} gave the weights up: {message.why}")
        return message

    def tell(self, message: FromReceiver) -> None:
        """Tell the sender."""
        try:
            self._connection.send(pack(message), self._timeout_s)
        except TimeoutError:
            raise WaitTimeout(self.sender, "read a message about the weights", self._timeout_s) from None
        except OSError as error:
            self.check()
            raise RunError(f"{self.sender} disconnected ({error})") from error

    def check(self) -> None:
        """After an error of a transport: raise the sender's error, if it is gone or has given up."""
        until = time.monotonic() + _GRACE_S
        while wait([self._connection.socket], max(until - time.monotonic(), 0.0)):
            self.receive("send all weights")

    def interrupt(self) -> None:
        """End the wait of another thread here, with an error."""
        self._connection.end_reading()

    def give_up(self, why: str) -> None:
        """Tell the sender that this receiver does not take the version, and disconnect."""
        _say(self._connection, TransferFailure(why))
        self.close()

    def close(self) -> None:
        """Disconnect. May be called again."""
        self._connection.close()


def _say(connection: Connection, message: TransferFailure) -> None:
    """Send a last message, unless the other end is gone or does not read."""
    with contextlib.suppress(OSError):
        connection.send(pack(message), _GRACE_S)


# ---- the messages of a link


Source = tuple[int, int, int] | str | None
"""The place of a bucket's bytes: memory (pid, descriptor, inode), a file (path), or None: the group broadcasts them."""


@dataclass(frozen=True)
class BucketNotice:
    """A bucket is ready, or is being broadcast."""

    number: int  # from 0
    layout: PartLayout
    digest: bytes  # xxh3_128 of its bytes (16 bytes)
    source: Source
    delta_bytes: int | None = None  # of its delta, which is sent instead; None: all of its bytes are


@dataclass(frozen=True)
class Heartbeat:
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
class VersionReceipt:
    """A receiver has handed the whole version to its engine."""

    digest: str | None  # of the received version; None: it was not computed
    nbytes: int  # that came from all senders


@dataclass(frozen=True)
class TransferFailure:
    """The member that sends this gives the version up."""

    why: str


FromSender = BucketNotice | Heartbeat | End | TransferFailure
FromReceiver = BucketReceipt | VersionReceipt | TransferFailure
