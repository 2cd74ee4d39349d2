"""verl's FSDP engine, both generations (`backend=fsdp` and `backend=fsdp2`), as Hugging Face shards and verl's own
checkpoint files.

What of a version a rank contributes is found by `fsdp_parts`. With hybrid sharding (`backend.fsdp_size` below the
number of ranks) every group of ranks holds the same; the first group contributes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle, HandleShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.torch_dtypes import PrecisionType

from trinity_sync.backends import fsdp_state
from trinity_sync.backends.adapters import HeldPart, HeldSources, MergedSources, SavedParts, adapter_by
from trinity_sync.backends.base import Deadline, Format, HeldBase
from trinity_sync.backends.engine_types import FsdpEngine
from trinity_sync.backends.fsdp_state import FsdpState, adapter_fields, peft_config, write_adapter_config
from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.backends.saved_tensors import meta_model, on_the_wire
from trinity_sync.errors import ConfigError
from trinity_sync.models.files import ModelFiles
from trinity_sync.models.hub import local_folder
from trinity_sync.weights.lora import adapter_name, base_name
from trinity_sync.weights.saved_views import Cut, Saved, Strided, row_major
from trinity_sync.weights.shards import Shard, listed, whole
from trinity_sync.weights.staging import Sources
from trinity_sync.weights.tensors import to_torch, tower
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
        self, value: object, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: RankMeeting
    ) -> list[Path]:
        assert isinstance(value, dict), "what `state` gave"
        return fsdp_state.write(value, copied, folder, meeting)

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


# What a rank holds of the model of verl's FSDP engine, both generations, as parts of what is saved of it.


_HYBRID = (HandleShardingStrategy.HYBRID_SHARD, HandleShardingStrategy._HYBRID_SHARD_ZERO2)


class FsdpParts:
    """Finds what a rank contributes. Replicas contribute nothing. Nothing that the model holds is left out in silence.

    Args:
        module: the engine's model, wrapped by FSDP or FSDP2.
        saved: what is to be contributed, see `saved_by`.
        name_of: the name that `Saved.held` has of a tensor that the model holds under this one; None: it is not to be
            contributed. Not given: the same.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        saved: Mapping[str, Saved],
        name_of: Callable[[str], str | None] | None = None,
    ) -> None:
        self._module = module
        self._rank = dist.get_rank()
        self._parts = SavedParts(saved)
        self._name_of = name_of or str

    def find(self) -> Iterator[HeldPart]:
        """Yield the parts in the order in which they lie in memory.

        Raises:
            ConfigError: a tensor is cut, or has a size, that is not known; or nothing is saved of one.
        """
        buffers = sorted(self._buffers())
        if fsdp_version(self._module) == 1:
            yield from self._flat_parts()
        else:
            yield from self._dtensor_parts()
        if self._rank:
            return
        for name in buffers:
            buffer = self._buffers()[name]
            # A copy: what is staged beside the next forward pass must not be what that pass changes.
            yield HeldPart(
                partial(self._buffer, name), self._parts.of(name, buffer.shape, 0, buffer.numel()), is_copy=True
            )
        for name, (dtype, shape, *_) in self._parts.empty().items():
            empty = torch.empty(shape, dtype=to_torch(dtype))
            yield HeldPart(empty.detach, [Cut(whole(name, dtype, shape), (Strided(shape, row_major(shape), 0),))])

    def _buffer(self, name: str) -> torch.Tensor:
        return self._buffers()[name].clone(memory_format=torch.contiguous_format)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that a state dict has, by the name that `Saved.held` has of them."""
        held: dict[str, torch.Tensor] = {}
        for prefix, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                own = self._own([_joined(prefix, name)])
                if own is not None:
                    held[own] = buffer
        return held

    def _own(self, names: Sequence[str]) -> str | None:
        """Return the name that `Saved.held` has of a tensor; None: it is not to be contributed.

        Args:
            names: those by which the model holds it, several of one that is tied.

        Raises:
            ConfigError: it is to be contributed, and nothing is saved of it.
        """
        named = [own for name in names if (own := self._name_of(clean_tensor_name(name))) is not None]
        found = next((own for own in named if own in self._parts.held), None)
        if named and found is None:
            raise ConfigError(
                f"model.path: the engine holds {named[0]}, of which save_pretrained would write nothing by the model's "
                "config, so it would be trained and in no version; where the config ties it to another tensor and the "
                "folder stores both, set tie_word_embeddings=false in its config.json"
            )
        return found

    def _dtensor_parts(self) -> Iterator[HeldPart]:
        names = defaultdict(list)
        for held, parameter in self._module.named_parameters(remove_duplicate=False):
            names[parameter].append(held)
        for parameter, held_as in names.items():
            name = self._own(held_as)
            if name is None:
                continue
            shape = tuple(parameter.shape)
            if not isinstance(parameter, DTensor):
                if self._rank == 0:
                    yield HeldPart(parameter.detach, self._parts.of(name, shape, 0, parameter.numel()))
                continue
            coordinate = parameter.device_mesh.get_coordinate()
            assert coordinate is not None, "every rank is part of the engine's mesh"
            replicated = [
                index for index, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)
            ]
            if any(coordinate[index] for index in replicated):
                continue
            local, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            if not all(size == whole_size for size, whole_size in zip(local[1:], shape[1:], strict=True)):
                raise ConfigError(f"backend: {name} is cut along another dimension than the first, which is not known")
            start = offset[0] * prod(shape[1:]) if shape else 0
            yield HeldPart(partial(_local_rows, parameter), self._parts.of(name, shape, start, start + prod(local)))

    def _flat_parts(self) -> Iterator[HeldPart]:
        root = self._module
        for prefix, module in root.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            handle = module._handle
            strategy = handle._sharding_strategy
            repeats = (strategy in _HYBRID and dist.get_rank(module._inter_node_pg)) or (
                strategy is HandleShardingStrategy.NO_SHARD and self._rank
            )
            flat = handle.flat_param
            for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                name = self._own([_joined(prefix, each) for each in _names(flat, fqn)])
                if name is None or repeats or not info.in_shard:
                    continue
                assert info.intra_param_start_idx is not None
                assert info.intra_param_end_idx is not None
                begin, count = info.offset_in_shard, info.numel_in_shard
                assert begin is not None
                assert count is not None
                cuts = self._parts.of(name, shape, info.intra_param_start_idx, info.intra_param_end_idx + 1)
                yield HeldPart(partial(_local_range, handle, begin, count), cuts)


def _names(flat: FlatParameter, first: str) -> list[str]:
    """All names of a tensor that FSDP1 knows by its first owner: a tied one has several."""
    return [
        first,
        *(
            _joined(info.module_name, info.param_name)
            for info in flat._shared_param_infos
            if _joined(info.prim_module_name, info.prim_param_name) == first
        ),
    ]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _local_rows(parameter: DTensor) -> torch.Tensor:
    return parameter.to_local().detach()


def _local_range(handle: FlatParamHandle, begin: int, count: int) -> torch.Tensor:
    """Return elements of the master copy of what this rank holds of a flat parameter, whatever the forward pass has
    unsharded.
    """
    held: torch.Tensor = getattr(handle.flat_param, "_local_shard", handle.flat_param)
    return held.detach()[begin : begin + count]
