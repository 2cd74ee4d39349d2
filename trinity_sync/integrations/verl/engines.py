"""The parts of verl's engines that are used here, as types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


class Engine(Protocol):
    """Any of verl's."""

    def get_per_tensor_param(self) -> tuple[Iterable[tuple[str, torch.Tensor]], object | None]:
        """(name, full tensor) of all weights, and the configuration of adapters that are not among them."""
        ...


class ModelConfig(Protocol):
    """What verl notes of the model that an engine trains."""

    trust_remote_code: bool

    def get_processor(self) -> object:
        """The processor, or the tokenizer where there is none."""
        ...


class FsdpEngine(Engine, Protocol):
    """verl's ``FSDPEngine``, initialised."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LRScheduler
    model_config: ModelConfig
    checkpoint_config: object
    checkpoint_manager: FSDPCheckpointManager


class MegatronCheckpointConfig(Protocol):
    """How verl's Megatron engine saves; frozen."""

    @property
    def async_save(self) -> bool:
        """Whether the files are written later."""
        ...


class MegatronManager(Protocol):
    """verl's ``MegatronCheckpointManager``."""

    checkpoint_config: MegatronCheckpointConfig
    checkpoint_save_contents: list[str]
    previous_saved_paths: list[str]


class MegatronEngine(Engine, Protocol):
    """verl's ``MegatronEngine``, initialised."""

    checkpoint_mananager: MegatronManager  # verl spells it so

    def save_checkpoint(self, local_path: str, *, global_step: int) -> None:
        """Save what the manager's contents name. Collective."""
        ...
