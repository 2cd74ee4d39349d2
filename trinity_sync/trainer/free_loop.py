"""The training loop of `trainer.schedule=free`: the trainer takes whatever samples are ready and never waits for a
load. Runs in the driver.

One step, in this order: take the oldest samples within the staleness bound; train; if the step is due, begin to copy
the weights into a slot and go on with the next step. The copy runs on until the optimizer changes the weights; a
thread waits until the version is sealed, publishes it and tells the explorers' side, which takes it when it is ready
to. A version for which no slot is free, or the one before is still on its way, is left out if the explorers can do
without it. Only a step that is checkpointed waits for its own version, whose digest the checkpoint bears.

What an update is made of depends on who was faster, so a run is not reproducible bit for bit; but every prompt is
trained on once, also over a resume.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.host import interrupts
from trinity_sync.host.threads import in_background
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import Drawn
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.excerpt import Line
from trinity_sync.sync.base import Publisher
from trinity_sync.tracking.events import FailedRewardsEvent, SkipEvent
from trinity_sync.trainer.agreement_check import AgreementCheck
from trinity_sync.trainer.full_saves import FullSaves
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.trainer.steps import Log, LoopSettings, RewardPenalty, Staged, Steps, Timing


class SampleSource(Protocol):
    """Where samples come from while the trainer trains; `explorer.free.FreeRollout` is one."""

    def start(self) -> None:
        """Begin."""
        ...

    def published(self, step: int) -> None:
        """Take note that the version of this step can be loaded. Any thread."""
        ...

    def take(self, step: int) -> SampleBatch:
        """Return the samples for the update of this step; wait while too few are ready."""
        ...

    def drawn(self) -> Drawn | None:
        """Return all that was drawn for the batch that was taken last; None: the batch is all."""
        ...

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        """Compute one advantage per sample."""
        ...

    def excerpt(self, batch: SampleBatch, advantages: np.ndarray | None, groups: int) -> list[Line]:
        """Write out a batch's samples for so many prompts."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call."""
        ...

    def position(self) -> Mapping[str, object]:
        """Return where the run is in its data, as JSON values."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell this to whoever waits for samples. Any thread."""
        ...

    def close(self) -> None:
        """End; leaves nothing running."""
        ...


class Answers(Protocol):
    """What a validation came to; `explorer.validation.Answers` is one."""

    @property
    def step(self) -> int:
        """Whose version was validated."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured."""
        ...

    @property
    def failure(self) -> str:
        """Why a response could not be judged, the first; empty: all were."""
        ...

    def excerpt(self, groups: int) -> list[Line]:
        """Write out samples for so many prompts."""
        ...


class Validated(Protocol):
    """What became of a validation; `explorer.version_validations.Validated` is one."""

    @property
    def answers(self) -> Answers:
        """What was measured."""
        ...

    @property
    def total_s(self) -> float:
        """Seconds that it took."""
        ...


class Validations(Protocol):
    """Who validates versions meanwhile; `explorer.version_validations.VersionValidations` is that. It is told by the
    source which are published.
    """

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        ...

    def open(self, step: int) -> bool:
        """Tell whether a version that was published, of this step or before, is still to be validated."""
        ...

    def taken(self) -> Sequence[Validated]:
        """Return what was done since the last call."""
        ...

    def wait(self) -> None:
        """Wait until nothing is open."""
        ...

    def give_up(self, why: str) -> None:
        """Tell of all that is open that it will not be done."""
        ...


_ENDED_S = 10.0
"""How long the thread of a publication may take to end with its run."""


class FreeLoop:
    """Drives a run from its first step to its last.

    Args:
        settings: see `LoopSettings`.
        trainer: the group of ranks, initialised and attached.
        source: gives the samples.
        mode: the sync mode, for `publish` only.
        synchronizer: the run's synchronizer.
        parts: names of the parts that make a version.
        saves: full checkpoints.
        log: takes what is reported.
        stop: once set, the step under way is finished and saved, and is the last.
        penalty: takes the divergence from the rewards; None: nothing is taken.
        agreement: looks whether trainer and explorers compute the same; None: nobody does.
        validations: of versions; None: nothing is validated.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        trainer: TrainerGroup,
        source: SampleSource,
        mode: Publisher,
        synchronizer: SynchronizerClient,
        parts: list[str],
        saves: FullSaves,
        log: Log,
        stop: threading.Event | None = None,
        penalty: RewardPenalty | None = None,
        agreement: AgreementCheck | None = None,
        validations: Validations | None = None,
    ) -> None:
        self._validations = validations
        self._validated: dict[int, Mapping[str, float]] = {}
        self._steps = Steps(
            settings,
            trainer=trainer,
            synchronizer=synchronizer,
            parts=parts,
            log=log,
            penalty=penalty,
            agreement=agreement,
        )
        self._settings = settings
        self._source = source
        self._mode = mode
        self._saves = saves
        self._log = log
        self._stop = stop
        self._publishing: Future[Staged] | None = None
        self._newest = -1

    def run(self) -> bool:
        """Do all steps; return whether they were done, and not stopped before."""
        settings = self._settings
        with contextlib.ExitStack() as ending:
            try:
                self._source.start()
                self._begin_version(settings.first - 1, needed=True)
                self._wait_published()
                ending.enter_context(interrupts.finishing_steps(self._stop))
                for step in range(settings.first, settings.steps + 1):
                    if stopped := self._step(step):
                        break
                self._wait_published()
                self._finish_validations(stopped)
            finally:
                self._source.close()
                self._end_publishing()
            self._saves.finish()
        return step == settings.steps

    def _step(self, step: int) -> bool:
        """Do one step; return whether the run is to stop after it."""
        settings, timing = self._settings, Timing()
        started = time.perf_counter()
        with timing.of("generate"):  # what the trainer waited for samples
            batch = self._source.take(step)
        lags = self._steps.staleness(batch, step)
        measured = self._steps.measure(step, batch, self._source.drawn())
        with timing.of("train"):
            advantages, metrics = self._steps.train(step, batch, self._source.advantages)
        publish, stops = settings.publishes(step), self._stop is not None and self._stop.is_set()
        save = stops or settings.saves(step)
        if publish or save:
            with timing.of("stage"):
                validates = self._validations is not None and self._validations.due(step)
                self._begin_version(step, needed=save or validates or not self._can_do_without(step))
        if save:
            with timing.of("save"):
                self._save(step, {**metrics, **measured})
        timing.step(time.perf_counter() - started, batch.token_count)
        facts = self._source.metrics()
        self._log.metrics(step, {**measured, **metrics, **lags, **facts, **timing.seconds})
        if settings.records(step):
            self._log.samples(step, self._source.excerpt(batch, advantages, settings.record_groups))
        self._take_validations()
        self._saves.poll()
        return stops

    def _can_do_without(self, step: int) -> bool:
        """Tell whether the version before is fresh enough for all updates until the next one that publishes."""
        return step + self._settings.sync_interval - 1 - self._newest <= self._settings.max_staleness

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        """Begin a checkpoint. It bears the digest of its weights, so it waits for their version, but for no load."""
        staged = self._wait_published()
        assert staged is not None, "a step that is saved begins a version"
        state = {"data": self._source.position(), "algorithm": self._steps.state()}
        late = self._of_validation if self._validations is not None else None
        self._saves.begin(step, staged.sealed.digest, metrics, state=state, late=late)

    # -- validations

    def _of_validation(self, step: int) -> Mapping[str, float] | None:
        """Return what the validation of a step's version has measured, where there is one. None while one of this step
        or before is under way: what is committed has its validations on record, so a resume misses none of them.
        """
        assert self._validations is not None, "who asks has looked"
        is_open = self._validations.open(step)  # first: one that ends meanwhile is among those that are taken
        self._take_validations()
        return None if is_open else self._validated.pop(step, {})

    def _take_validations(self) -> None:
        """Write down the validations that were done, each in a line of its own, since it is of an earlier step."""
        if self._validations is None:
            return
        for done in self._validations.taken():
            answers = done.answers
            self._log.metrics(answers.step, {**answers.metrics, "val/seconds": done.total_s})
            if failed := int(answers.metrics["val/failed"]):
                self._log.event(
                    FailedRewardsEvent(step=answers.step, count=failed, error=answers.failure, validation=True)
                )
            if self._settings.record_interval:
                self._log.samples(answers.step, answers.excerpt(self._settings.record_groups))
            self._validated[answers.step] = answers.metrics

    def _finish_validations(self, stopped: bool) -> None:
        """Wait for those that are under way; where the run is told to stop, nobody waits."""
        if self._validations is None:
            return
        if stopped:
            self._validations.give_up("the run was told to stop")
        else:
            self._validations.wait()
        self._take_validations()

    # -- versions

    def _begin_version(self, step: int, *, needed: bool) -> None:
        """Begin to copy the weights, to be published behind the trainer's back; or leave this version out.

        Args:
            step: the version's step.
            needed: wait for a slot, as the next update needs samples of this version, or a checkpoint its digest.
        """
        version = Version(self._settings.attempt, step)
        started = time.perf_counter()
        if needed:
            self._wait_published()
            slot: int | None = self._steps.begin(version)
        elif self._publishing is not None and not self._publishing.done():
            self._leave_out(step, f"version {self._newest} was still on its way")
            return
        else:
            self._wait_published()
            slot = self._steps.begin_if_free(version)
        if slot is None:
            self._leave_out(step, "every slot was being read")
            return
        self._steps.copy(version, slot, lazily=True)
        self._newest = step
        self._publishing = in_background(lambda: self._publish(version, started), f"publish-{step}")

    def _leave_out(self, step: int, reason: str) -> None:
        self._log.event(SkipEvent(version=step, reason=reason))

    def _publish(self, version: Version, started: float) -> Staged:
        try:
            sealed = self._steps.wait_sealed(version)
            staged = Staged(sealed, sealed.blocked_s, started, time.perf_counter() - started)
            self._mode.publish(sealed)
            self._source.published(version.step)
            self._steps.record_publish(staged)
        except BaseException as error:
            self._source.fail(error)  # the trainer may be waiting for samples of this very version
            raise
        return staged

    def _end_publishing(self) -> None:
        """End the thread of a version on its way, where the run fails: it must not be inside Ray when Ray goes."""
        if self._publishing is None or self._publishing.done():
            return
        with contextlib.suppress(Exception):
            self._steps.give_up(Version(self._settings.attempt, self._newest), "the run ended")
        with contextlib.suppress(Exception):
            self._publishing.result(timeout=interrupts.left(_ENDED_S, interrupts.REST_S))

    def _wait_published(self) -> Staged | None:
        """Wait for the version that is on its way, and return it. Each of the waits inside has its limit."""
        return self._publishing.result() if self._publishing is not None else None
