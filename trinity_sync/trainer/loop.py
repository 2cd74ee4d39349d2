"""The training loop of `trainer.schedule=lockstep`: explorers sample with the newest version, then the trainer trains,
publishes and saves. Runs in the driver.

One step, in this order: the explorers generate; advantages are computed; all ranks train. If a publish is due, the
ranks stage the weights into a slot, the sync mode publishes them and the explorers load them; a supervised run has no
explorers and publishes nothing. If a validation is due, the explorers answer its prompts. If a checkpoint is due, the
ranks copy their state and write it in the background of the next step. All random numbers are a function of the seed
and the step, so a resumed or repeated run sees the same data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.host import interrupts
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import DrawnGroups
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.metrics import Line
from trinity_sync.samples.position import GroupId, Numbering, Position
from trinity_sync.sync.base import Publisher
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.encoding import PairEncoder
from trinity_sync.tasks.pairs import TextPair
from trinity_sync.trainer.full_saves import FullSaves
from trinity_sync.trainer.steps import StagedVersion, Steps, StepTimes, record_load


class Data(Protocol):
    """The source of a step's batch: explorers (GRPO) or a file of pairs (SFT). `Any` is its own kind of batch."""

    def batch(self, step: int) -> SampleBatch | PairBatch:
        """Return the batch of a step, the same at each call."""

    def drawn(self) -> DrawnGroups | None:
        """Return everything drawn for the last batch; None: the batch is everything."""

    def advantages(self, batch: Any) -> np.ndarray | None:
        """Return one advantage per sequence; None if the loss needs none."""

    def position(self, step: int) -> Mapping[str, object] | None:
        """Return the position in the data after a step, as JSON values; None: there is none."""

    def load(self, version: Version) -> list[LoadReport]:
        """Have the explorers load a version."""

    def excerpt(self, batch: Any, advantages: np.ndarray | None, groups: int) -> list[Line]:
        """Return the samples of a batch's first prompts in full."""


class Validator(Protocol):
    """Measures a version while training waits: by explorers (`Validation`) or by the loss (`LossValidation`)."""

    @property
    def at_start(self) -> bool:
        """Whether the weights at the start of the run are validated."""

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""

    def run(self, step: int) -> dict[str, float]:
        """Validate the version of a step; return the metrics."""

    @property
    def failure(self) -> str:
        """The first reward error of the last validation; empty: all responses were judged."""

    def excerpt(self, groups: int) -> list[Line]:
        """Return the samples of the last validation's first prompts in full."""


class TrainingLoop:
    """Drives a run from its first step to its last. `restored`: where explorers begin with another version than the
    trainer's: its step, and the function that fills a slot with it. `stop`: once set, the current step is finished and
    saved, and is the last. `validator`: called after each publish; None: no validation.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        data: Data,
        mode: Publisher,
        saves: FullSaves,
        restored: tuple[int, Callable[[Version, int], None]] | None = None,
        stop: threading.Event | None = None,
        validator: Validator | None = None,
    ) -> None:
        self._steps = steps
        self._settings, self._log = steps.settings, steps.log
        self._stop = stop
        self._restored = restored
        self._data = data
        self._mode = mode
        self._saves = saves
        self._validator = validator

    def run(self) -> bool:
        """Do all steps; return whether none is left, False after a stop."""
        settings = self._settings
        begin = settings.first - 1
        if settings.explores:
            first = self._first_version()
            self._publish(first, StepTimes())
            begin = first.sealed.version.step
        if self._validator is not None and self._validator.at_start:
            timing = StepTimes()
            validated = self._validate(self._validator, begin, timing)
            self._log.metrics(begin, {**validated, **timing.seconds})
        step = settings.first - 1
        with interrupts.finishing_steps(self._stop):
            for step in range(settings.first, settings.steps + 1):
                if self._step(step):
                    break
            self._saves.finish()
        return step >= settings.steps

    def _step(self, step: int) -> bool:
        """Do one step; return whether the run stops after it."""
        settings, timing = self._settings, StepTimes()
        started = time.perf_counter()
        with timing.of("generate"):
            batch = self._data.batch(step)
        lags = self._steps.staleness(batch, step)
        measured = self._steps.measure(step, batch, self._data.drawn())
        with timing.of("train"):
            advantages, metrics = self._steps.train(step, batch, self._data.advantages)
        validated: dict[str, float] = {}
        due = settings.publishes(step)
        publish = due and settings.explores
        stops = self._stop is not None and self._stop.is_set()
        save = stops or settings.saves(step)
        keep = not save and settings.keeps(step) and self._saves.keeps()
        if publish or save or keep:
            version = Version(settings.attempt, step)
            with timing.of("stage"):
                staged = self._steps.stage(version)
            if publish:
                self._publish(staged, timing)
            else:
                self._steps.discard(version)
        if due and self._validator is not None and self._validator.due(step):
            validated = self._validate(self._validator, step, timing)
        if save or keep:
            with timing.of("save"):
                numbers = {**metrics, **measured, **validated}
                state = {"data": self._data.position(step), "algorithm": self._steps.state()}
                digest = staged.sealed.digest
                self._saves.begin(step, digest, numbers, published=publish, state=state, in_memory=keep)
        timing.step(time.perf_counter() - started, batch.token_count)
        self._log.metrics(step, {**measured, **metrics, **lags, **validated, **timing.seconds})
        if settings.records(step):
            self._log.samples(step, self._data.excerpt(batch, advantages, settings.record_groups))
        self._saves.poll()
        return stops

    def _validate(self, validator: Validator, step: int, timing: StepTimes) -> dict[str, float]:
        with timing.of("validate"):
            metrics = validator.run(step)
        self._steps.record_validation(step, metrics, validator)
        return metrics

    def _first_version(self) -> StagedVersion:
        """Stage the trainer's weights or, after a resume, the other version that the explorers held."""
        settings = self._settings
        if self._restored is None:
            return self._steps.stage(Version(settings.attempt, settings.first - 1))
        started = time.perf_counter()
        step, restore = self._restored
        version = Version(settings.attempt, step)
        restore(version, self._steps.begin(version))
        sealed = self._steps.wait_sealed(version)
        return StagedVersion(sealed, 0.0, started, time.perf_counter() - started)

    def _publish(self, staged: StagedVersion, timing: StepTimes) -> None:
        with timing.of("publish"):
            published = self._mode.publish(staged.sealed)
        self._steps.record_publish(staged, published)
        with timing.of("load"):
            reports = self._data.load(staged.sealed.version)
        for report in reports:
            record_load(self._log, report)


# The `Data` of a supervised run: pairs or conversations of a file, as tokens of the model's tokenizer.


Examples = Sequence[TextPair | Conversation]


class SupervisedTask(Protocol):
    """A task for `algorithm=sft`. With a method ``pairs_from(first, count)``, which returns so many examples from
    number `first` on (from 0, without end), a run resumed with another batch size misses and repeats none.
    """

    def pairs(self, step: int, count: int) -> Examples:
        """Return the examples of a trainer step, from 1."""


def pair_batch(encoder: PairEncoder, examples: Examples) -> PairBatch:
    """Return pairs or conversations as tokens."""
    encoded = encoder.encode(examples)
    return PairBatch.of(
        [one.prompt for one in encoded], [one.response for one in encoded], [one.learnt for one in encoded]
    )


class PairsData:
    """A step's batch is the task's examples for it. `task`: gives pairs or conversations. `encoder`: makes tokens."""

    def __init__(self, task: SupervisedTask, encoder: PairEncoder, numbering: Numbering) -> None:
        self._task = task
        self._encoder = encoder
        self._numbering = numbering

    def batch(self, step: int) -> PairBatch:
        """Return the pairs of a step, with an end-of-sequence token after each response."""
        return pair_batch(self._encoder, self._of_step(step))

    def _of_step(self, step: int) -> Examples:
        pairs_from: Callable[[int, int], Examples] | None = getattr(self._task, "pairs_from", None)
        if pairs_from is None:
            return self._task.pairs(step, self._numbering.per_step)
        return pairs_from(self._numbering.first_of(step), self._numbering.per_step)

    def drawn(self) -> None:
        return None

    def position(self, step: int) -> Mapping[str, object]:
        return Position(self._numbering, GroupId(step + 1, 0)).to_json()

    def advantages(self, batch: PairBatch) -> None:
        return None

    def load(self, version: Version) -> list[LoadReport]:
        return []

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        return []
