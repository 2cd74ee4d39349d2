"""verl's FSDP engine, both generations (`backend=fsdp` and `backend=fsdp2`), as Hugging Face shards and verl's own
checkpoint files.

`FsdpParts` finds a rank's contribution to a version. With hybrid sharding (`backend.fsdp_size` below the number of
ranks) every group of ranks has the same tensors; the first group contributes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle, HandleShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.torch_dtypes import PrecisionType

from trinity_sync.backends import fsdp_state
from trinity_sync.backends.adapters import HeldPart, HeldSources, MergedSources, SavedParts, adapter_by
from trinity_sync.backends.base import Deadline, Format, FsdpEngine, HeldBase
from trinity_sync.backends.fsdp_state import FsdpState, adapter_fields, peft_config, write_adapter_config
from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.backends.saved_tensors import meta_model, on_the_wire
from trinity_sync.errors import ConfigError
from trinity_sync.models.files import ModelFiles, local_folder
from trinity_sync.weights.lora import adapter_name, base_name
from trinity_sync.weights.saved_views import Cut, SavedTensor, StridedView, row_major
from trinity_sync.weights.shards import Shard, listed, whole
from trinity_sync.weights.staging import Sources
from trinity_sync.weights.tensors import to_torch, tower
from trinity_sync.weights.wire import FP32

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput


class FsdpBackend:
    """A rank's view of verl's initialised `FSDPEngineWithLMHead`; arguments as of `BackendOption.view`.

    With `merged` it is collective.
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
        # read before training, so that later changes of the folder do not matter
        self._files = ModelFiles.read(local_folder(engine.model_config.local_path)) if self._rank == 0 else None
        empty = meta_model(engine.model_config)
        whole, self._tower = on_the_wire(empty, wire_dtype, keep_fp32), tower(empty)
        _check_views(whole, engine.module)
        _check_kept(whole, wire_dtype, engine)
        adapter = peft_config(engine.module)
        trained = whole if adapter is None else adapter_by(engine.model_config, adapter, wire_dtype, keep_fp32)
        held = HeldSources(
            FsdpParts(engine.module, trained, self._name if adapter is None else adapter_name).find(), keep=not offloads
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

    def saved(self) -> Mapping[str, SavedTensor]:
        return self._saved

    def sources(self) -> Sources:
        return self._sources.now()

    def base(self) -> HeldBase:
        """Return the base of the adapter, for an engine that trains one. Collective where the engine offloads."""
        held = self._base(keep=False)
        return HeldBase(self._whole, held.shards(), held.now())

    def adapter_config(self) -> Mapping[str, object]:
        assert self._adapter is not None
        return adapter_fields(self._adapter)

    def _device(self) -> torch.device:
        """Return the present device of the parameters: the CPU for offloaded ones, on replicas too."""
        return next(self._engine.module.parameters()).device

    def _base(self, *, keep: bool) -> HeldSources:
        def name(held: str) -> str | None:
            return None if (base := base_name(held)) is None else self._name(base)

        return HeldSources(FsdpParts(self._engine.module, self._whole, name).find(), keep=keep)

    def _name(self, held: str) -> str | None:
        """Return the name, or None for a vision tower's tensor, which is in no version."""
        return None if held in self._tower else held

    # -- full checkpoints

    def state(self, form: Format) -> Mapping[str, object]:
        return self._state.files(form)

    def write_distributed(
        self, value: object, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: RankMeeting
    ) -> list[Path]:
        assert isinstance(value, dict), "the value of `state`"
        return fsdp_state.write(value, copied, folder, meeting)

    def before_change(self, callback: Callable[[], None]) -> None:
        self._engine.optimizer.register_step_pre_hook(lambda *_: callback())

    def write_metadata(self, folder: Path) -> list[Path]:
        module = self._engine.module
        assert self._files is not None, "rank 0 writes"
        config = folder / "fsdp_config.json"
        config.write_text(json.dumps(asdict(FSDPConfig(fsdp_version(module), self._world_size)), indent=4))
        files = [config, *self._files.write(folder / "huggingface")]
        adapter = peft_config(module)
        return files if adapter is None else [*files, *write_adapter_config(adapter, folder)]

    def load(self, folder: Path) -> None:
        self._state.load(folder)


def logits_in_fp32(engine: FsdpEngine) -> None:
    """Have the model return its logits in fp32.

    verl divides them by the temperature in their dtype, and in bf16 that rounds.
    """

    def widen(module: torch.nn.Module, inputs: object, output: CausalLMOutput) -> CausalLMOutput:
        output.logits = output.logits.float()
        return output

    engine.module.register_forward_hook(widen)


@cache
def accumulate_without_unused() -> None:
    """Let gradients add up over micro-batches where no micro-batch uses some modules, such as a vision tower.

    FSDP2 of torch 2.13 raises AttributeError for their parameters, which were never gathered; with one micro-batch it
    leaves them out.
    """
    accumulate = FSDPParam.to_accumulated_grad_if_needed

    def accumulate_used(parameter: FSDPParam) -> None:
        if hasattr(parameter, "_unsharded_param"):
            accumulate(parameter)

    FSDPParam.to_accumulated_grad_if_needed = accumulate_used  # type: ignore[method-assign,assignment]


def _check_views(saved: Mapping[str, SavedTensor], module: torch.nn.Module) -> None:
    copies = sorted(name for name, tensor in saved.items() if tensor.held is None)
    if copies:
        raise ConfigError(
            f"backend={'fsdp' if fsdp_version(module) == 1 else 'fsdp2'} cannot publish this model: transformers saves "
            f"{len(copies)} of its {len(saved)} tensors in another form (several combined, or copied): "
            f"{listed(copies, 4)}; choose another model or backend"
        )


def _check_kept(saved: Mapping[str, SavedTensor], wire_dtype: str, engine: FsdpEngine) -> None:
    """Check that the master weights are in fp32 if tensors travel in fp32: verl casts all of a model to that dtype."""
    kept = sorted(name for name, tensor in saved.items() if tensor.dtype == FP32 != wire_dtype)
    if not kept:
        return
    dtype = engine.engine_config.model_dtype or "fp32"
    if PrecisionType.to_dtype(dtype) != torch.float32:
        raise ConfigError(
            f"backend.master_dtype is {dtype}, in which the trainer would round tensors that are kept in fp32: "
            f"{listed(kept, 4)}; set backend.master_dtype=fp32, or sync.keep_fp32=[]"
        )


_HYBRID = (HandleShardingStrategy.HYBRID_SHARD, HandleShardingStrategy._HYBRID_SHARD_ZERO2)


class FsdpParts:
    """Finds a rank's contribution to versions, for both generations of FSDP. Replicas contribute nothing. `module`: the
    engine's model, wrapped by FSDP or FSDP2. `saved`: the tensors of a version, see `saved_by`. `name_of`: maps a
    tensor's name in `module` to its name in `SavedTensor.held`; None: not part of a version. Default: the same name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        saved: Mapping[str, SavedTensor],
        name_of: Callable[[str], str | None] | None = None,
    ) -> None:
        self._module = module
        self._rank = dist.get_rank()
        self._parts = SavedParts(saved)
        self._name_of = name_of or str

    def find(self) -> Iterator[HeldPart]:
        """Yield the parts in the order of the memory."""
        buffers = sorted(self._buffers())
        if fsdp_version(self._module) == 1:
            yield from self._flat_parts()
        else:
            yield from self._dtensor_parts()
        if self._rank:
            return
        for name in buffers:
            buffer = self._buffers()[name]
            # A copy, because a forward pass during staging changes the buffer.
            cuts = self._parts.of(name, buffer.shape, 0, buffer.numel())
            yield HeldPart(partial(self._buffer, name), cuts, is_copy=True)
        for name, (dtype, shape, *_) in self._parts.empty().items():
            empty = torch.empty(shape, dtype=to_torch(dtype))
            yield HeldPart(empty.detach, [Cut(whole(name, dtype, shape), (StridedView(shape, row_major(shape), 0),))])

    def _buffer(self, name: str) -> torch.Tensor:
        return self._buffers()[name].clone(memory_format=torch.contiguous_format)

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers: dict[str, torch.Tensor] = {}
        for prefix, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                held = self._held_name([_joined(prefix, name)])
                if held is not None:
                    buffers[held] = buffer
        return buffers

    def _held_name(self, names: Sequence[str]) -> str | None:
        """Return a tensor's name in `SavedTensor.held`; None: it is not part of a version. A tied tensor has several
        `names`.
        """
        named = [held for name in names if (held := self._name_of(clean_tensor_name(name))) is not None]
        found = next((held for held in named if held in self._parts.held), None)
        if named and found is None:
            raise ConfigError(
                f"model.path: the engine trains {named[0]}, but by the model's config save_pretrained would not write "
                "it, so it would be in no version; where the config ties it to another tensor and the folder stores "
                "both, set tie_word_embeddings=false in its config.json"
            )
        return found

    def _dtensor_parts(self) -> Iterator[HeldPart]:
        names = defaultdict(list)
        for alias, parameter in self._module.named_parameters(remove_duplicate=False):
            names[parameter].append(alias)
        for parameter, aliases in names.items():
            name = self._held_name(aliases)
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
                raise ConfigError(f"backend: {name} is cut along another dimension than the first: not supported")
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
                name = self._held_name([_joined(prefix, each) for each in _names(flat, fqn)])
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
    """Return all names of a tensor that FSDP1 knows by its first owner: a tied one has several."""
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
    """Return elements of this rank's master copy of a flat parameter, even while the forward pass has it unsharded."""
    local: torch.Tensor = getattr(handle.flat_param, "_local_shard", handle.flat_param)
    return local.detach()[begin : begin + count]
