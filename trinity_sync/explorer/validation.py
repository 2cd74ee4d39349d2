"""Validation: how good a version is that explorers hold, on prompts that nothing is learnt from. In the driver.

What is drawn for it has random numbers of its own, so a run's training samples are the same with and without it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trinity_sync.actors.calls import MemberDied
from trinity_sync.actors.explorer_client import LOAD_TRIES, LoadReport
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.excerpt import Line, excerpt
from trinity_sync.samples.position import ValidationTimes, validation_metrics
from trinity_sync.samples.record import Drawing, Prompt, Purpose
from trinity_sync.sync.base import Publisher


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """When a validation takes place, and how.

    Attributes:
        times: when.
        samples_per_prompt: samples of each prompt.
        temperature: at which they are drawn; 0: the most likely tokens.
        at_a_time: samples that explorers are asked for at a time, all together: as many as for a step, so that
            `explorer.timeout_s` is a limit for either.
    """

    times: ValidationTimes
    samples_per_prompt: int
    temperature: float
    at_a_time: int

    @property
    def drawing(self) -> Drawing:
        """How the samples are drawn."""
        return Drawing(purpose=Purpose.VALIDATION, temperature=self.temperature)


class Answers:
    """The samples of a validation.

    Args:
        step: whose version was to make them.
        batches: all of them.
        prompts: which they answer.

    Attributes:
        step: as given.
        metrics: ``val/...``.
        failure: why a response could not be judged, the first; empty: all were.

    Raises:
        RunError: another version made one.
    """

    def __init__(self, step: int, batches: Sequence[SampleBatch], prompts: Sequence[Prompt]) -> None:
        self.step = step
        self._prompts = prompts
        self._batch = SampleBatch.concatenate(batches)
        if odd := sorted({*np.unique(self._batch.version_steps).tolist()} - {step}):
            raise RunError(f"version {odd[0]} made samples for the validation of version {step}")
        self.failure = next(filter(None, self._batch.errors), "")
        self.metrics = validation_metrics(self._batch)

    def excerpt(self, groups: int) -> list[Line]:
        """Write out the samples of the first prompts, so many."""
        return excerpt(self._batch, None, groups, lambda step, number: self._prompts[number], validation=True)


def in_pieces(prompts: Sequence[Prompt], samples_per_prompt: int, at_a_time: int) -> Iterator[Sequence[Prompt]]:
    """Cut prompts into pieces of so many samples, or of one prompt."""
    many = max(1, at_a_time // samples_per_prompt)
    return (prompts[at : at + many] for at in range(0, len(prompts), many))


class Validation:
    """Has all explorers answer the validation's prompts, each a share.

    Args:
        prompts: all of them, at least one.
        pool: the explorers, all of which hold the version to be validated.
        mode: the sync mode, by which one that was started again loads.
        settings: see `ValidationSettings`.
    """

    def __init__(
        self, prompts: Sequence[Prompt], pool: ExplorerPool, mode: Publisher, settings: ValidationSettings
    ) -> None:
        self._prompts = prompts
        self._pool = pool
        self._mode = mode
        self._settings = settings
        self._answers: Answers | None = None

    @property
    def at_start(self) -> bool:
        """Whether what the run begins with is validated."""
        return self._settings.times.at_start

    @property
    def failure(self) -> str:
        """Why a response of the last validation could not be judged, the first; empty: all were."""
        return self._answers.failure if self._answers is not None else ""

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        return self._settings.times.due(step)

    def run(self, step: int) -> dict[str, float]:
        """Validate the version of a step, which all explorers have loaded; return the metrics, ``val/...``.

        Raises:
            RunError: an explorer died and no restart is left, a reward failed, or another version made a sample.
        """
        each, drawing = self._settings.samples_per_prompt, self._settings.drawing
        batches = [
            self._pool.generate(step, prompts, each, self._mode.deliver, drawing)
            for prompts in in_pieces(self._prompts, each, self._settings.at_a_time)
        ]
        self._answers = Answers(step, batches, self._prompts)
        return self._answers.metrics

    def excerpt(self, groups: int) -> list[Line]:
        """Write out samples of the last validation for its first prompts, so many."""
        return self._answers.excerpt(groups) if self._answers is not None else []


# Validation where explorers go at their own pace: the first one that asks for work takes the version that is due,
# answers all prompts with it, and goes on; the others make samples meanwhile. In the driver.


class Answering(Protocol):
    """What is asked of the explorers; `ExplorerPool` is that."""

    def take(self, name: str, version: Version) -> LoadReport:
        """Have one load this version."""
        ...

    def answer(
        self, name: str, version: Version, prompts: Sequence[Prompt], samples_per_prompt: int, drawing: Drawing
    ) -> SampleBatch:
        """Have it make samples with the version that it holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Validated:
    """What became of a validation.

    Attributes:
        answers: the samples.
        total_s: seconds that the explorer took, its load included.
    """

    answers: Answers
    total_s: float


class VersionValidations:
    """The validations of a run, from the publication of their versions to what was measured. Any thread.

    Args:
        prompts: all of them, at least one.
        members: the explorers.
        settings: see `ValidationSettings`; `at_a_time` is for one explorer.
        begins_with: step of the version that the run begins with.
        attempt: the run's.
        synchronizer: knows the versions.
        keep: hold a version until it is validated, and not only until it is loaded: there are slots enough.
        timeout_s: limit of a wait in which nothing happens, seconds.
        on_load: told of each load.
        on_fault: told what was lost or repeated: (where, error).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        members: Answering,
        settings: ValidationSettings,
        *,
        begins_with: int,
        attempt: int,
        synchronizer: SynchronizerClient,
        keep: bool,
        timeout_s: float,
        on_load: Callable[[LoadReport], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._prompts = prompts
        self._members = members
        self._settings = settings
        self._begins_with = begins_with
        self._attempt = attempt
        self._synchronizer = synchronizer
        self._keep = keep
        self._timeout_s = timeout_s
        self._on_load = on_load
        self._on_fault = on_fault
        self._reader = RoundMember.new("validation")
        self._leases: dict[int, int] = {}
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._out: dict[int, str] = {}
        self._failures: Counter[int] = Counter()
        self._done: list[Validated] = []
        self._error: BaseException | None = None
        self._progress = time.monotonic()

    # -- the loop's side

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        times = self._settings.times
        return times.at_start if step == self._begins_with else times.due(step)

    def open(self, step: int) -> bool:
        """Tell whether a version that was published, of this step or before, is still to be validated."""
        with self._changed:
            return any(one <= step for one in (*self._waiting, *self._out))

    def taken(self) -> list[Validated]:
        """Return what was done since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self) -> None:
        """Wait until nothing is open.

        Raises:
            RunError: the run has failed, as `fail` was told.
            WaitTimeout: nothing happened for too long.
        """
        with self._changed:
            self._progress = time.monotonic()
            while self._waiting or self._out:
                if self._error is not None:
                    raise self._error
                left = self._progress + self._timeout_s - time.monotonic()
                if left <= 0:
                    who = ", ".join(sorted(self._out.values())) or "the explorers"
                    step = min([*self._waiting, *self._out])
                    raise WaitTimeout(who, f"validate version {step}", self._timeout_s)
                self._changed.wait(left)

    def give_up(self, why: str) -> None:
        """Tell of all that is open that it will not be done."""
        with self._changed:
            steps = sorted([*self._waiting, *self._out])
        for step in steps:
            self._lost(step, why)

    # -- the explorers' side

    def published(self, step: int) -> None:
        """Take note that the version of a step is the newest."""
        if not self.due(step):
            return
        lease = self._synchronizer.lease(self._reader, Version(self._attempt, step))
        held = lease.result(self._synchronizer.timeout_s)
        with self._changed:
            self._leases[step] = held.id
            self._waiting.append(step)

    def hand_out(self, name: str) -> int | None:
        """Give an idle explorer a version to validate, the oldest; None: there is none."""
        with self._changed:
            if not self._waiting:
                return None
            step = self._waiting.pop(0)
            self._out[step] = name
            self._progress = time.monotonic()
            return step

    def run(self, name: str, step: int, progress: Callable[[], None]) -> None:
        """Have an explorer validate what it was handed; `progress` is called now and then.

        Raises:
            MemberDied, WaitTimeout: it is lost; the validation is open again.
            RunError: a reward failed, or another version made a sample.
        """
        version, began = Version(self._attempt, step), time.monotonic()
        try:
            if not self._loaded(name, version):
                return
            batches = []
            each, settings = self._settings.samples_per_prompt, self._settings
            for prompts in in_pieces(self._prompts, each, settings.at_a_time):
                batches.append(self._members.answer(name, version, prompts, each, settings.drawing))
                self._go_on(progress)
        except (MemberDied, WaitTimeout) as error:
            if self._open_again(step):
                self._on_fault(name, f"version {version} is to be validated once more: {error}")
            raise
        done = Validated(answers=Answers(step, batches, self._prompts), total_s=time.monotonic() - began)
        self._release(step)
        with self._changed:
            if self._out.pop(step, None) is not None:
                self._done.append(done)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits this instead."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _loaded(self, name: str, version: Version) -> bool:
        """Have an explorer load a version; False where it cannot, which is repeated, or told as the end of it."""
        try:
            report = self._members.take(name, version)
        except (MemberDied, WaitTimeout):
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

    def _go_on(self, progress: Callable[[], None]) -> None:
        progress()
        with self._changed:
            self._progress = time.monotonic()

    def _open_again(self, step: int) -> bool:
        """Have a version validated once more; False: it was given up."""
        with self._changed:
            was_out = self._out.pop(step, None) is not None
            if was_out:
                self._waiting.insert(0, step)
            self._progress = time.monotonic()
            self._changed.notify_all()
            return was_out

    def _lost(self, step: int, why: str) -> None:
        self._release(step)
        with self._changed:
            self._out.pop(step, None)
            if step in self._waiting:
                self._waiting.remove(step)
            self._changed.notify_all()
        self._on_fault(f"validation of version {step}", f"it is not validated: {why}")

    def _release(self, step: int) -> None:
        """Let go of a version. What is not let go expires."""
        with self._changed:
            lease = self._leases.pop(step, None)
        if lease is not None:
            try:
                self._synchronizer.release(lease).result(self._synchronizer.timeout_s)
            except TrinityError as error:
                self._on_fault(f"validation of version {step}", f"its slot is held until its lease ends: {error}")
