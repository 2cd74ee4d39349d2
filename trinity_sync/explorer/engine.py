"""What generates in an explorer, as the class that an option of `explorer` names. Only explorers import that class."""

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

    It is built from the keys of `explorer`, but for those of all explorers together, and from those of the run that
    `explorer.spec.explorer_spec` adds, all by name. It gives its live tensors (`destinations`), or says itself how it
    takes versions (`target`).
    """

    def destinations(self) -> Mapping[str, torch.Tensor]:
        """The live tensors that a load overwrites in place, under the names that `save_pretrained` would use; tied ones
        once.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither destinations() nor a target() of its own")

    def target(self, mode: SyncMode, side: ExplorerSide, verify: str) -> WeightTarget:
        """What versions are loaded into: the `destinations`, unless an engine holds its weights elsewhere.

        Args:
            mode: the sync mode.
            side: what the mode may ask.
            verify: `sync.verify`.
        """
        from trinity_sync.sync.weight_loader import InPlace

        return InPlace(self.destinations(), mode.transport(side), side.layouts, verify)

    def base_digest(self, wire_dtype: str) -> str | None:
        """Return the version digest of what is below the adapter that `destinations` are; None: they are a whole model.

        Args:
            wire_dtype: dtype of its floating tensors, as safetensors names it, but for those kept in fp32.
        """
        return None

    @property
    def takes_beside(self) -> bool:
        """Whether its `target` takes versions while `generate` runs in another thread, and it labels tokens by them."""
        return False

    def give_up(self) -> None:
        """Have `generate` raise `RunError`, where it runs and whenever it is called, until a version is taken whole.
        Called in another thread, where `takes_beside`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes versions beside what it generates, but cannot give up")

    def close(self) -> None:  # noqa: B027 - most have nothing
        """End what the engine has outside of this process. Called at the end of a run that can wait for it."""

    @abstractmethod
    def after_load(self) -> None:
        """To be called when new weights are in: what was computed with those before must not be used any more."""

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
        """Scored samples for the prompts, sorted by prompt (as given) and sample.

        Args:
            prompts: at least one.
            task: judges the responses, in that order.
            step: the trainer step that the samples are for.
            samples_per_prompt: samples of each prompt.
            version: (attempt, step) of the weights that are loaded.
            drawing: how they are drawn; given where that is not as in training, so an engine need not know it for a run
                without validation.

        Raises:
            RunError: a prompt cannot be generated for, or the task fails to judge a response.
        """
