"""The base class of rollout engines, named by `explorer._target_`. Only explorers import the subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt
from trinity_sync.tasks.base import Task

if TYPE_CHECKING:
    import torch

    from trinity_sync.sync.base import ExplorerSide, SyncMode
    from trinity_sync.sync.weight_loader import WeightTarget


class RolloutEngine(ABC):
    """A model that samples and scores; one per explorer.

    The explorer builds it by keyword, from the keys of `explorer` (without those of the pool) and from those of the run
    that `explorer_spec` adds. A subclass implements `destinations`, or `target` if it holds its weights elsewhere.
    """

    def destinations(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors that a load overwrites in place, under the names of `save_pretrained`; tied ones
        once.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither destinations() nor a target() of its own")

    def target(self, mode: SyncMode, side: ExplorerSide, verify: str) -> WeightTarget:
        """Return the place that versions are loaded into: by default `destinations`. Called again where the run goes on
        as its next attempt, which replaces what was returned before.

        Args:
            mode: the sync mode.
            side: what the mode may use of the explorer.
            verify: `sync.verify`.
        """
        from trinity_sync.sync.weight_loader import LiveTensors

        return LiveTensors(self.destinations(), mode.transport(side), side.layouts, verify)

    def base_digest(self, wire_dtype: str) -> str | None:
        """Return the version digest of the base, where `destinations` are an adapter; None: they are a whole model.

        Args:
            wire_dtype: dtype of its floating tensors, as safetensors names it; tensors kept in fp32 stay so.
        """
        return None

    @property
    def takes_beside(self) -> bool:
        """Whether `target` takes versions while `generate` runs in another thread, and labels each token."""
        return False

    def give_up(self) -> None:
        """Make `generate` raise `RunError`, now and whenever it is called, until a whole version is loaded. Called from
        another thread, where `takes_beside`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes versions while it generates, but cannot give up")

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Release what the engine has outside of this process. Called when a run ends in order."""

    @abstractmethod
    def after_load(self) -> None:
        """Drop everything that was computed with the weights before. Called after each load."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        task: Task,
        *,
        step: int,
        samples_per_prompt: int,
        version: tuple[int, int],
        drawing: Drawing = FOR_TRAINING,
    ) -> SampleBatch:
        """Return scored samples for the prompts, sorted by prompt (as given) and sample.

        Args:
            prompts: at least one.
            task: judges the responses, in that order.
            step: the trainer step that the samples are for.
            samples_per_prompt: samples of each prompt.
            version: (attempt, step) of the loaded weights.
            drawing: purpose and temperature. Passed only where it differs from training, so an engine without
                validation need not have this argument.

        Raises:
            RunError: a prompt cannot be generated for, or the task fails to judge a response.
        """
