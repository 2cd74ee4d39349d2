"""Rewards in processes of their own: what the user's function does to its process, the explorer does not feel.

Each explorer has its own of these processes, which end with it.
"""

from __future__ import annotations

import pickle
import select
import time
from collections import deque
from collections.abc import Sequence

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.logs import story
from trinity_sync.host.origin import give_origin
from trinity_sync.tasks.base import Failure, Response, RewardFunction, RewardResult, Verdict, error_of
from trinity_sync.tasks.judging import Judging
from trinity_sync.tasks.reward_worker import RewardWorker

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
