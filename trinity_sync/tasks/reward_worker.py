"""One process that judges, as its explorer sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired

from trinity_sync.host.child_process import start_child
from trinity_sync.host.origin import Origin
from trinity_sync.host.stacks import ASK, place_of, stack_told
from trinity_sync.tasks import base, reward_process
from trinity_sync.tasks.base import Failure, Response, RewardResult

_END_S = 2.0
"""For a process to say where it stands, or to be gone once its connection is closed."""


class RewardWorker:
    """Starts the process. It ends when this object does, or this process.

    Args:
        reward: what judges, pickled.
        start_s: limit until that is imported there, seconds.

    Attributes:
        under_way: numbers of the responses that it was given and has not answered, in their order.
        up: whether it has the function.
    """

    def __init__(self, reward: bytes, start_s: float) -> None:
        self._stack = os.memfd_create("stack")
        theirs, self._lifeline = os.pipe()
        try:
            self._child, self._connection = start_child(reward_process.__name__, None, further=[self._stack, theirs])
        finally:
            os.close(theirs)
        self.pid = self._child.pid
        self._pidfd = os.pidfd_open(self.pid)
        _WORKERS.add(self)
        descriptors = (self._lifeline, self._stack, self._pidfd)
        self._finalizer = weakref.finalize(self, _end, self._child, self._connection, descriptors)
        self.under_way: deque[int] = deque()
        self.up = False
        self._broken = False
        self._failed: Failure | None = None
        self._limit = start_s
        self._since = time.monotonic()
        try:
            self._connection.send_bytes(reward)
        except OSError:
            self._broken = True

    @property
    def idle(self) -> bool:
        """Whether it waits to be given something."""
        return self.up and not self.under_way and not self._broken

    @property
    def deadline(self) -> float:
        """When its next answer has to be there, by `time.monotonic`."""
        return self._since + self._limit

    @property
    def overdue(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.deadline

    @property
    def lost(self) -> bool:
        """Whether it has ended while it was idle."""
        return self.idle and self._gone(0.0)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Where there is something to read when an answer has come, and when the process has ended: a process that it
        has forked may hold the connection open.
        """
        return self._connection.fileno(), self._pidfd

    def give(self, numbers: Sequence[int], responses: Sequence[Response], limit: float) -> None:
        """Have it judge responses.

        Args:
            numbers: what `answers` calls them.
            responses: as many.
            limit: for each, seconds.
        """
        self.under_way.extend(numbers)
        self._limit = limit
        self._since = time.monotonic()
        try:
            self._connection.send(responses)
        except OSError:
            self._broken = True

    def answers(self) -> Iterator[tuple[int, RewardResult | Failure]]:
        """Take the answers that are there."""
        gone = self._gone(0.0)  # before the answers are taken: none comes after
        try:
            while not self._broken and self._connection.poll():
                answer = self._connection.recv()
                self._since = time.monotonic()
                if self.up:
                    yield self.under_way.popleft(), answer
                else:
                    self.up, self._failed = answer is None, answer
        except (EOFError, OSError):
            self._broken = True
        self._broken = self._broken or gone

    def ended(self) -> Failure | None:
        """Why it does not go on: it has ended, has not got the function, or is overdue, and then is ended here; None:
        it goes on.
        """
        if self._failed is not None:
            self.close()
            return self._failed
        if not self._broken and not self.overdue:
            return None
        hung = not self._broken
        if hung:
            self._child.send_signal(ASK)
        gone = self._gone(_END_S)
        stack = stack_told(self._stack)
        self.close()
        if hung:
            what = f"did not {'return' if self.up else 'come up'} within {self._limit:g} s"
        elif gone:
            what = f"ended its process {_how(self._child.returncode)}"
        else:
            what = "closed the connection of its process"
        place = place_of(stack, base.__file__)
        if place is None:
            return Failure(what)
        return Failure(f"{what} ({place})", Origin(place, stack))

    def _gone(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def close(self) -> None:
        """End the process, and all that it has started."""
        self._finalizer()

    def disown(self) -> None:
        """In a process that was forked of the one which it belongs to: hold nothing by which it would live on."""
        if self._finalizer.detach() is not None:
            self._connection.close()
            os.close(self._lifeline)


_WORKERS: weakref.WeakSet[RewardWorker] = weakref.WeakSet()


def _disown_all() -> None:
    for worker in list(_WORKERS):
        worker.disown()


os.register_at_fork(after_in_child=_disown_all)


def _end(child: Popen[bytes], connection: Connection, descriptors: Sequence[int]) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # before it is waited for: its number cannot be another's yet
    with contextlib.suppress(TimeoutExpired):  # a dead network disk may hold it for ever
        child.wait(_END_S)
    for descriptor in descriptors:
        os.close(descriptor)


def _how(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
