"""The training loop of `trainer.schedule=free`: the trainer takes samples that are ready and waits for no load. Runs
in the driver.

One step, in this order: take the oldest samples within the staleness bound; train; if a publish is due, begin to copy
the weights into a slot and go on with the next step. The copy ends before the optimizer changes the weights. A thread
waits until the version is sealed, publishes it and tells the explorers, which load it when they can. A version is
skipped if no slot is free or the version before is still being published, unless the explorers need it. A step that is
checkpointed waits for its own version, whose digest the checkpoint records.

The batches depend on the speed of the explorers, so a run is not reproducible bit for bit; but every prompt is trained
on exactly once, also after a resume.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from trinity_sync.host import interrupts
from trinity_sync.host.threads import in_background
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import DrawnGroups
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import Line, ValidationAnswers
from trinity_sync.sync.base import Publisher
from trinity_sync.tracking.events import SkipEvent
from trinity_sync.trainer.full_saves import FullSaves
from trinity_sync.trainer.steps import StagedVersion, Steps, StepTimes


class SampleSource(Protocol):
    """Makes samples in the background of training. Implemented by `explorer.rollout.FreeRollout`, which this
    package must not import.
    """

    def start(self) -> None:
        """Start all explorers."""

    def published(self, step: int) -> None:
        """Announce that the version of this step can be loaded. Any thread."""

    def take(self, step: int) -> SampleBatch:
        """Return the samples for the update of this step; wait while too few are ready."""

    def drawn(self) -> DrawnGroups | None:
        """Return everything drawn for the last batch; None: the batch is everything."""

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        """Return one advantage per sample."""

    def excerpt(self, batch: SampleBatch, advantages: np.ndarray | None, groups: int) -> list[Line]:
        """Return the samples of a batch's first prompts in full."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""

    def position(self) -> Mapping[str, object]:
        """Return the position in the data, as JSON values."""

    def fail(self, error: BaseException) -> None:
        """Have `take` raise an error. Any thread."""

    def pause(self) -> None:
        """End the work for a trainer that has failed; `close`, unless the source outlives it."""

    def close(self) -> None:
        """Stop all explorers and threads."""


class BackgroundValidator(Protocol):
    """Validates published versions in the background. Implemented by `explorer.validation.VersionValidations`, which
    this package must not import.
    """

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""

    def open(self, step: int) -> bool:
        """Tell whether a published version of this step or an earlier one is still to be validated."""

    def taken(self) -> Sequence[ValidationAnswers]:
        """Return the validations that ended since the last call."""

    def wait(self) -> None:
        """Wait until no validation is open."""

    def give_up(self, why: str) -> None:
        """Report each open validation as a fault."""


_ENDED_S = 10.0
"""Limit of the wait for a publishing thread when its run ends."""


class FreeLoop:
    """Drives a run from its first step to its last. `mode`: the sync mode, for `publish` only. `stop`: once set, the
    current step is finished and saved, and is the last. `validator`: None: no validation.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        source: SampleSource,
        mode: Publisher,
        saves: FullSaves,
        stop: threading.Event | None = None,
        validator: BackgroundValidator | None = None,
    ) -> None:
        self._steps = steps
        self._settings, self._log = steps.settings, steps.log
        self._validator = validator
        self._validated: dict[int, Mapping[str, float]] = {}
        self._source = source
        self._mode = mode
        self._saves = saves
        self._stop = stop
        self._publishing: Future[StagedVersion] | None = None
        self._newest = -1

    def run(self) -> bool:
        """Do all steps; return whether none is left, False after a stop."""
        settings, end = self._settings, self._source.close
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
            except Exception:
                end = self._source.pause
                raise
            finally:
                end()
                self._end_publishing()
            self._saves.finish()
        return step == settings.steps

    def _step(self, step: int) -> bool:
        """Do one step; return whether the run stops after it."""
        settings, timing = self._settings, StepTimes()
        started = time.perf_counter()
        with timing.of("generate"):  # the trainer's wait for samples
            batch = self._source.take(step)
        lags = self._steps.staleness(batch, step)
        measured = self._steps.measure(step, batch, self._source.drawn())
        with timing.of("train"):
            advantages, metrics = self._steps.train(step, batch, self._source.advantages)
        publish, stops = settings.publishes(step), self._stop is not None and self._stop.is_set()
        save = stops or settings.saves(step)
        if publish or save:
            with timing.of("stage"):
                validates = self._validator is not None and self._validator.due(step)
                self._begin_version(step, needed=save or validates or not self._can_do_without(step))
        # a state in memory makes no version of its own
        keep = not save and settings.keeps(step) and self._newest == step and self._saves.keeps()
        if save or keep:
            with timing.of("save"):
                self._save(step, {**metrics, **measured}, in_memory=keep)
        timing.step(time.perf_counter() - started, batch.token_count)
        facts = self._source.metrics()
        self._log.metrics(step, {**measured, **metrics, **lags, **facts, **timing.seconds})
        if settings.records(step):
            self._log.samples(step, self._source.excerpt(batch, advantages, settings.record_groups))
        self._take_validations()
        self._saves.poll()
        return stops

    def _can_do_without(self, step: int) -> bool:
        """Tell whether the version before is fresh enough for all updates until the next publish."""
        return step + self._settings.sync_interval - 1 - self._newest <= self._settings.max_staleness

    def _save(self, step: int, metrics: dict[str, float], *, in_memory: bool) -> None:
        """Begin a checkpoint. Waits for the version of the step, whose digest it records."""
        staged = self._wait_published()
        assert staged is not None, "a step that is saved begins a version"
        state = {"data": self._source.position(), "algorithm": self._steps.state()}
        late = self._late_metrics if self._validator is not None else None
        self._saves.begin(step, staged.sealed.digest, metrics, state=state, late=late, in_memory=in_memory)

    # -- validations

    def _late_metrics(self, step: int) -> Mapping[str, float] | None:
        """Return the validation metrics of a step's version, empty if it has none. None while a version of this step or
        an earlier one is being validated: a checkpoint is committed after its validations, so a resume misses none.
        """
        assert self._validator is not None, "only a run with validations has late metrics"
        is_open = self._validator.open(step)  # before the next line, which takes a validation that ends meanwhile
        self._take_validations()
        return None if is_open else self._validated.pop(step, {})

    def _take_validations(self) -> None:
        """Record the validations that ended, each in a line of its own, as it belongs to an earlier step."""
        if self._validator is None:
            return
        for answers in self._validator.taken():
            self._log.metrics(answers.step, {**answers.metrics, "val/seconds": answers.total_s})
            self._steps.record_validation(answers.step, answers.metrics, answers)
            self._validated[answers.step] = answers.metrics

    def _finish_validations(self, stopped: bool) -> None:
        """Wait for open validations; after a stop, give them up."""
        if self._validator is None:
            return
        if stopped:
            self._validator.give_up("the run was stopped")
        else:
            self._validator.wait()
        self._take_validations()

    # -- versions

    def _begin_version(self, step: int, *, needed: bool) -> None:
        """Begin to copy the weights, to be published in the background; or skip this version."""
        version = Version(self._settings.attempt, step)
        started = time.perf_counter()
        if needed:
            self._wait_published()
            slot: int | None = self._steps.begin(version)
        elif self._publishing is not None and not self._publishing.done():
            self._skip(step, f"version {self._newest} was still on its way")
            return
        else:
            self._wait_published()
            slot = self._steps.begin_if_free(version)
        if slot is None:
            self._skip(step, "every slot was being read")
            return
        self._steps.copy(version, slot, lazily=True)
        self._newest = step
        self._publishing = in_background(lambda: self._publish(version, started), f"publish-{step}")

    def _skip(self, step: int, reason: str) -> None:
        self._log.event(SkipEvent(version=step, reason=reason))

    def _publish(self, version: Version, started: float) -> StagedVersion:
        try:
            sealed = self._steps.wait_sealed(version)
            staged = StagedVersion(sealed, sealed.blocked_s, started, time.perf_counter() - started)
            published = self._mode.publish(sealed)
            self._source.published(version.step)
            self._steps.record_publish(staged, published)
        except BaseException as error:
            self._source.fail(error)  # the trainer may be waiting for samples of this version
            raise
        return staged

    def _end_publishing(self) -> None:
        """End the publishing thread of a run that fails: it must not call Ray when Ray shuts down."""
        if self._publishing is None or self._publishing.done():
            return
        with contextlib.suppress(Exception):
            self._steps.give_up(Version(self._settings.attempt, self._newest), "the run ended")
        with contextlib.suppress(Exception):
            self._publishing.result(timeout=interrupts.left(_ENDED_S, interrupts.REST_S))

    def _wait_published(self) -> StagedVersion | None:
        """Wait for the version that is being published and return it. The thread's own waits have timeouts."""
        return self._publishing.result() if self._publishing is not None else None
