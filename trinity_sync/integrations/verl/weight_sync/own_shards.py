"""What a trainer rank holds of each tensor, as verl's engines hand it out without a gather."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trinity_sync.errors import RunError
from trinity_sync.weights import dtypes
from trinity_sync.weights.shards import Rect, Shard, flat_range, matrix_view
from trinity_sync.weights.tensors import from_torch, wire_name

Exported = tuple[str, torch.Tensor, Any]
"""Name, this rank's elements (flat), and verl's `ShardSpec`."""


def own_shards(exported: Iterable[Exported], wire_dtype: str | None) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield the shard of each tensor, and its elements. All ranks yield all tensors, in one order.

    Args:
        exported: what verl's ``get_per_tensor_param_shard`` yields.
        wire_dtype: the dtype of floating tensors on their way; None: as they are.

    Raises:
        RunError: the engine would have to convert what it holds to the names and shapes of Hugging Face.
    """
    for name, elements, spec in exported:
        yield _own(name, elements, spec, wire_dtype)


def _own(name: str, elements: torch.Tensor, spec: Any, wire_dtype: str | None) -> tuple[Shard, torch.Tensor]:
    from verl.workers.engine.spec import BlockPlacement, derive_dtensor_placement

    if spec.to_hf_chunk is not None or spec.hf_slots is not None:
        raise RunError(
            f"the engine holds {name} in another form than Hugging Face's, and it is put right only where it is "
            "gathered: use backend=trinity for this model"
        )
    if spec.place is None:
        place, contributes, _ = derive_dtensor_placement(spec)
    else:
        place, contributes = spec.place, spec.contributes
    shape = tuple(int(size) for size in spec.full_shape)
    dtype = wire_name(from_torch(elements.dtype), wire_dtype)
    if not contributes or not elements.numel():
        return Shard(name, dtype, shape, ()), elements[:0]
    if not isinstance(place, BlockPlacement):
        return flat_range(name, dtype, shape, int(place), int(place) + elements.numel()), elements
    if place.is_flat_contiguous:
        return flat_range(name, dtype, shape, place.flat_offset, place.flat_offset + elements.numel()), elements
    return Shard(name, dtype, shape, tuple(_block(shape, place, dtypes.itemsize(dtype)))), elements


def _block(shape: tuple[int, ...], place: Any, itemsize: int) -> Iterator[Rect]:
    """The rectangles of a block of a tensor: one of a matrix, else one for each run that lies together."""
    sizes, starts = place.local_shape, place.global_offset
    if len(shape) == 2:
        yield Rect(0, starts[0], starts[1], sizes[0], sizes[1])
        return
    _, cols = matrix_view(shape)
    at = 0
    for index in itertools.product(*map(range, sizes[:-1])):
        row = starts[0] + index[0]
        col, width = 0, cols
        for start, offset, size in zip(starts[1:-1], index[1:], shape[1:-1], strict=True):
            width //= size
            col += (start + offset) * width
        yield Rect(at, row, col + starts[-1], 1, sizes[-1])
        at += sizes[-1] * itemsize
