"""The interface of the trainer's worker to a training engine, and the parts of verl's engines that are used. One file
per backend implements the interface; see `FsdpBackend`.

The calls on every rank, in this order:

1. verl's worker makes the engine and initialises it (collective), then `BackendOption.view` returns this view of it.
2. `shards()` once: the layout never changes during a run. The driver compares those of all ranks with `saved()` of one.
3. `sources()` for each version: the live local tensors in the shards' order.
4. `state()` for each full checkpoint: everything a resume needs, in the files that verl itself would write. Its tensors
   may be live too.

Live tensors change at `deadline`, so a later copy must be complete by then; `before_change` calls back just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import torch

from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.shards import Shard
from trinity_sync.weights.staging import Sources, TensorCopy

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


Deadline = Literal["optimizer_step", "offload", "now"]

Format = Literal["verl", "dcp"]

DISTRIBUTED = "dcp"
"""Folder of the ``dcp`` format below the checkpoint's ``actor``; see `Backend.write_distributed`."""


class HeldBase(NamedTuple):
    """A rank's part of the base model of an adapter.

    Args:
        saved: all tensors of the base, as `Backend.saved` of a run without an adapter returns them.
        shards: this rank's shards of it; replicas have none.
        sources: the elements of each shard, live, by name.
    """

    saved: Mapping[str, SavedTensor]
    shards: Sequence[Shard]
    sources: Mapping[str, torch.Tensor]


class EngineView(Protocol):
    """One rank's view of its training engine. All tensors are in Hugging Face coordinates."""

    @property
    def deadline(self) -> Deadline: ...

    def shards(self) -> Sequence[Shard]:
        """Return this rank's contribution to a version, in wire dtype.

        Replicas contribute nothing, so the ranks cover each tensor once.
        """

    def saved(self) -> Mapping[str, SavedTensor]:
        """Return the tensors of a version, from the model's architecture and not from `shards`."""

    def sources(self) -> Sources:
        """Return live local tensors by name, one per shard, elements in the shard's local order, or `ComputedTensor`.

        Collective where the engine offloads, and where a version is the sum of base and adapter.
        """

    def before_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on the training thread, each time before the tensors of `state` change.

        It is not called where the deadline is ``now``: there they may change at any time.
        """

    def load(self, folder: Path) -> None:
        """Restore a checkpoint: ``verl`` on the same number of ranks, ``dcp`` on any. Collective."""


class Backend(EngineView, Protocol):
    """The view of an engine whose checkpoint format is one object per file."""

    def state(self, form: Format) -> Mapping[str, object]:
        """Return file name -> object for `torch.save`, and under `DISTRIBUTED` the object for `write_distributed`.

        Its tensors do not change before `deadline`; everything else in it is a copy. Collective: all ranks call it.
        """

    def write_distributed(
        self, value: object, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: RankMeeting
    ) -> list[Path]:
        """Write the `DISTRIBUTED` object of `state` into `folder`, and return this rank's files.

        Collective; called on a background thread during training.

        Args:
            copied: a plain tensor of this rank below `value` -> its copy in the CPU's memory.
            meeting: the meeting of the save's ranks.

        Raises:
            RunError: on all ranks, if one fails.
        """

    def write_metadata(self, folder: Path) -> list[Path]:
        """Rank 0: write config, tokenizer and the engine's own JSON next to the shards, for verl's tools."""


class AdapterBackend(Backend, Protocol):
    """The view of an engine that trains an adapter."""

    def base(self) -> HeldBase:
        """Return the base of the adapter. Collective where the engine offloads."""

    def adapter_config(self) -> Mapping[str, object]:
        """Return the fields that peft writes into an ``adapter_config.json``."""


class SelfWritingBackend(EngineView, Protocol):
    """A backend whose checkpoint format is more than one object per file, so it writes its files itself."""

    def begin_save(
        self, folder: Path, meeting: RankMeeting, *, lazily: bool = False, durable: bool = False
    ) -> tuple[TensorCopy, Callable[[], list[Path | FileTuple]]]:
        """Copy the training state for `folder`. Collective; writes nothing yet.

        Args:
            folder: the checkpoint's folder; the returned function creates it.
            meeting: the meeting of the save's ranks.
            lazily: where the deadline allows it, the copy may continue in the background, and must be waited for before
                the state changes.
            durable: have the large files on disk when they are written.

        Returns:
            The copy, and a function that writes it and returns this rank's files, or raises RunError on all ranks. The
            function is collective too, and called on a background thread of every rank during training. A file is a
            path, or (path relative to `folder`, bytes, xxh3_128 hex) if it needs no further digest and fsync.
        """


View: TypeAlias = Backend | SelfWritingBackend


# The parts of verl's engines that this package uses. verl and megatron-core are not imported.


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

    def eval_mode(self) -> AbstractContextManager[None]:
        """Infer during the block. Collective where the engine offloads."""

    def infer_batch(self, data: TensorDict) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Run a forward pass; ``model_output`` has `log_probs` and more, jagged, at each position those of the next
        token.

        Empty on pipeline stages before the last. Collective.
        """

    def get_per_tensor_param(self) -> tuple[Iterable[tuple[str, torch.Tensor]], object | None]:
        """Return (name, full tensor) of all weights, and the configuration of adapters that are not among them."""


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
