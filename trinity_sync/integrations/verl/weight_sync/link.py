"""The links of a sync: connections from each receiver to each sender, over which they tell each other how far they are.

A member that dies closes its connections, so the others know at once. Every wait has the limit of the sync. Who
connects has to know the sender's key, which travels through verl's driver and is drawn anew for each sync.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.integrations.verl.weight_sync.members import Address
from trinity_sync.integrations.verl.weight_sync.messages import Done, Failed, FromReceiver, FromSender, Hello, Taken

_STRANGER_S = 10.0
"""Limit for who connects to prove that it belongs to the sync."""
_GRACE_S = 1.0
"""By then the kernel has told of a process that was killed."""


class _Receiver:
    """A receiver, as a sender sees it."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.connection = connection
        self.taken = -1
        self.done: Done | None = None


class Hub:
    """A sender's end.

    Usage::

        hub = Hub(host, timeout_s)                   # tell the receivers hub.address
        hub.meet("trainer rank 0", receivers)
        hub.tell(Bucket(...))
        hub.wait_taken(0)
        hub.wait_done()
        hub.close()

    Args:
        host: an address of this node that receivers reach.
        timeout_s: limit of every wait, seconds.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._timeout_s = timeout_s
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        self._listening.bind((host, 0))
        self._listening.listen(128)
        self._receivers: list[_Receiver] = []
        self.address = Address(host, self._listening.getsockname()[1], secrets.token_bytes(32))

    def meet(self, receivers: Sequence[str]) -> None:
        """Wait until all receivers have connected. Nobody else is let in afterwards.

        Raises:
            WaitTimeout: one has not.
        """
        met: dict[int, Connection] = {}
        until = time.monotonic() + self._timeout_s
        try:
            while len(met) < len(receivers):
                self._listening.settimeout(max(until - time.monotonic(), 0.001))
                try:
                    accepted, _ = self._listening.accept()
                except TimeoutError:
                    late = next(name for index, name in enumerate(receivers) if index not in met)
                    raise WaitTimeout(late, "connect to the sender of the weights", self._timeout_s) from None
                index, connection = self._let_in(accepted)
                if connection is not None and index in range(len(receivers)) and index not in met:
                    met[index] = connection
        except BaseException:
            for connection in met.values():
                connection.close()
            raise
        finally:
            self._listening.close()
        self._receivers = [_Receiver(name, met[index]) for index, name in enumerate(receivers)]

    def _let_in(self, accepted: socket.socket) -> tuple[int, Connection | None]:
        connection = _connection(accepted, min(_STRANGER_S, self._timeout_s))
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            hello = connection.recv()
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return -1, None
        if not isinstance(hello, Hello):
            connection.close()
            return -1, None
        _limit(connection, self._timeout_s)
        return hello.index, connection

    def tell(self, message: FromSender) -> None:
        """Tell all receivers.

        Raises:
            RunError: one is gone, or has given up.
            WaitTimeout: one does not read.
        """
        for receiver in self._receivers:
            try:
                receiver.connection.send(message)
            except BlockingIOError:
                raise WaitTimeout(receiver.name, "read what it is told of the weights", self._timeout_s) from None
            except OSError as error:
                self.check()
                raise RunError(f"{receiver.name} is gone ({error})") from error

    def wait_taken(self, number: int) -> None:
        """Wait until all receivers have a bucket.

        Raises:
            RunError: one is gone, or has given up.
            WaitTimeout: one has not taken it.
        """
        self._wait(lambda receiver: receiver.taken >= number, f"take bucket {number} of the weights", self._timeout_s)

    def wait_done(self) -> list[Done]:
        """Wait until all receivers have handed on the version; return what they say of it.

        Raises:
            RunError: one is gone, or has given up.
            WaitTimeout: one has not.
        """
        self._wait(lambda receiver: receiver.done is not None, "load the weights that it took", self._timeout_s)
        return [receiver.done for receiver in self._receivers if receiver.done is not None]

    def check(self) -> None:
        """After an error of a transport: say which receiver is gone or has given up, if that is why.

        Raises:
            RunError: one is gone, or has given up.
        """
        with contextlib.suppress(WaitTimeout):
            self._wait(lambda receiver: receiver.done is not None, "end", _GRACE_S)

    def give_up(self, why: str) -> None:
        """Tell whoever is still there that the version does not come, and let them go."""
        for receiver in self._receivers:
            with contextlib.suppress(OSError):
                receiver.connection.send(Failed(why))
        self.close()

    def close(self) -> None:
        """Let the receivers go. May be called again."""
        self._listening.close()
        for receiver in self._receivers:
            receiver.connection.close()
        self._receivers = []

    def _wait(self, reached: Callable[[_Receiver], bool], what: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while late := [receiver for receiver in self._receivers if not reached(receiver)]:
            # of all that are not through, so that a death is noticed whoever is waited for
            open_ones = [receiver for receiver in self._receivers if receiver.done is None]
            ready = wait([receiver.connection for receiver in open_ones], max(until - time.monotonic(), 0.0))
            if not ready:
                raise WaitTimeout(late[0].name, what, timeout_s)
            for receiver in open_ones:
                if receiver.connection in ready:
                    self._read(receiver)

    def _read(self, receiver: _Receiver) -> None:
        try:
            message: FromReceiver = receiver.connection.recv()
        except (EOFError, OSError) as error:
            raise RunError(f"{receiver.name} is gone, before it had all weights") from error
        if isinstance(message, Failed):
            raise RunError(f"{receiver.name} did not take the weights: {message.why}")
        if isinstance(message, Taken):
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

    def __init__(self, sender: str, address: Address, index: int, timeout_s: float) -> None:
        self.sender = sender
        self._timeout_s = timeout_s
        try:
            connected = socket.create_connection((address.host, address.port), timeout_s)
        except TimeoutError:
            raise WaitTimeout(sender, f"answer at {address.host}:{address.port}", timeout_s) from None
        except OSError as error:
            raise RunError(f"{sender} cannot be reached at {address.host}:{address.port} ({error})") from error
        self._connection = _connection(connected, timeout_s)
        try:
            answer_challenge(self._connection, address.key)
            deliver_challenge(self._connection, address.key)
            self._connection.send(Hello(index))
        except BlockingIOError:
            self.close()
            raise WaitTimeout(sender, "let this receiver in", timeout_s) from None
        except (AuthenticationError, EOFError, OSError) as error:
            self.close()
            raise RunError(f"{sender} is gone, or takes part in another sync ({error})") from error

    def receive(self, what: str) -> FromSender:
        """Wait for the next message.

        Args:
            what: the sender is to do, for the error.

        Raises:
            RunError: the sender has given up, or is gone.
            WaitTimeout: nothing came.
        """
        try:
            message: FromSender = self._connection.recv()
        except BlockingIOError:
            raise WaitTimeout(self.sender, what, self._timeout_s) from None
        except (EOFError, OSError) as error:
            raise RunError(f"{self.sender} is gone, before it could {what}") from error
        if isinstance(message, Failed):
            raise RunError(f"{self.sender} gave the weights up: {message.why}")
        return message

    def tell(self, message: FromReceiver) -> None:
        """Tell the sender.

        Raises:
            RunError: it is gone, or has given up.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            self.check()
            raise RunError(f"{self.sender} is gone ({error})") from error

    def check(self) -> None:
        """After an error of a transport: say whether the sender is gone or has given up, if that is why.

        Raises:
            RunError: it is gone, or has given up.
        """
        until = time.monotonic() + _GRACE_S
        while wait([self._connection], max(until - time.monotonic(), 0.0)):
            self.receive("send all weights")

    def give_up(self, why: str) -> None:
        """Tell the sender, if it is there, that this receiver does not take the version; and let it go."""
        with contextlib.suppress(OSError):
            self._connection.send(Failed(why))
        self.close()

    def close(self) -> None:
        """Let the sender go. May be called again."""
        self._connection.close()


def _connection(connected: socket.socket, timeout_s: float) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(connected.detach())
    _limit(connection, timeout_s)
    return connection


def _limit(connection: Connection, timeout_s: float) -> None:
    """Have the kernel end what takes longer: also where half of a message has come."""
    seconds = int(timeout_s)
    limit = struct.pack("ll", seconds, max(int((timeout_s - seconds) * 1e6), 0 if seconds else 1))
    with socket.socket(fileno=connection.fileno()) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        same.detach()
