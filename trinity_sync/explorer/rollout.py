"""The samples of a GRPO run with `trainer.schedule=lockstep`, and the empty data of `workload=bytes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import Drawn, GroupFilter, Judge
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.metrics import Line, excerpt
from trinity_sync.samples.position import GroupId, Numbering, Position
from trinity_sync.samples.record import Prompt
from trinity_sync.sync.base import Publisher
from trinity_sync.tasks.base import prompts_of

if TYPE_CHECKING:
    from trinity_sync.tasks.base import Task


class RolloutData:
    """The `Data` of a run whose explorers generate each step's batch from the task's prompts. `mode`: the sync mode, by
    which they load. `group_filter`: leaves out groups, in place of which further prompts are answered; None: keeps all.
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
        """Have one more step's number of prompts answered."""
        earlier = self._prompts[1]
        prompts = prompts_of(self._task, self._numbering, step, len(earlier))
        self._prompts = step, [*earlier, *prompts]
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
        prompts_step, prompts = self._prompts
        assert step == prompts_step, "an excerpt is of the last batch"
        return prompts[number]


class NoData:
    """The `Data` of `workload=bytes`: empty batches, and explorers that load each version. `mode`: the sync mode, by
    which they load.
    """

    def __init__(self, pool: ExplorerPool, mode: Publisher) -> None:
        self._pool = pool
        self._mode = mode

    def batch(self, step: int) -> PairBatch:
        return PairBatch.of([], [])

    def advantages(self, batch: PairBatch) -> None:
        return None

    def drawn(self) -> None:
        return None

    def position(self, step: int) -> None:
        return None

    def load(self, version: Version) -> list[LoadReport]:
        return self._pool.load(version, self._mode.deliver)

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        return []
