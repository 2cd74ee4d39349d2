"""The links of a sync: connections from each receiver to each sender, over which they tell each other how far they are.

A member that dies closes its connections, so the others know at once. Every wait has the limit of the sync. Who
connects has to know the sender's key, which travels through verl's driver and is drawn anew for each sync.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.weights import shards
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
        """Wait until all receivers have connected. Nobody else is let in afterwards.

        Raises:
            RunError: nobody can connect.
            WaitTimeout: one has not.
        """
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
        """Tell all receivers, once what they have said meanwhile was read.

        Raises:
            RunError: one is gone, or has given up.
            WaitTimeout: one does not read.
        """
        while self._read(0):
            pass
        for receiver in self._receivers:
            try:
                receiver.wire.connection.send(message)
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
            WaitTimeout: those that have not say nothing any more.
        """
        while late := [receiver for receiver in self._receivers if receiver.done is None]:
            if not self._read(self._timeout_s):
                raise WaitTimeout(late[0].name, "go on to take and load the weights", self._timeout_s)
        return [receiver.done for receiver in self._receivers if receiver.done is not None]

    def check(self) -> None:
        """After an error of a transport: say which receiver is gone or has given up, if that is why.

        Raises:
            RunError: one is gone, or has given up.
        """
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
            raise WaitTimeout(receiver.name, "end what it began to say", self._timeout_s) from None
        except (EOFError, OSError) as error:
            raise RunError(f"{receiver.name} is gone, before it had all weights") from error
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
            message: FromSender = self._wire.connection.recv()
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
            WaitTimeout: it does not read.
        """
        try:
            self._wire.connection.send(message)
        except BlockingIOError:
            raise WaitTimeout(self.sender, "read what it is told of the weights", self._timeout_s) from None
        except OSError as error:
            self.check()
            raise RunError(f"{self.sender} is gone ({error})") from error

    def check(self) -> None:
        """After an error of a transport: say whether the sender is gone or has given up, if that is why.

        Raises:
            RunError: it is gone, or has given up.
        """
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


# Who takes part in a sync: what each member says of itself beforehand, and what it is told of the others.


class Node(NamedTuple):
    """Where memory can be shared: one kernel, and one space of process numbers in it.

    Attributes:
        host: the host's name, for messages.
        boot: what tells this kernel's run from all others.
        pids: what tells the space of process numbers (a container has one of its own).
    """

    host: str
    boot: str
    pids: int


class SenderAddress(NamedTuple):
    """Where a sender is reached, and what one has to know to be let in."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True)
class MemberReady:
    """What a member says when it is prepared.

    Attributes:
        node: where it runs.
        pid: its process.
        settings: its own.
        address: where receivers reach it, where it can send; else None.
        meeting: what the mode has receivers know of a sender: for nccl the port of the store where the group meets,
            for checkpoint the folder of the version's lease.
    """

    node: Node
    pid: int
    settings: WeightSyncSettings
    address: SenderAddress | None = None
    meeting: int | str | None = None


@dataclass(frozen=True)
class Sender:
    """A sender as receivers have to know it."""

    name: str
    address: SenderAddress
    meeting: int | str | None


@dataclass(frozen=True)
class MemberPlace:
    """What a member is told.

    Attributes:
        role: ``sender``; ``receiver``; ``gatherer``: takes part in the trainer's gathers, and sends nothing.
        index: its place among those of its role.
        name: its own, for messages to others.
        senders, receivers: all of them.
    """

    role: Literal["sender", "receiver", "gatherer"]
    index: int
    name: str
    senders: tuple[Sender, ...]
    receivers: tuple[str, ...]


def this_node() -> Node:
    """Return the node of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Node(socket.gethostname(), boot, Path("/proc/self/ns/pid").stat().st_ino)


def this_process(settings: WeightSyncSettings, address: SenderAddress | None, meeting: int | str | None) -> MemberReady:
    """Return what this process says of itself."""
    return MemberReady(this_node(), os.getpid(), settings, address, meeting)


def place(
    ranks: Sequence[MemberReady], rollout: Sequence[MemberReady], *, all_send: bool
) -> tuple[list[MemberPlace], list[MemberPlace]]:
    """Give every member its place.

    Args:
        ranks: the trainer's, in the order of their ranks.
        rollout: the receivers.
        all_send: whether each trainer rank sends what it holds; else rank 0 sends all, and the others gather.

    Returns:
        The places of the trainer's ranks and of the receivers.

    Raises:
        RunError: there is nobody to send or to receive, the settings differ, or memory is not shared by all.
    """
    if not ranks or not rollout:
        raise RunError(f"weights cannot be sent from {len(ranks)} trainer ranks to {len(rollout)} receivers")
    names = [_named("trainer rank", number, ready) for number, ready in enumerate(ranks)]
    receivers = tuple(_named("rollout worker", number, ready) for number, ready in enumerate(rollout))
    _check_alike([*ranks, *rollout], [*names, *receivers])
    sending = len(ranks) if all_send else 1
    if ranks[0].settings.mode == "memory":
        _check_one_node([*ranks[:sending], *rollout], [*names[:sending], *receivers])
    senders = tuple(_sender(name, ready) for name, ready in zip(names[:sending], ranks[:sending], strict=True))
    of_ranks = [
        MemberPlace("sender", number, name, senders, receivers)
        if number < sending
        else MemberPlace("gatherer", number - sending, name, senders, receivers)
        for number, name in enumerate(names)
    ]
    return of_ranks, [
        MemberPlace("receiver", number, name, senders, receivers) for number, name in enumerate(receivers)
    ]


def _named(kind: str, number: int, ready: MemberReady) -> str:
    return f"{kind} {number} (pid {ready.pid} on {ready.node.host})"


def _sender(name: str, ready: MemberReady) -> Sender:
    if ready.address is None:
        raise RunError(f"{name} was not made as the trainer's first rank, so nobody can reach it to get weights")
    return Sender(name, ready.address, ready.meeting)


def _check_alike(members: Sequence[MemberReady], names: Sequence[str]) -> None:
    for ready, name in zip(members, names, strict=True):
        if ready.settings != members[0].settings:
            raise RunError(f"{name} has {ready.settings}, {names[0]} has {members[0].settings}: they must be equal")


def _check_one_node(members: Sequence[MemberReady], names: Sequence[str]) -> None:
    for ready, name in zip(members, names, strict=True):
        if (ready.node.boot, ready.node.pids) != (members[0].node.boot, members[0].node.pids):
            raise RunError(
                f"{name} shares no memory with {names[0]}: they run on different nodes, or in different containers. "
                "Set engine_kwargs' mode to nccl (over the network) or to checkpoint (through a shared folder)"
            )


# What a sender and its receivers say to each other over their link.


Source = tuple[int, int, int] | str | None
"""Where a bucket's bytes are: in memory (pid, descriptor, inode), in a file (path), or on their way over the group."""


@dataclass(frozen=True)
class ReceiverHello:
    """A receiver connects.

    Attributes:
        index: which.
    """

    index: int


@dataclass(frozen=True)
class BucketNotice:
    """A bucket is there, or on its way.

    Attributes:
        number: counted from 0.
        layout: what lies where in it.
        digest: xxh3_128 of its bytes (16 bytes).
        source: where they are.
    """

    number: int
    layout: PartLayout
    digest: bytes
    source: Source


@dataclass(frozen=True)
class Working:
    """The sender goes on with something that takes its time; there is nothing to read yet."""


@dataclass(frozen=True)
class End:
    """All buckets were sent.

    Attributes:
        step: the trainer's global step, of which the weights are; None: verl did not say.
        buckets: how many.
        tensors: how many are in them.
        digest: of the version; None: it was not computed, or the sender does not hold all of it.
    """

    step: int | None
    buckets: int
    tensors: int
    digest: str | None


@dataclass(frozen=True)
class BucketReceipt:
    """A receiver has a bucket, and all before it, in memory of its own.

    Attributes:
        number: of the bucket.
    """

    number: int


@dataclass(frozen=True)
class Done:
    """A receiver has handed on the whole version.

    Attributes:
        digest: of what it has received; None: it was not computed.
        nbytes: of all buckets that it has received, from all senders.
    """

    digest: str | None
    nbytes: int


@dataclass(frozen=True)
class Failed:
    """Who says this gives the version up.

    Attributes:
        why: in words.
    """

    why: str


FromSender = BucketNotice | Working | End | Failed
FromReceiver = BucketReceipt | Done | Failed


# What the user says of the weight sync: the keys of ``engine_kwargs.<backend>``, checked when an engine is made.


_FLOATING = tuple(name for name in shards.NAMES if shards.is_floating(name))
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("memory", "nccl", "checkpoint"),
    "transport": ("auto", "nccl", "gloo"),
    "verify": ("full", "bucket"),
    "wire_dtype": (None, *_FLOATING),
}
_LONGEST_S = 7 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class WeightSyncSettings:
    """The keys, which are equal on all members.

    Attributes:
        mode: how bytes travel. ``memory``: through shared memory of the node; ``nccl``: over a process group of the
            sync; ``checkpoint``: through a folder that all nodes share.
        timeout_s: limit of every wait for another member, seconds.
        bucket_mb: MiB that travel at a time, at most verl's ``update_weights_bucket_megabytes``.
        wire_dtype: the dtype of floating tensors on their way, such as ``BF16``; None: as the trainer holds them.
        verify: ``full``: each bucket's digest, and that of the version, as checkpoints have it; ``bucket``: only the
            first.
        transport: of mode nccl: ``nccl`` between GPUs, ``gloo`` between CPUs, ``auto``: as there are GPUs.
        dir: of mode checkpoint: the folder.
    """

    mode: str = "memory"
    timeout_s: float = 600.0
    bucket_mb: int = 64
    wire_dtype: str | None = None
    verify: str = "full"
    transport: str = "auto"
    dir: str | None = None


def read(given: Mapping[str, object], backend: str) -> WeightSyncSettings:
    """Check the keys.

    Args:
        given: as verl hands them over.
        backend: the name under which they stand.

    Raises:
        ConfigError: names the key.
    """
    for key, value in given.items():
        if problem := _problem(key, value):
            raise ConfigError(f"{_place(backend)}{key}={value}: {problem}")
    settings = WeightSyncSettings(**given)  # type: ignore[arg-type]  # each was looked at
    if settings.mode == "checkpoint" and settings.dir is None:
        raise ConfigError(f"{_place(backend)}dir is needed for mode=checkpoint: name a folder that all nodes share")
    if settings.mode != "checkpoint" and settings.dir is not None:
        raise ConfigError(f"{_place(backend)}dir={settings.dir} has no effect with mode={settings.mode}; leave it out")
    if settings.mode != "nccl" and settings.transport != "auto":
        raise ConfigError(
            f"{_place(backend)}transport={settings.transport} has no effect with mode={settings.mode}; leave it out"
        )
    return settings


def _place(backend: str) -> str:
    return f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{backend}."


def _problem(key: str, value: object) -> str | None:
    known = [field.name for field in dataclasses.fields(WeightSyncSettings)]
    if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        return f"there is no such key{f', did you mean {near[0]}' if near else ''}; the keys are {', '.join(known)}"
    if key in _CHOICES:
        choices = _CHOICES[key]
        return None if value in choices else f"expected one of {', '.join(str(one or 'null') for one in choices)}"
    if key == "timeout_s":
        fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST_S
        return None if fine and math.isfinite(float(str(value))) else "expected seconds, above 0 and at most a week"
    if key == "bucket_mb":
        fine = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if fine else "expected a whole number of MiB, at least 1"
    fine = value is None or (isinstance(value, str) and Path(value).is_absolute())
    return None if fine else "expected an absolute path, since members work in different folders"


# One connection of a sync: with a limit to each wait, and another thread may interrupt who waits at it.


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
