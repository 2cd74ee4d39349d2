"""Validation: how good the version is that the explorers hold, on prompts that nothing is learnt from. In the driver.

What is drawn for it has random numbers of its own, so a run's training samples are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trinity_sync.errors import RunError
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.drawing import Drawing
from trinity_sync.samples.keys import Purpose
from trinity_sync.samples.record import Prompt
from trinity_sync.samples.validation import validation_metrics
from trinity_sync.sync.base import Publisher


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """When a validation takes place, and how.

    Attributes:
        interval: steps between validations, 0 for the last step only.
        last: the run's last step, which is always validated.
        at_start: whether what a run begins with is validated.
        samples_per_prompt: samples of each prompt.
        temperature: at which they are drawn; 0: the most likely tokens.
        at_a_time: samples that explorers are asked for at a time, all together: as many as for a step, so that
            `explorer.timeout_s` is a limit for either.
    """

    interval: int
    last: int
    at_start: bool
    samples_per_prompt: int
    temperature: float
    at_a_time: int


class Validation:
    """Has the explorers answer the validation's prompts.

    Args:
        prompts: all of them, at least one.
        pool: the explorers, all of which hold the version to be validated.
        mode: the sync mode, by which one that was started again loads.
        settings: see `ValidationSettings`.

    Attributes:
        failure: why a response of the last validation could not be judged, the first; empty: all were.
    """

    def __init__(
        self, prompts: Sequence[Prompt], pool: ExplorerPool, mode: Publisher, settings: ValidationSettings
    ) -> None:
        self._prompts = prompts
        self._pool = pool
        self._mode = mode
        self._settings = settings
        self.failure = ""
        self._drawing = Drawing(purpose=Purpose.VALIDATION, temperature=settings.temperature)

    @property
    def at_start(self) -> bool:
        """Whether what the run begins with is validated."""
        return self._settings.at_start

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        interval = self._settings.interval
        return step == self._settings.last or bool(interval and step % interval == 0)

    def run(self, step: int) -> dict[str, float]:
        """Validate the version of a step, which all explorers have loaded; return the metrics, ``val/...``.

        Raises:
            RunError: an explorer died and no restart is left, a reward failed, or another version made a sample.
        """
        many = max(1, self._settings.at_a_time // self._settings.samples_per_prompt)
        batches = [self._samples(step, self._prompts[at : at + many]) for at in range(0, len(self._prompts), many)]
        batch = SampleBatch.concatenate(batches)
        if odd := sorted({*np.unique(batch.version_steps).tolist()} - {step}):
            raise RunError(f"version {odd[0]} made samples for the validation of version {step}")
        self.failure = next(filter(None, batch.errors), "")
        return validation_metrics(batch)

    def _samples(self, step: int, prompts: Sequence[Prompt]) -> SampleBatch:
        return self._pool.generate(step, prompts, self._settings.samples_per_prompt, self._mode.deliver, self._drawing)
