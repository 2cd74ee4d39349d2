"""verl's engines with our checkpoint manager in the place of theirs, registered for the vendor `trinity`.

An engine of verl's makes its checkpoint manager itself and knows it by a name of its own; what it saves and loads goes
through that. So nothing but the manager differs. Beside it the engine tells the manager when the trainer has gone on:
what verl's trainer writes beside the engine's files is whole then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trinity_sync.integrations.verl.plugin import VENDOR

if TYPE_CHECKING:
    from trinity_sync.integrations.verl.program import ProgramSaves

_DEVICES = ["cuda", "cpu"]

_CLASSES = {
    "FSDPEngineWithLMHead": ("language_model", ["fsdp", "fsdp2"]),
    "FSDPEngineWithValueHead": ("value_model", ["fsdp", "fsdp2"]),
    "MegatronEngineWithLMHead": ("language_model", ["megatron"]),
    "MegatronEngineWithValueHead": ("value_model", ["megatron"]),
}
"""verl's classes: model type and strategies that verl registers them for."""


class SavesThroughUs:
    """Comes before one of verl's engines among the bases of a class."""

    _saves: ProgramSaves

    def initialize(self) -> None:
        """Make model and optimizer as verl does, and put our manager in. Collective."""
        super().initialize()  # type: ignore[misc]
        from trinity_sync.integrations.verl.program import ProgramSaves

        self._saves = ProgramSaves(self)

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        self._saves.trainer_went_on()
        mode: AbstractContextManager[None] = super().train_mode(**kwargs)  # type: ignore[misc]
        return mode

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        self._saves.trainer_went_on()
        mode: AbstractContextManager[None] = super().eval_mode(**kwargs)  # type: ignore[misc]
        return mode

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        self._saves.trainer_went_on()
        return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save through our manager; of the program's last step, return when it is written."""
        self._saves.trainer_went_on()
        super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._saves.finish_last_step()


def register(module: ModuleType) -> None:
    """Register an engine of ours for each of verl's that a module of verl's has."""
    from verl.workers.engine.base import EngineRegistry

    for name, (model_type, strategies) in _CLASSES.items():
        verls = vars(module).get(name)
        if verls is not None:
            ours = type(f"Trinity{name}", (SavesThroughUs, verls), {"__doc__": SavesThroughUs.__doc__})
            EngineRegistry.register(model_type, strategies, device=_DEVICES, vendor=VENDOR)(ours)
