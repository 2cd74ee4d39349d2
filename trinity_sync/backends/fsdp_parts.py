"""What a rank holds of the model of verl's FSDP engine, both generations, as parts of what is saved of it.

FSDP2 keeps each parameter as a DTensor cut along dimension 0, so a rank's part is a slice of rows. FSDP1 flattens the
parameters of a layer into one vector and cuts that, so a rank's part of a tensor is a range of its flattened elements.
With hybrid sharding every group of ranks holds the same; the first group contributes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
            if handle._sharding_strategy in _HYBRID and dist.get_rank(module._inter_node_pg):
                continue
            if handle._sharding_strategy is HandleShardingStrategy.NO_SHARD and self._rank:
                continue
            flat = handle.flat_param
            for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                name = self._own([_joined(prefix, each) for each in _names(flat, fqn)])
                if name is None or not info.in_shard:
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
