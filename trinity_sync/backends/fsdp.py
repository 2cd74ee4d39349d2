"""verl's FSDP engine, both generations (`backend=fsdp` and `backend=fsdp2`), as Hugging Face shards and verl's own
checkpoint files.

FSDP2 keeps each parameter as a DTensor cut along dimension 0, so a rank's shard is a slice of rows. FSDP1 flattens
the parameters of a layer into one vector and cuts that, so a rank's shard of a tensor is a range of its flattened
elements. With hybrid sharding (`backend.fsdp_size` below the number of ranks) every group of ranks holds the same;
the first group contributes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
)
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle, HandleShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.backends import dcp_files
from trinity_sync.backends.base import Deadline, Format
from trinity_sync.backends.engines import FsdpEngine
from trinity_sync.backends.fsdp_state import FsdpState
from trinity_sync.backends.meetings import Meeting
from trinity_sync.backends.saved import saved_by
from trinity_sync.errors import ConfigError
from trinity_sync.weights.shards import Shard, flat_range, row_slice, whole
from trinity_sync.weights.tensors import Saved, from_torch, to_torch, wire_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HYBRID = (HandleShardingStrategy.HYBRID_SHARD, HandleShardingStrategy._HYBRID_SHARD_ZERO2)

_Piece: TypeAlias = tuple[Shard, Callable[[], torch.Tensor]]
"""A shard, and what gives its elements as they are now."""


class FsdpBackend:
    """A rank's view of verl's `FSDPEngineWithLMHead`.

    Args:
        engine: verl's engine, initialised.
        wire_dtype: dtype in which floating parameters travel, as safetensors names it (``"BF16"``).
    """

    def __init__(self, engine: FsdpEngine, wire_dtype: str) -> None:
        self._engine = engine
        self._wire_dtype = wire_dtype
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        # Optimizer and parameters change at the optimizer's step; FSDP unshards into other storage in between.
        # Offloading moves them to other storage after each use.
        offloads = engine.is_param_offload_enabled or engine.is_optimizer_offload_enabled
        self.deadline: Deadline = "now" if offloads else "optimizer_step"
        self._state = FsdpState(engine)
        self._saved = saved_by(engine.model_config, wire_dtype)
        self._pieces = self._find_pieces()

    # -- versions

    def shards(self) -> Sequence[Shard]:
        return [shard for shard, _ in self._pieces]

    def saved(self) -> Mapping[str, Saved]:
        return self._saved

    def sources(self) -> Mapping[str, torch.Tensor]:
        return {shard.name: source() for shard, source in self._pieces}

    def _find_pieces(self) -> list[_Piece]:
        # What is saved in another form than the model holds it, nobody maps here.
        unchanged = {name for name, saved in self._saved.items() if saved.unchanged}
        names = {name for name in unchanged if 0 not in self._saved[name].shape}
        pieces = self._flat_pieces(names) if fsdp_version(self._engine.module) == 1 else self._dtensor_pieces(names)
        buffers = self._buffers()
        for name in sorted(names & buffers.keys()):
            if self._rank == 0:
                shape, dtype = tuple(buffers[name].shape), self._wire(buffers[name].dtype)
                # A copy: what is staged beside the next forward pass must not be what that pass changes.
                pieces.append((whole(name, dtype, shape), partial(self._buffer, name)))
        for name in sorted(unchanged - names) if self._rank == 0 else ():  # no rank has a shard of it
            dtype, shape, _ = self._saved[name]
            empty = torch.empty(shape, dtype=to_torch(dtype))
            pieces.append((whole(name, dtype, shape), empty.detach))
        return pieces

    def _buffer(self, name: str) -> torch.Tensor:
        return self._buffers()[name].clone()

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {clean_tensor_name(name): buffer for name, buffer in self._engine.module.named_buffers()}

    def _wire(self, dtype: torch.dtype) -> str:
        return wire_name(from_torch(dtype), self._wire_dtype)

    def _dtensor_pieces(self, names: set[str]) -> list[_Piece]:
        pieces: list[_Piece] = []
        for name, parameter in self._engine.module.named_parameters():
            if name not in names:
                continue
            shape = tuple(parameter.shape)
            dtype = self._wire(parameter.dtype)
            if not isinstance(parameter, DTensor):
                if self._rank == 0:
                    pieces.append((whole(name, dtype, shape), parameter.detach))
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
            if 0 in local:
                continue
            shard = (
                row_slice(name, dtype, shape, offset[0], offset[0] + local[0]) if shape else whole(name, dtype, shape)
            )
            pieces.append((shard, partial(_local_rows, parameter)))
        return pieces

    def _flat_pieces(self, names: set[str]) -> list[_Piece]:
        pieces: list[_Piece] = []
        root = self._engine.module
        for prefix, module in root.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            handle = module._handle
            if handle._sharding_strategy in _HYBRID and dist.get_rank(module._inter_node_pg):
                continue
            if handle._sharding_strategy is HandleShardingStrategy.NO_SHARD and self._rank:
                continue
            flat = handle.flat_param
            infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
            for fqn, shape, info in infos:
                own = clean_tensor_name(f"{prefix}.{fqn}" if prefix else fqn)
                name = own if own in names else self._shared_name(flat, prefix, fqn, names)
                if name is None or not info.in_shard:
                    continue
                dtype = self._wire(flat.dtype)
                assert info.intra_param_start_idx is not None
                assert info.intra_param_end_idx is not None
                shard = flat_range(name, dtype, tuple(shape), info.intra_param_start_idx, info.intra_param_end_idx + 1)
                begin, count = info.offset_in_shard, info.numel_in_shard
                assert begin is not None
                assert count is not None
                pieces.append((shard, partial(_local_range, handle, begin, count)))
        return pieces

    @staticmethod
    def _shared_name(flat: FlatParameter, prefix: str, fqn: str, names: set[str]) -> str | None:
        """FSDP1 names a tied tensor by its first owner; the name that is saved may be the other one. None: it is not
        saved under any name of the model's own.
        """
        for info in flat._shared_param_infos:
            prime = f"{info.prim_module_name}.{info.prim_param_name}" if info.prim_module_name else info.prim_param_name
            other = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
            if prime == fqn:
                name = clean_tensor_name(f"{prefix}.{other}" if prefix else other)
                if name in names:
                    return name
        return None

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
        version = fsdp_version(module)
        model: PreTrainedModel = module._fsdp_wrapped_module if version == 1 else module
        hugging_face = folder / "huggingface"
        hugging_face.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(hugging_face)
        if self._engine.model_config.generation_config is not None:
            self._engine.model_config.generation_config.save_pretrained(hugging_face)
        processing = self._engine.model_config.get_processor()
        if processing is not None:
            processing.save_pretrained(hugging_face)
        config = folder / "fsdp_config.json"
        config.write_text(json.dumps(asdict(FSDPConfig(FSDP_version=version, world_size=self._world_size)), indent=4))
        return [config, *sorted(path for path in hugging_face.rglob("*") if path.is_file())]

    def load(self, folder: Path) -> None:
        self._state.load(folder)


def _local_rows(parameter: DTensor) -> torch.Tensor:
    return parameter.to_local().detach()


def _local_range(handle: FlatParamHandle, begin: int, count: int) -> torch.Tensor:
    """Return elements of the master copy of what this rank holds of a flat parameter, whatever the forward pass has
    unsharded.
    """
    held: torch.Tensor = getattr(handle.flat_param, "_local_shard", handle.flat_param)
    return held.detach()[begin : begin + count]
