"""The data of a GRPO run: prompts of the task, samples of the explorers, advantages within each prompt's group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import Drawn, GroupFilter, Judge
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.excerpt import Line, excerpt
from trinity_sync.samples.position import GroupId, Numbering, Position
from trinity_sync.samples.record import Prompt
from trinity_sync.sync.base import Publisher
from trinity_sync.tasks.base import prompts_of

if TYPE_CHECKING:
    from trinity_sync.tasks.base import Task


class RolloutData:
    """A step's batch is what the explorers generate for the task's prompts of that step.

    Args:
        task: gives the prompts.
        pool: the explorers.
        mode: the sync mode, by which they load.
        numbering: which prompts a step has.
        samples_per_prompt: size of a group.
        judge: makes the advantages of a batch.
        group_filter: leaves groups out, for which further prompts are answered; None: none is.
    """

    def __init__(
        self,
        task: Task,
        pool: ExplorerPool,
        mode: Publisher,
        *,
        numbering: Numbering,
        samples_per_prompt: int,
        judge: Judge,
        group_filter: GroupFilter | None = None,
    ) -> None:
        self._task = task
        self._pool = pool
        self._mode = mode
        self._numbering = numbering
        self._samples_per_prompt = samples_per_prompt
        self._judge = judge
        self._filter = group_filter
        self._following = numbering
        self._drawn: Drawn | None = None
        self._prompts: tuple[int, Sequence[Prompt]] = (0, ())

    def batch(self, step: int) -> SampleBatch:
        if step >= self._following.step:
            self._numbering = self._following
        self._prompts, self._drawn = (step, ()), None
        drawn = self._draw(step)
        if self._filter is None:
            return drawn
        while (chosen := self._filter.choose(step, drawn)) is None:
            drawn = SampleBatch.concatenate([drawn, self._draw(step)])
        self._following, self._drawn = self._numbering.after(step, chosen.used), chosen.drawn
        return chosen.batch

    def _draw(self, step: int) -> SampleBatch:
        """Have as many more prompts answered as a step has."""
        before = self._prompts[1]
        prompts = prompts_of(self._task, self._numbering, step, len(before))
        self._prompts = step, [*before, *prompts]
        return self._pool.generate(step, prompts, self._samples_per_prompt, self._mode.deliver)

    def drawn(self) -> Drawn | None:
        return self._drawn

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        return np.asarray(self._judge(batch))

    def position(self, step: int) -> Mapping[str, object]:
        return Position(self._following, GroupId(step + 1, 0)).to_json()

    def load(self, version: Version) -> list[LoadReport]:
        return self._pool.load(version, self._mode.deliver)

    def excerpt(self, batch: SampleBatch, advantages: np.ndarray | None, groups: int) -> list[Line]:
        return excerpt(batch, advantages, groups, self._prompt)

    def _prompt(self, step: int, number: int) -> Prompt:
        asked_for, prompts = self._prompts
        assert step == asked_for, "samples are written out of the batch that was made last"
        return prompts[number]


# The data of a run that only moves bytes: no samples, and explorers that load each version.


class NoData:
    """A step's batch is empty.

    Args:
        pool: the explorers.
        mode: the sync mode, by which they load.
    """

    def __init__(self, pool: ExplorerPool, mode: Publisher) -> None:
        self._pool = pool
        self._mode = mode

    def batch(self, step: int) -> PairBatch:
        return PairBatch.of([], [])

    def advantages(self, batch: PairBatch) -> None:
        return None

    def drawn(self) -> None:
        """Return nothing: the batch is all that there is."""

    def position(self, step: int) -> None:
        """Return nothing: there are no data."""

    def load(self, version: Version) -> list[LoadReport]:
        return self._pool.load(version, self._mode.deliver)

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        """Write out nothing: nobody generates."""
        return []
