"""Rewards in separate processes, so that the user's function cannot harm the explorer. Each explorer has its own
processes, which end with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import re
import secrets
import select
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.child_process import ChildPipe, go_on_kept, start_child
from trinity_sync.host.interrupts import ENDING, SignalHandler
from trinity_sync.host.logs import story
from trinity_sync.host.origin import ASK, Origin, end_text, give_origin, keep_origin, place_of, stack_told, tell_stack
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks import base
from trinity_sync.tasks.base import Failure, Response, RewardFunction, RewardResult, SummedResult, Verdict
from trinity_sync.tasks.rewards import RewardSettings

_START_S = 300.0
"""Limit of a process's import of the function."""
_SIGNALS = 3
"""Deaths by signal, per process and batch, that do not count as failures: the signal went to the whole run."""
_OF_SERVERS = re.compile(r"failed: [^(]*(Conn|Timeout|URL|HTTP|gaierror)")
"""Failures that may end when a server is up."""


class RewardImportError(RunError):
    """The function cannot be imported in its process."""


class RewardProcesses:
    """A `Judge` that starts its processes when they are needed, and restarts those that end.

    A pickled copy has its own processes. One thread at a time. `reward`: the function; it is pickled. Its method
    `warm_up`, if there is one, is called once in each process. `name`: of the function, for errors. Raises ConfigError:
    the function cannot be pickled.
    """

    def __init__(self, reward: RewardFunction, judging: RewardSettings, name: str) -> None:
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

    def __reduce__(self) -> tuple[type[RewardProcesses], tuple[RewardFunction, RewardSettings, str]]:
        return type(self), (self._reward, self._judging, self._name)

    @property
    def pids(self) -> list[int]:
        """The pids of the running processes."""
        return [worker.pid for worker in self._workers]

    def warm_up(self) -> None:
        """Start the processes, which import the function in the background."""
        for worker in [worker for worker in self._workers if worker.lost]:
            self._workers.remove(worker)
            worker.close()
        while len(self._workers) < self._judging.processes:
            self._workers.append(RewardWorker(self._pickled, _START_S))

    def judge(self, responses: Sequence[Response], *, step: int) -> list[Verdict]:
        """Judge responses; see `Judge.judge`."""
        verdicts: dict[int, Verdict] = {}
        left = deque(range(len(responses)))
        signals = _SIGNALS * self._judging.processes
        try:
            while len(verdicts) < len(responses):
                self.warm_up()
                for worker in self._workers:
                    if left and worker.idle:
                        following = left.popleft()
                        worker.ask(following, responses[following], self._judging.timeout_s)
                for worker in self._heard():
                    place = worker.current
                    result = worker.answer()
                    if result is None and (result := worker.ended()) is not None:
                        self._workers.remove(worker)
                        if worker.signalled and signals:
                            signals -= 1
                            left.extendleft([] if place is None else [place])
                            continue
                        if not worker.up:
                            raise self._useless(result)
                    if result is not None and place is not None:
                        verdicts[place] = self._verdict(result, responses[place], step)
        except BaseException:
            self.close()  # they may be busy with responses that are no longer needed
            raise
        return [verdicts[number] for number in range(len(responses))]

    def trial(self, prompt: Prompt, *, elsewhere: bool) -> str | None:
        """Judge the answer of a prompt, or the prompt's own text, in a process that ends then, unless the import of the
        function is `slow`. Returns a failure that may not end a run, such as of a server that is not up yet.
        `elsewhere`: the run is on other machines, which may have what the function needs. Raises ConfigError: the
        failure would end a run.
        """
        if getattr(self._reward, "slow", False):
            return None
        one = RewardProcesses(self._reward, RewardSettings("stop", self._judging.timeout_s), self._name)
        text = str(prompt.answer) if isinstance(prompt.answer, str | int | float) else ""
        try:
            one.judge([Response(prompt, text if text.strip() else prompt.text, True)], step=0)
        except RunError as error:
            passing = self._judging.on_error != "stop" or _OF_SERVERS.search(str(error)) is not None
            if elsewhere or (passing and not isinstance(error, RewardImportError)):
                return str(error)
            raise ConfigError(f"task.reward: {error}") from error
        finally:
            one.close()
        return None

    def close(self) -> None:
        """End the processes; `judge` starts new ones."""
        while self._workers:
            self._workers.pop().close()

    def _heard(self) -> list[RewardWorker]:
        """Wait until a process has answered or is overdue; return those."""
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
            return Verdict.of(result)
        error = base.error_of(result, self._name, response.prompt, step)
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
        error = RewardImportError(f"the reward function {self._name} cannot be loaded in its process: {failure.what}")
        if failure.origin is not None:
            give_origin(error, failure.origin)
        return error


# The explorer's side of one process.


_END_S = 2.0
"""Limit of a process's stack dump, and of its end after its connection is closed."""
_MOST_BYTES = 1 << 19
"""Largest answer: a traceback has 20,000 characters at most."""


class RewardWorker:
    """Starts a keeper process, which starts the one that judges. Both end with this object, and with this process.
    `start_s`: limit of its import, seconds. `current`: index of the response that it is judging; None: there is none.
    """

    def __init__(self, reward: bytes, start_s: float) -> None:
        self._stack = os.memfd_create("stack")
        theirs, self._lifeline = os.pipe()
        try:
            further = [self._stack, theirs]  # closing the second ends the process and all that it has started
            self._child, self._pipe = start_child(__name__, None, further=further, with_driver=False)
        finally:
            os.close(theirs)
        self._pipe.most_bytes = _MOST_BYTES
        self._pipe.sender = None  # a grandchild; its first message is not an answer
        self.pid = self._child.pid
        _WORKERS.add(self)
        self._finalizer = weakref.finalize(self, _end, self._child, self._pipe, (self._lifeline, self._stack))
        self.current: int | None = None
        self.up = False
        self._broken = False
        self._failed: Failure | None = None
        self._send(reward, start_s)

    @property
    def idle(self) -> bool:
        """Whether it can judge a response now."""
        return self.up and self.current is None

    @property
    def deadline(self) -> float:
        """Limit of its next answer, by `time.monotonic`."""
        return self._since + self._limit

    @property
    def overdue(self) -> bool:
        return time.monotonic() >= self.deadline

    @property
    def lost(self) -> bool:
        """Whether it has ended or sent something while it was idle."""
        return self.idle and (self._broken or self._pipe.poll(0.0))

    @property
    def signalled(self) -> bool:
        """Whether a signal that ends runs has ended it; call `ended` first."""
        return -(self._child.returncode or 0) in ENDING

    @property
    def descriptors(self) -> tuple[int, int]:
        """See `ChildPipe`."""
        return self._pipe.descriptors

    def ask(self, place: int, response: Response, limit: float) -> None:
        """Have it judge a response. `limit`: of the answer, seconds."""
        self.current = place
        self._send(response, limit)

    def _send(self, question: object, limit: float) -> None:
        self._number = secrets.token_hex(8)  # an earlier response cannot know it
        self._limit, self._since = limit, time.monotonic()
        try:
            self._pipe.send((self._number, question), None if self.up else limit)  # Python may start slowly
        except OSError:
            self._broken = True

    def answer(self) -> RewardResult | Failure | None:
        """Return the answer to the current response; None: there is none yet."""
        try:
            while not self._broken and self._pipe.poll(0.0):
                data = self._pipe.recv_bytes()
                if not data and not self.up:
                    continue
                number, answer = decoded(data)
                if number != self._number:  # unrequested, or an earlier answer again
                    continue
                if self.up and answer is not None:
                    self.current = None
                    return answer
                self.up = answer is None
                self._failed = answer if isinstance(answer, Failure) else None
        except (EOFError, OSError, ValueError, RecursionError):
            self._broken = True
        return None

    def ended(self) -> Failure | None:
        """Return why it cannot go on: it has ended, could not import the function, or is overdue, and then is ended
        here. None: it goes on.
        """
        if self._failed is not None:
            self.close()
            return self._failed
        if not self._broken and not self.overdue:
            return None
        hung = not self._broken
        if hung:
            self._child.send_signal(ASK)
        gone = self._pipe.ended(_END_S)
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
        """Close its descriptors in a forked process, which would keep it alive."""
        if self._finalizer.detach() is not None:
            self._pipe.close()
            os.close(self._lifeline)


_WORKERS: weakref.WeakSet[RewardWorker] = weakref.WeakSet()


def _disown_all() -> None:
    for worker in list(_WORKERS):
        worker.disown()


os.register_at_fork(after_in_child=_disown_all)


def _end(child: Popen[bytes], pipe: ChildPipe, descriptors: tuple[int, int]) -> None:
    pipe.close()
    for descriptor in descriptors:  # the lifeline among them
        os.close(descriptor)
    with contextlib.suppress(TimeoutExpired):  # a dead network disk may block it for ever
        child.wait(_END_S)
    child.kill()  # a hung keeper; its child ends with it


def _how(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"


# The program of such a process. It has one thread; the user's function may hang, crash, fork or exit in it.


Answer = RewardResult | Failure | None
"""Of a response; None: the function is imported."""


def serve(descriptor: int, stack: int, lifeline: int) -> None:
    """Answer one request after another, until the connection is closed."""
    for inherited in (descriptor, stack, lifeline):  # not to programs that the function starts
        os.set_inheritable(inherited, False)
    connection = Connection(descriptor)
    go_on_kept(lifeline, ASK, not_kept=[descriptor])
    counted = {signum: handler for signum in ENDING if callable(handler := signal.getsignal(signum))}
    tell_stack(stack)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines: others write into the same file
            stream.reconfigure(line_buffering=True, write_through=False)
    process = os.getpid()
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(b"")  # before the user's code runs
        number, pickled = connection.recv()
        with _ended_by_signals(counted):
            reward = _loaded(pickled)
        answer: Answer = reward if isinstance(reward, Failure) else None
        while os.getpid() == process:  # a fork of the function must not answer
            connection.send_bytes(encoded(number, answer))
            _flush()
            number, response = connection.recv()
            with _ended_by_signals(counted):
                answer = reward if isinstance(reward, Failure) else base.judged(reward, response)
    _flush()
    os._exit(0)  # also ends threads of the function


@contextlib.contextmanager
def _ended_by_signals(counted: Mapping[signal.Signals, SignalHandler]) -> Iterator[None]:
    """Let signals end this process in the block, and after it while a program of the function runs: the signals may end
    that program, too, and make a verdict wrong. Otherwise the process survives them, which saves importing the function
    again.
    """
    _exchange(counted, dict.fromkeys(counted, signal.SIG_DFL))
    yield
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none
        _exchange(dict.fromkeys(counted, signal.SIG_DFL), counted)


def _exchange(before: Mapping[signal.Signals, SignalHandler], after: Mapping[signal.Signals, SignalHandler]) -> None:
    for signum, handler in before.items():
        if signal.getsignal(signum) == handler:
            signal.signal(signum, after[signum])


def encoded(number: str, answer: Answer) -> bytes:
    """Serialise an answer. A response may have manipulated this process, so `decoded` executes nothing."""
    told = [*answer, answer.parts] if isinstance(answer, SummedResult) else answer
    return json.dumps([number, told], default=astuple).encode()


def decoded(data: bytes) -> tuple[str, Answer]:
    """Return number and answer."""
    match json.loads(data):
        case [str(number), None]:
            return number, None
        case [str(number), [float(reward), (float() | None) as exact]] if math.isfinite(reward + (exact or 0.0)):
            return number, RewardResult(reward, exact)
        case [str(number), [float(reward), None, dict() as parts]] if all(
            isinstance(value, float) and math.isfinite(value) for value in (reward, *parts.values())
        ):
            return number, SummedResult.of(reward, parts)
        case [str(number), [str(what), None]]:
            return number, Failure(what)
        case [str(number), [str(what), [str(place), str(traceback)]]]:
            return number, Failure(what, Origin(place, traceback))
    raise ValueError("not an answer")


def _loaded(pickled: bytes) -> RewardFunction | Failure:
    """Return the function, or a `Failure`."""
    try:
        reward: RewardFunction = pickle.loads(pickled)
        getattr(reward, "warm_up", lambda: None)()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return Failure(end_text(error), keep_origin(error))
    return reward


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
