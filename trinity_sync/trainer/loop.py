"""The training loop in lockstep: explorers sample with the newest version, the trainer trains, publishes and saves.
Runs in the driver.

One step, in this order: the explorers generate; advantages are computed; all ranks train; if the step is due, the
ranks stage the weights into a slot, the sync mode publishes them and the explorers load them; if a validation is due,
the explorers answer its prompts; if a checkpoint is due, the ranks copy their state and write it in the background
while the next step runs. Everything that depends on chance is a function of the seed and the step, so a resumed or
repeated run sees the same data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.host import interrupts
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import Drawn
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.excerpt import Line
from trinity_sync.sync.base import Publisher
from trinity_sync.tracking.events import FailedRewardsEvent
from trinity_sync.trainer.agreement_check import AgreementCheck
from trinity_sync.trainer.full_saves import FullSaves
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.trainer.steps import Log, LoopSettings, RewardPenalty, Staged, Steps, Timing, record_load


class Data(Protocol):
    """Where a step's batch comes from: explorers (GRPO) or a file of pairs (SFT)."""

    def batch(self, step: int) -> SampleBatch | PairBatch:
        """Return the batch of a step, the same whenever it is asked for."""
        ...

    def drawn(self) -> Drawn | None:
        """Return all that was drawn for the batch that was given last; None: the batch is all."""
        ...

    def advantages(self, batch: Any) -> np.ndarray | None:
        """Return one advantage per sequence of a batch of its own, None where the loss needs none."""
        ...

    def position(self, step: int) -> Mapping[str, object] | None:
        """Return where the run is in its data after a step, as JSON values; None: nowhere."""
        ...

    def load(self, version: Version) -> list[LoadReport]:
        """Have whoever generates the data take this version."""
        ...

    def excerpt(self, batch: Any, advantages: np.ndarray | None, groups: int) -> list[Line]:
        """Write out a batch's samples for so many prompts; nothing where it has none."""
        ...


class Validation(Protocol):
    """What looks how good a version is: `explorer.validation.Validation`, of one that the explorers hold, or
    `loss_validation.LossValidation`.
    """

    @property
    def at_start(self) -> bool:
        """Whether what the run begins with is validated."""
        ...

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        ...

    def run(self, step: int) -> dict[str, float]:
        """Validate the version of a step; return the metrics."""
        ...

    @property
    def failure(self) -> str:
        """Why a response of the last validation could not be judged, the first; empty: all were."""
        ...

    def excerpt(self, groups: int) -> list[Line]:
        """Write out samples of the last validation for so many prompts; nothing where it has none."""
        ...


class TrainingLoop:
    """Drives a run from its first step to its last.

    Args:
        settings: see `LoopSettings`.
        trainer: the group of ranks, initialised and attached.
        data: gives the batches.
        mode: the sync mode.
        synchronizer: the run's synchronizer.
        parts: names of the parts that make a version.
        saves: full checkpoints.
        log: takes what is reported.
        restored: the step of the version that explorers begin with, where it is not the trainer's, and what fills a
            slot with it.
        stop: once set, the step under way is finished and saved, and is the last.
        penalty: takes the divergence from the rewards; None: nothing is taken.
        agreement: looks whether trainer and explorers compute the same; None: nobody does.
        validation: asked after each publish, while the explorers have nothing else to do; None: nobody is.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        trainer: TrainerGroup,
        data: Data,
        mode: Publisher,
        synchronizer: SynchronizerClient,
        parts: list[str],
        saves: FullSaves,
        log: Log,
        restored: tuple[int, Callable[[Version, int], None]] | None = None,
        stop: threading.Event | None = None,
        penalty: RewardPenalty | None = None,
        agreement: AgreementCheck | None = None,
        validation: Validation | None = None,
    ) -> None:
        self._steps = Steps(
            settings,
            trainer=trainer,
            synchronizer=synchronizer,
            parts=parts,
            log=log,
            penalty=penalty,
            agreement=agreement,
        )
        self._stop = stop
        self._restored = restored
        self._settings = settings
        self._data = data
        self._mode = mode
        self._saves = saves
        self._log = log
        self._validation = validation

    def run(self) -> bool:
        """Do all steps; return whether they were done, and not stopped before."""
        settings = self._settings
        first = self._first_version()
        self._publish(first, Timing())
        if self._validation is not None and self._validation.at_start:
            began_with, timing = first.sealed.version.step, Timing()
            validated = self._validated(began_with, timing)
            self._log.metrics(began_with, {**validated, **timing.seconds})
        with interrupts.finishing_steps(self._stop):
            for step in range(settings.first, settings.steps + 1):
                if self._step(step):
                    break
            self._saves.finish()
        return step == settings.steps

    def _step(self, step: int) -> bool:
        """Do one step; return whether the run is to stop after it."""
        settings, timing = self._settings, Timing()
        started = time.perf_counter()
        with timing.of("generate"):
            batch = self._data.batch(step)
        lags = self._steps.staleness(batch, step)
        measured = self._steps.measure(step, batch, self._data.drawn())
        with timing.of("train"):
            advantages, metrics = self._steps.train(step, batch, self._data.advantages)
        validated: dict[str, float] = {}
        publish = settings.publishes(step)
        stops = self._stop is not None and self._stop.is_set()
        save = stops or settings.saves(step)
        if publish or save:
            version = Version(settings.attempt, step)
            with timing.of("stage"):
                staged = self._steps.stage(version)
            if publish:
                self._publish(staged, timing)
                if self._validation is not None and self._validation.due(step):
                    validated = self._validated(step, timing)
            else:
                self._steps.discard(version)
            if save:
                with timing.of("save"):
                    numbers = {**metrics, **measured, **validated}
                    state = {"data": self._data.position(step), "algorithm": self._steps.state()}
                    self._saves.begin(step, staged.sealed.digest, numbers, published=publish, state=state)
        timing.step(time.perf_counter() - started, batch.token_count)
        self._log.metrics(step, {**measured, **metrics, **lags, **validated, **timing.seconds})
        if settings.records(step):
            self._log.samples(step, self._data.excerpt(batch, advantages, settings.record_groups))
        self._saves.poll()
        return stops

    def _validated(self, step: int, timing: Timing) -> dict[str, float]:
        assert self._validation is not None, "who calls it has looked"
        with timing.of("validate"):
            found = self._validation.run(step)
        if failed := int(found.get("val/failed", 0)):
            error = self._validation.failure
            self._log.event(FailedRewardsEvent(step=step, count=failed, error=error, validation=True))
        if self._settings.record_interval:
            self._log.samples(step, self._validation.excerpt(self._settings.record_groups))
        return found

    def _first_version(self) -> Staged:
        """Stage the trainer's weights; after a resume, what the explorers held where that was something else."""
        settings = self._settings
        if self._restored is None:
            return self._steps.stage(Version(settings.attempt, settings.first - 1))
        started = time.perf_counter()
        step, restore = self._restored
        version = Version(settings.attempt, step)
        restore(version, self._steps.begin(version))
        sealed = self._steps.wait_sealed(version)
        return Staged(sealed, 0.0, started, time.perf_counter() - started)

    def _publish(self, staged: Staged, timing: Timing) -> None:
        with timing.of("publish"):
            self._mode.publish(staged.sealed)
        self._steps.record_publish(staged)
        with timing.of("load"):
            reports = self._data.load(staged.sealed.version)
        for report in reports:
            record_load(self._log, report)
