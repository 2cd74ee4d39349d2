"""What a rank holds of the model of verl's FSDP engine, both generations, as parts of what is saved of it.

FSDP2 keeps each parameter as a DTensor cut along dimension 0, so a rank's part is a slice of rows. FSDP1 flattens the
parameters of a layer into one vector and cuts that, so a rank's part of a tensor is a range of its flattened elements.
With hybrid sharding every group of ranks holds the same; the first group contributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle, HandleShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.backends.held import HeldPart, SavedParts
from trinity_sync.errors import ConfigError
from trinity_sync.weights.saved_views import Cut, Saved, Strided, row_major
from trinity_sync.weights.shards import whole
from trinity_sync.weights.tensors import to_torch

_HYBRID = (HandleShardingStrategy.HYBRID_SHARD, HandleShardingStrategy._HYBRID_SHARD_ZERO2)


class FsdpParts:
    """Finds what a rank contributes. Replicas contribute nothing.

    Args:
        module: the engine's model, wrapped by FSDP or FSDP2.
        saved: what is to be contributed, see `saved_by`.
        name_of: the name that `Saved.held` has of a tensor that the model holds under this one; None: it is none of
            these. Not given: the same.
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
            ConfigError: a tensor is cut, or has a size, that is not known.
        """
        if fsdp_version(self._module) == 1:
            yield from self._flat_parts()
        else:
            yield from self._dtensor_parts()
        if self._rank:
            return
        for name, buffer in sorted(self._buffers().items()):
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
        return {self._named(name): buffer for name, buffer in self._module.named_buffers()}

    def _named(self, name: str) -> str:
        """Return the name of a tensor as `Saved.held` has it; empty for one that is not to be contributed."""
        return self._name_of(clean_tensor_name(name)) or ""

    def _dtensor_parts(self) -> Iterator[HeldPart]:
        for held, parameter in self._module.named_parameters():
            name = self._named(held)
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
        names = set(self._parts.held)
        root = self._module
        for prefix, module in root.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            handle = module._handle
            if handle._sharding_strategy in _HYBRID and dist.get_rank(module._inter_node_pg):
                continue
            if handle._sharding_strategy is HandleShardingStrategy.NO_SHARD and self._rank:
                continue
            flat = handle.flat_param
            for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                own = self._named(f"{prefix}.{fqn}" if prefix else fqn)
                name = own if own in names else self._shared_name(flat, prefix, fqn, names)
                if name is None or not info.in_shard:
                    continue
                assert info.intra_param_start_idx is not None
                assert info.intra_param_end_idx is not None
                begin, count = info.offset_in_shard, info.numel_in_shard
                assert begin is not None
                assert count is not None
                cuts = self._parts.of(name, shape, info.intra_param_start_idx, info.intra_param_end_idx + 1)
                yield HeldPart(partial(_local_range, handle, begin, count), cuts)

    def _shared_name(self, flat: FlatParameter, prefix: str, fqn: str, names: set[str]) -> str | None:
        """FSDP1 names a tied tensor by its first owner; the name that is saved may be the other one. None: it is not
        saved under any name of the model's own.
        """
        for info in flat._shared_param_infos:
            prime = f"{info.prim_module_name}.{info.prim_param_name}" if info.prim_module_name else info.prim_param_name
            other = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
            if prime == fqn:
                name = self._named(f"{prefix}.{other}" if prefix else other)
                if name in names:
                    return name
        return None


def _local_rows(parameter: DTensor) -> torch.Tensor:
    return parameter.to_local().detach()


def _local_range(handle: FlatParamHandle, begin: int, count: int) -> torch.Tensor:
    """Return elements of the master copy of what this rank holds of a flat parameter, whatever the forward pass has
    unsharded.
    """
    held: torch.Tensor = getattr(handle.flat_param, "_local_shard", handle.flat_param)
    return held.detach()[begin : begin + count]
