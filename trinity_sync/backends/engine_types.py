"""Types for the parts of verl's engines that this package uses. Importing this loads neither verl nor megatron-core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mbridge.core.llm_bridge import LLMBridge
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from tensordict import TensorDict
    from torch.amp import GradScaler
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
    from verl.workers.config import FSDPEngineConfig, McoreEngineConfig


class EngineModel(Protocol):
    """verl's record of the model that an engine trains."""

    hf_config: PretrainedConfig
    use_remove_padding: bool
    local_path: str
    trust_remote_code: bool

    def get_processor(self) -> ProcessorMixin | PreTrainedTokenizerBase | None: ...


class Engine(Protocol):
    """Any initialised engine of verl."""

    model_config: EngineModel

    @property
    def is_param_offload_enabled(self) -> bool: ...

    @property
    def is_optimizer_offload_enabled(self) -> bool: ...

    def get_data_parallel_rank(self) -> int: ...

    def get_data_parallel_size(self) -> int: ...

    def train_mode(self) -> AbstractContextManager[None]:
        """Compute as in training, dropout included, during the block. Collective where the engine offloads."""
        ...

    def eval_mode(self) -> AbstractContextManager[None]:
        """Infer during the block. Collective where the engine offloads."""
        ...

    def infer_batch(self, data: TensorDict) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Run a forward pass; ``model_output`` has `log_probs` and more, jagged, at each position those of the next
        token.

        Empty on pipeline stages before the last. Collective.
        """
        ...

    def get_per_tensor_param(self) -> tuple[Iterable[tuple[str, torch.Tensor]], object | None]:
        """Return (name, full tensor) of all weights, and the configuration of adapters that are not among them."""
        ...


class FsdpEngine(Engine, Protocol):
    """verl's `FSDPEngine`."""

    module: torch.nn.Module
    engine_config: FSDPEngineConfig
    optimizer: torch.optim.Optimizer
    lr_scheduler: LambdaLR
    scaler: GradScaler | None  # of fp16 only
    checkpoint_config: object
    checkpoint_manager: FSDPCheckpointManager


class MegatronEngineProtocol(Engine, Protocol):
    """verl's `MegatronEngine`."""

    module: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    lr_scheduler: OptimizerParamScheduler
    bridge: LLMBridge
    engine_config: McoreEngineConfig
    checkpoint_mananager: MegatronCheckpointManager  # verl spells it so

    def save_checkpoint(self, local_path: str, *, global_step: int) -> None: ...
