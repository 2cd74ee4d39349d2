"""Validation: explorers answer prompts that nothing is trained on. Runs in the driver.

Its random numbers are separate, so a run's training samples are the same with and without it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinity_sync.actors.calls import DeathError
from trinity_sync.actors.explorer_client import LOAD_TRIES, LoadReport
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import ProcessLoss, RunError, TrinityError, WaitTimeout
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.metrics import Line, ValidationAnswers, ValidationTimes
from trinity_sync.samples.record import Drawing, Prompt, Purpose
from trinity_sync.sync.base import Publisher

if TYPE_CHECKING:
    from trinity_sync.explorer.pool import ExplorerPool


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """When validations take place, and how samples are drawn. `temperature`: 0 takes the most likely tokens.
    `at_a_time`: samples of one request to all explorers together: as many as of a training step, so that
    `explorer.timeout_s` fits both.
    """

    times: ValidationTimes
    samples_per_prompt: int
    temperature: float
    at_a_time: int

    @property
    def drawing(self) -> Drawing:
        return Drawing(purpose=Purpose.VALIDATION, temperature=self.temperature)


def in_pieces(prompts: Sequence[Prompt], samples_per_prompt: int, at_a_time: int) -> Iterator[Sequence[Prompt]]:
    """Cut prompts into pieces of at most `at_a_time` samples, and at least one prompt."""
    many = max(1, at_a_time // samples_per_prompt)
    return (prompts[at : at + many] for at in range(0, len(prompts), many))


class Validation:
    """Has all explorers answer the prompts, each its share, while training waits. `prompts`: all of them, at least one.
    `pool`: the explorers, which hold the version to be validated. `mode`: the sync mode, by which a restarted explorer
    loads.
    """

    def __init__(
        self, prompts: Sequence[Prompt], pool: ExplorerPool, mode: Publisher, settings: ValidationSettings
    ) -> None:
        self._prompts = prompts
        self._pool = pool
        self._mode = mode
        self._settings = settings
        self._answers: ValidationAnswers | None = None

    @property
    def at_start(self) -> bool:
        return self._settings.times.at_start

    @property
    def failure(self) -> str:
        return self._answers.failure if self._answers is not None else ""

    def due(self, step: int) -> bool:
        return self._settings.times.due(step)

    def run(self, step: int) -> dict[str, float]:
        """Validate the version of a step, which all explorers hold; return the metrics, ``val/...``."""
        each, drawing = self._settings.samples_per_prompt, self._settings.drawing
        batches = [
            self._pool.generate(step, prompts, each, self._mode.deliver, drawing)
            for prompts in in_pieces(self._prompts, each, self._settings.at_a_time)
        ]
        self._answers = ValidationAnswers(step, batches, self._prompts)
        return self._answers.metrics

    def excerpt(self, groups: int) -> list[Line]:
        return self._answers.excerpt(groups) if self._answers is not None else []


# Validation of `trainer.schedule=free`: the first explorer that asks for work loads the version that is due and answers
# all prompts with it. The others go on making training samples.


class VersionValidations:
    """The validations of a run in the background of training. Any thread.

    Args:
        prompts: all of them, at least one.
        settings: see `ValidationSettings`; `at_a_time` is for one explorer.
        begins_with: step of the version that the run begins with.
        keep: lease a version until it is validated, not only until it is loaded: there are slots enough.
        explorer_timeout_s: limit of a wait without any progress, seconds.
        on_fault: called with each loss and each retry: (where, error).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        pool: ExplorerPool,
        settings: ValidationSettings,
        *,
        begins_with: int,
        attempt: int,
        synchronizer: SynchronizerClient,
        keep: bool,
        explorer_timeout_s: float,
        on_load: Callable[[LoadReport], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._prompts = prompts
        self._pool = pool
        self._settings = settings
        self._begins_with = begins_with
        self._attempt = attempt
        self._synchronizer = synchronizer
        self._keep = keep
        self._timeout_s = explorer_timeout_s
        self._on_load = on_load
        self._on_fault = on_fault
        self._reader = RoundMember.new("validation")
        self._leases: dict[int, int] = {}
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._running: dict[int, str] = {}
        self._failures: Counter[int] = Counter()
        self._done: list[ValidationAnswers] = []
        self._error: BaseException | None = None
        self._progress = time.monotonic()

    # -- called by the training loop

    def due(self, step: int) -> bool:
        times = self._settings.times
        return times.at_start if step == self._begins_with else times.due(step)

    def open(self, step: int) -> bool:
        """Tell whether a published version of this step or an earlier one is still to be validated."""
        with self._changed:
            return any(one <= step for one in (*self._waiting, *self._running))

    def taken(self) -> list[ValidationAnswers]:
        """Return the validations that ended since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self) -> None:
        """Wait until no validation is open. Raises the error given to `fail`."""
        with self._changed:
            self._progress = time.monotonic()
            while self._waiting or self._running:
                if self._error is not None:
                    raise self._error
                left = self._progress + self._timeout_s - time.monotonic()
                if left <= 0:
                    who = ", ".join(sorted(self._running.values())) or "the explorers"
                    step = min([*self._waiting, *self._running])
                    raise WaitTimeout(who, f"validate version {step}", self._timeout_s)
                self._changed.wait(left)

    def give_up(self, why: str) -> None:
        """Report each open validation as a fault."""
        with self._changed:
            steps = sorted([*self._waiting, *self._running])
        for step in steps:
            self._lost(step, why)

    # -- called by the explorers' threads

    def published(self, step: int) -> None:
        """Add the version of a step, the newest, to the waiting ones if it is due."""
        if not self.due(step):
            return
        call = self._synchronizer.lease(self._reader, Version(self._attempt, step))
        lease = call.result(self._synchronizer.timeout_s)
        with self._changed:
            self._leases[step] = lease.id
            self._waiting.append(step)

    def hand_out(self, name: str) -> int | None:
        """Give an idle explorer the oldest waiting version; None: there is none."""
        with self._changed:
            if not self._waiting:
                return None
            step = self._waiting.pop(0)
            self._running[step] = name
            self._progress = time.monotonic()
            return step

    def run(self, name: str, step: int, progress: Callable[[], None]) -> None:
        """Have an explorer validate the version that `hand_out` gave it; calls `progress` after each request. Raises
        DeathError, WaitTimeout: the explorer is lost; the validation waits for another.
        """
        version, began = Version(self._attempt, step), time.monotonic()
        try:
            if not self._loaded(name, version):
                return
            batches = []
            each, settings = self._settings.samples_per_prompt, self._settings
            for prompts in in_pieces(self._prompts, each, settings.at_a_time):
                batches.append(self._pool.answer(name, version, prompts, each, settings.drawing))
                self._note(progress)
        except (DeathError, WaitTimeout) as error:
            if self._open_again(step):
                self._on_fault(name, f"version {version} is to be validated once more: {error}")
            raise
        answers = ValidationAnswers(step, batches, self._prompts, time.monotonic() - began)
        self._release(step)
        with self._changed:
            if self._running.pop(step, None) is not None:
                self._done.append(answers)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Have `wait` raise an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _loaded(self, name: str, version: Version) -> bool:
        """Have an explorer load a version; False: it could not, and the validation is retried or given up."""
        try:
            report = self._pool.take(name, version)
        except ProcessLoss:
            raise
        except RunError as error:
            self._failures[version.step] += 1
            if self._failures[version.step] < LOAD_TRIES:
                if self._open_again(version.step):
                    self._on_fault(name, str(error))
            else:
                self._lost(version.step, str(error))
            return False
        self._on_load(report)
        if not self._keep:
            self._release(version.step)
        return True

    def _note(self, progress: Callable[[], None]) -> None:
        progress()
        with self._changed:
            self._progress = time.monotonic()

    def _open_again(self, step: int) -> bool:
        """Put a version back among the waiting ones; False: it was given up meanwhile."""
        with self._changed:
            was_running = self._running.pop(step, None) is not None
            if was_running:
                self._waiting.insert(0, step)
            self._progress = time.monotonic()
            self._changed.notify_all()
            return was_running

    def _lost(self, step: int, why: str) -> None:
        self._release(step)
        with self._changed:
            self._running.pop(step, None)
            if step in self._waiting:
                self._waiting.remove(step)
            self._changed.notify_all()
        self._on_fault(f"validation of version {step}", f"it is not validated: {why}")

    def _release(self, step: int) -> None:
        """Release the lease of a version; without this it expires."""
        with self._changed:
            lease = self._leases.pop(step, None)
        if lease is not None:
            try:
                self._synchronizer.release(lease).result(self._synchronizer.timeout_s)
            except TrinityError as error:
                self._on_fault(f"validation of version {step}", f"its slot is held until its lease ends: {error}")
