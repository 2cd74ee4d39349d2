"""verl's FSDP engine, both generations (`backend=fsdp` and `backend=fsdp2`), as Hugging Face shards and verl's own
checkpoint files.

What of a version a rank contributes is found by `fsdp_parts`. With hybrid sharding (`backend.fsdp_size` below the
number of ranks) every group of ranks holds the same; the first group contributes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.torch_dtypes import PrecisionType

from trinity_sync.backends import dcp_files
from trinity_sync.backends.base import Deadline, Format, HeldBase
from trinity_sync.backends.engines import FsdpEngine
from trinity_sync.backends.fsdp_parts import FsdpParts
from trinity_sync.backends.fsdp_state import FsdpState, adapter_fields, peft_config, write_adapter_config
from trinity_sync.backends.held import HeldSources
from trinity_sync.backends.lora import adapter_by
from trinity_sync.backends.lora_merged import MergedSources
from trinity_sync.backends.meetings import Meeting
from trinity_sync.backends.saved import meta_model, on_the_wire
from trinity_sync.errors import ConfigError
from trinity_sync.models.files import ModelFiles
from trinity_sync.models.hub import local_folder
from trinity_sync.weights.computed import Sources
from trinity_sync.weights.lora import adapter_name, base_name
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.shards import Shard, listed
from trinity_sync.weights.tensors import tower
from trinity_sync.weights.wire import FP32

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput


class FsdpBackend:
    """A rank's view of verl's `FSDPEngineWithLMHead`.

    Args:
        engine: verl's engine, initialised.
        wire_dtype: dtype in which floating parameters travel, as safetensors names it (``"BF16"``).
        keep_fp32: which of them travel in fp32 nevertheless, see `saved_by`.
        merged: of an engine that trains an adapter, publish the sum of base and adapter, in place of the adapter alone.
            Collective then.
    """

    def __init__(
        self, engine: FsdpEngine, wire_dtype: str, keep_fp32: Sequence[str] | None = None, *, merged: bool = False
    ) -> None:
        self._engine = engine
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        # Optimizer and parameters change at the optimizer's step; FSDP unshards into other storage in between.
        # Offloading moves them to other storage after each use.
        offloads = engine.is_param_offload_enabled or engine.is_optimizer_offload_enabled
        self.deadline: Deadline = "now" if offloads else "optimizer_step"
        self._state = FsdpState(engine)
        # read before anything is trained: what becomes of the folder then does not matter
        self._files = ModelFiles.read(local_folder(engine.model_config.local_path)) if self._rank == 0 else None
        empty = meta_model(engine.model_config)
        whole, self._tower = on_the_wire(empty, wire_dtype, keep_fp32), tower(empty)
        _check_views(whole, engine.module)
        _check_kept(whole, wire_dtype, engine)
        adapter = peft_config(engine.module)
        trained = whole if adapter is None else adapter_by(engine.model_config, adapter, wire_dtype, keep_fp32)
        held = HeldSources(
            FsdpParts(engine.module, trained, self._name if adapter is None else adapter_name).find(),
            keep=not offloads,
        )
        self._adapter = adapter
        self._whole = self._saved = whole
        self._sources: HeldSources | MergedSources = held
        if adapter is not None and merged:
            base = self._base(keep=not offloads)
            self._sources = MergedSources(base, whole, held, trained, adapter, self._device)
        else:
            self._saved = trained

    # -- versions

    def shards(self) -> Sequence[Shard]:
        return self._sources.shards()

    def saved(self) -> Mapping[str, Saved]:
        return self._saved

    def sources(self) -> Sources:
        return self._sources.now()

    def base(self) -> HeldBase:
        """Return what the adapter is trained on, of an engine that trains one. Collective where the engine offloads."""
        held = self._base(keep=False)
        return HeldBase(self._whole, held.shards(), held.now())

    def adapter_config(self) -> dict[str, object]:
        """Return what an ``adapter_config.json`` says of the adapter, of an engine that trains one."""
        assert self._adapter is not None
        return adapter_fields(self._adapter)

    def _device(self) -> torch.device:
        """Where the parameters are now; offloaded ones in the CPU's memory, also those of replicas."""
        return next(self._engine.module.parameters()).device

    def _base(self, *, keep: bool) -> HeldSources:
        def name(held: str) -> str | None:
            return None if (base := base_name(held)) is None else self._name(base)

        return HeldSources(FsdpParts(self._engine.module, self._whole, name).find(), keep=keep)

    def _name(self, held: str) -> str | None:
        """A vision tower is in no version."""
        return None if held in self._tower else held

    # -- full checkpoints

    def state(self, form: Format) -> Mapping[str, object]:
        return self._state.files(form)

    def write_distributed(
        self, value: object, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: Meeting
    ) -> list[Path]:
        assert isinstance(value, dict), "what `state` gave"
        return dcp_files.write(value, copied, folder, meeting)

    def before_change(self, callback: Callable[[], None]) -> None:
        self._engine.optimizer.register_step_pre_hook(lambda *_: callback())

    def write_metadata(self, folder: Path) -> list[Path]:
        module = self._engine.module
        assert self._files is not None, "rank 0 writes"
        beside = self._files.write(folder / "huggingface")
        config = folder / "fsdp_config.json"
        config.write_text(json.dumps(asdict(FSDPConfig(fsdp_version(module), self._world_size)), indent=4))
        files = [config, *beside]
        adapter = peft_config(module)
        return files if adapter is None else [*files, *write_adapter_config(adapter, folder)]

    def load(self, folder: Path) -> None:
        self._state.load(folder)


def logits_in_fp32(engine: FsdpEngine) -> None:
    """Have the model give its logits in fp32. verl divides them by the temperature in the dtype that they have, which
    in bf16 is rounded itself, and so is what comes out.
    """

    def widen(module: torch.nn.Module, inputs: object, output: CausalLMOutput) -> CausalLMOutput:
        output.logits = output.logits.float()
        return output

    engine.module.register_forward_hook(widen)


def _check_views(saved: Mapping[str, Saved], module: torch.nn.Module) -> None:
    made = sorted(name for name, tensor in saved.items() if tensor.held is None)
    if made:
        raise ConfigError(
            f"backend={'fsdp' if fsdp_version(module) == 1 else 'fsdp2'} cannot publish this model: transformers saves "
            f"{len(made)} of its {len(saved)} tensors in another form than the model holds them, made of several or "
            f"copied: {listed(made, 4)}; choose another model or backend"
        )


def _check_kept(saved: Mapping[str, Saved], wire_dtype: str, engine: FsdpEngine) -> None:
    """verl casts all of a model to the dtype of its master weights, also what its class keeps in fp32."""
    kept = sorted(name for name, tensor in saved.items() if tensor.dtype == FP32 != wire_dtype)
    if not kept:
        return
    dtype = engine.engine_config.model_dtype or "fp32"
    if PrecisionType.to_dtype(dtype) != torch.float32:
        raise ConfigError(
            f"backend.master_dtype is {dtype}, in which the trainer would round what is kept in fp32: "
            f"{listed(kept, 4)}; set backend.master_dtype=fp32, or do without it by sync.keep_fp32=[]"
        )
