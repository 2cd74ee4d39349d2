"""Rewards in processes of their own: what the user's function does to its process, the explorer does not feel.

Each explorer has its own of these processes, which end with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from signal import strsignal
from subprocess import Popen, TimeoutExpired

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.child_process import Channel, start_child
from trinity_sync.host.interrupts import ENDING
from trinity_sync.host.logs import story
from trinity_sync.host.origin import ASK, Origin, give_origin, place_of, stack_told
from trinity_sync.tasks import base, reward_process
from trinity_sync.tasks.base import Failure, Response, RewardFunction, RewardResult, Verdict, error_of
from trinity_sync.tasks.rewards import Judging

_START_S = 300.0
"""For a process to import the function."""
_SIGNALS = 3
"""Ends by a signal, per process and batch, that are no failure: the signal went to all processes of the run."""


class RewardProcesses:
    """A `Judge` that starts its processes when they are first needed, and each again that ends.

    May be pickled; the copy has processes of its own. One thread at a time.

    Args:
        reward: judges; it is pickled. One with a method `warm_up` has it called once in each process.
        judging: how.
        name: what errors call it.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(self, reward: RewardFunction, judging: Judging, name: str) -> None:
        self._reward, self._judging, self._name = reward, judging, name
        try:
            self._pickled = pickle.dumps(reward)
        except Exception as error:
            raise ConfigError(
                f"task.reward is {name}, which cannot be sent to the process that judges: {error}; name a function at "
                "the top of a module, with arguments that can be pickled"
            ) from error
        self._workers: list[RewardWorker] = []
        self._logged: set[str] = set()

    def __reduce__(self) -> tuple[type[RewardProcesses], tuple[RewardFunction, Judging, str]]:
        return type(self), (self._reward, self._judging, self._name)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [worker.pid for worker in self._workers]

    def warm_up(self) -> None:
        """Start the processes; they import the function meanwhile."""
        for worker in [worker for worker in self._workers if worker.lost]:
            self._workers.remove(worker)
            worker.close()
        while len(self._workers) < self._judging.processes:
            self._workers.append(RewardWorker(self._pickled, _START_S))

    def judge(self, responses: Sequence[Response], *, step: int) -> list[Verdict]:
        """Judge responses; see `Judge.judge`.

        Raises:
            RunError: one failed and `on_error` is ``stop``, or the function cannot be imported in its process.
        """
        verdicts: dict[int, Verdict] = {}
        left = deque(range(len(responses)))
        signals = _SIGNALS * self._judging.processes
        try:
            while len(verdicts) < len(responses):
                self.warm_up()
                for worker in self._workers:
                    if left and worker.idle:
                        place = left.popleft()
                        worker.ask(place, responses[place], self._judging.timeout_s)
                for worker in self._heard():
                    asked = worker.under_way
                    result = worker.answer()
                    if result is None and (result := worker.ended()) is not None:
                        self._workers.remove(worker)
                        if worker.signalled and signals:
                            signals -= 1
                            left.extendleft([] if asked is None else [asked])
                            continue
                        if not worker.up:
                            raise self._useless(result)
                    if result is not None and asked is not None:
                        verdicts[asked] = self._verdict(result, responses[asked], step)
        except BaseException:
            self.close()  # they are in the middle of something that nobody waits for any more
            raise
        return [verdicts[number] for number in range(len(responses))]

    def close(self) -> None:
        """End the processes; `judge` would start others."""
        while self._workers:
            self._workers.pop().close()

    def _heard(self) -> list[RewardWorker]:
        """Wait until a process has answered, or has had its time; return those."""
        poll = select.poll()
        waited = [worker for worker in self._workers if not worker.idle]
        for worker in waited:
            for descriptor in worker.descriptors:
                poll.register(descriptor, select.POLLIN)
        nearest = min(worker.deadline for worker in waited)
        said = {descriptor for descriptor, _ in poll.poll(max(0.0, nearest - time.monotonic()) * 1000)}
        return [worker for worker in waited if said.intersection(worker.descriptors) or worker.overdue]

    def _verdict(self, result: RewardResult | Failure, response: Response, step: int) -> Verdict:
        if isinstance(result, RewardResult):
            return Verdict(*result)
        error = error_of(result, self._name, response.prompt, step)
        if self._judging.on_error == "stop":
            raise error
        self._log(str(error), result)
        return Verdict(0.0 if self._judging.on_error == "zero" else float("nan"), None, str(error))

    def _log(self, error: str, failure: Failure) -> None:
        """Log the first failure of each kind, and of each place in the user's code."""
        kind = failure.origin.place if failure.origin is not None else failure.what
        if len(self._logged) < 100 and kind not in self._logged:
            self._logged.add(kind)
            story.warning("%s%s", error, f"\n{failure.origin.traceback}" if failure.origin is not None else "")

    def _useless(self, failure: Failure) -> RunError:
        error = RunError(f"the reward function {self._name} cannot be had in its process: {failure.what}")
        if failure.origin is not None:
            give_origin(error, failure.origin)
        return error


# One process that judges, as its explorer sees it.


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
