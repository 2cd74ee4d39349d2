"""One process that judges, as its explorer sees it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import weakref
from signal import strsignal
from subprocess import Popen, TimeoutExpired

from trinity_sync.host.child_process import Channel, start_child
from trinity_sync.host.interrupts import ENDING
from trinity_sync.host.origin import Origin
from trinity_sync.host.stacks import ASK, place_of, stack_told
from trinity_sync.tasks import base, reward_process
from trinity_sync.tasks.base import Failure, Response, RewardResult

_END_S = 2.0
"""For a process to say where it stands, or to be gone once its connection is closed."""
_MOST_BYTES = 1 << 19
"""Of one answer: a traceback has 20,000 characters at most."""


class RewardWorker:
    """Starts the process, which is the keeper of the one that judges. Both end when this object does, or this process.

    Args:
        reward: what judges, pickled.
        start_s: limit until that is imported there, seconds.

    Attributes:
        under_way: place of the response that it was asked about and has not answered; None: there is none.
        up: whether it has the function.
    """

    def __init__(self, reward: bytes, start_s: float) -> None:
        self._stack = os.memfd_create("stack")
        theirs, self._lifeline = os.pipe()
        try:
            further = [self._stack, theirs]  # the second ends it, and not without what it has started
            self._child, self._channel = start_child(reward_process.__name__, None, further=further, with_driver=False)
        finally:
            os.close(theirs)
        self._channel.most_bytes = _MOST_BYTES
        self._channel.sender = None  # a child of the child; the first that it says is no answer
        self.pid = self._child.pid
        _WORKERS.add(self)
        self._finalizer = weakref.finalize(self, _end, self._child, self._channel, (self._lifeline, self._stack))
        self.under_way: int | None = None
        self.up = False
        self._broken = False
        self._failed: Failure | None = None
        self._send(reward, start_s)

    @property
    def idle(self) -> bool:
        """Whether it waits to be asked."""
        return self.up and self.under_way is None

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
        """Whether it has ended while it was idle, or said what it was not asked."""
        return self.idle and (self._broken or self._channel.poll(0.0))

    @property
    def signalled(self) -> bool:
        """Whether a signal that ends runs has ended it; known after `ended`."""
        return -(self._child.returncode or 0) in ENDING

    @property
    def descriptors(self) -> tuple[int, int]:
        """See `Channel`."""
        return self._channel.descriptors

    def ask(self, place: int, response: Response, limit: float) -> None:
        """Have it judge a response.

        Args:
            place: what `under_way` calls it.
            response: what to judge.
            limit: for the answer, seconds.
        """
        self.under_way = place
        self._send(response, limit)

    def _send(self, question: object, limit: float) -> None:
        self._number = secrets.token_hex(8)  # which no earlier response can have known
        self._limit, self._since = limit, time.monotonic()
        try:
            self._channel.send((self._number, question), None if self.up else limit)  # Python may be slow to start
        except OSError:
            self._broken = True

    def answer(self) -> RewardResult | Failure | None:
        """Take the answer to the response under way; None: it is not there."""
        try:
            while not self._broken and self._channel.poll(0.0):
                data = self._channel.recv_bytes()
                if not data and not self.up:
                    continue
                number, answer = reward_process.decoded(data)
                if number != self._number:  # the answer to no question, or once more to an earlier one
                    continue
                if self.up and answer is not None:
                    self.under_way = None
                    return answer
                self.up = answer is None
                self._failed = answer if isinstance(answer, Failure) else None
        except (EOFError, OSError, ValueError, RecursionError):
            self._broken = True
        return None

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
        gone = self._channel.ended(_END_S)
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

    def close(self) -> None:
        """End the process, and all that it has started."""
        self._finalizer()

    def disown(self) -> None:
        """In a process that was forked of the one which it belongs to: hold nothing by which it would live on."""
        if self._finalizer.detach() is not None:
            self._channel.close()
            os.close(self._lifeline)


_WORKERS: weakref.WeakSet[RewardWorker] = weakref.WeakSet()


def _disown_all() -> None:
    for worker in list(_WORKERS):
        worker.disown()


os.register_at_fork(after_in_child=_disown_all)


def _end(child: Popen[bytes], channel: Channel, descriptors: tuple[int, int]) -> None:
    channel.close()
    for descriptor in descriptors:  # one of them keeps it alive
        os.close(descriptor)
    with contextlib.suppress(TimeoutExpired):  # a dead network disk may hold it for ever
        child.wait(_END_S)
    child.kill()  # a keeper that stands still; what it keeps ends with it


def _how(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code} ({strsignal(-code)})"
