"""Validation: how good a version is that explorers hold, on prompts that nothing is learnt from. In the driver.

What is drawn for it has random numbers of its own, so a run's training samples are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trinity_sync.errors import RunError
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.drawing import Drawing
from trinity_sync.samples.excerpt import Line, excerpt
from trinity_sync.samples.keys import Purpose
from trinity_sync.samples.record import Prompt
from trinity_sync.samples.validation import ValidationTimes, validation_metrics
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
