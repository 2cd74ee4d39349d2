"""What a trainer rank holds of each tensor, as verl's engines hand it out without a gather."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.sending import travelling
from trinity_sync.weights import dtypes
from trinity_sync.weights.shards import Rect, Shard, flat_range

Exported = tuple[str, torch.Tensor, Any]
"""Name, this rank's elements (flat), and verl's `ShardSpec`."""


def own_shards(
    exported: Iterable[Exported], wire_dtype: str | None, family: str
) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield the shard of each tensor, and its elements. All ranks yield all tensors, in one order.

    Args:
        exported: what verl's ``get_per_tensor_param_shard`` yields.
        wire_dtype: the dtype of floating tensors on their way; None: as they are.
        family: transformers' ``model_type``.

    Raises:
        RunError: the engine would have to convert what it holds to the names and shapes of Hugging Face, or does not
            hold what it says.
    """
    for name, elements, spec in exported:
        shape = tuple(int(size) for size in spec.full_shape)
        if spec.place is not None or spec.to_hf_chunk is not None or spec.hf_slots is not None:
            _refuse(name)  # the first is of engines whose names and shapes are their own, such as Megatron
        if not _is_saved_so(name, shape, family):
            _refuse(name)
        yield _own(name, shape, elements, spec, wire_dtype)


def _refuse(name: str) -> None:
    raise RunError(
        f"the engine holds {name} in another form than Hugging Face's, and it is put right only where it is gathered: "
        "use backend=trinity for this model"
    )


def _is_saved_so(name: str, shape: tuple[int, ...], family: str) -> bool:
    """Whether verl's gather hands the tensor on as it is: fused experts it takes apart."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    return [one for one, _ in unfuse_moe_params([(name, torch.empty(shape, device="meta"))], family)] == [name]


def _own(
    name: str, shape: tuple[int, ...], elements: torch.Tensor, spec: Any, wire_dtype: str | None
) -> tuple[Shard, torch.Tensor]:
    from verl.workers.engine.spec import BlockPlacement, derive_dtensor_placement

    place, contributes, _ = derive_dtensor_placement(spec)
    dtype = travelling(name, elements, wire_dtype)
    if not contributes or not elements.numel():
        return Shard(name, dtype, shape, ()), elements[:0]
    if not isinstance(place, BlockPlacement):
        shard = flat_range(name, dtype, shape, 0, prod(shape))
    elif place.is_flat_contiguous:
        shard = flat_range(name, dtype, shape, place.flat_offset, place.flat_offset + prod(place.local_shape))
    else:
        rects = _block(shape, place.local_shape, place.global_offset, dtypes.itemsize(dtype))
        shard = Shard(name, dtype, shape, tuple(rects))
    if shard.numel_local != elements.numel():
        raise RunError(f"the engine holds {elements.numel()} elements of {name}, and says {shard.numel_local}")
    return shard, elements


def _block(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], itemsize: int) -> Iterator[Rect]:
    """The rectangles of the matrix view that a block of a tensor is, in the order of its elements.

    Args:
        shape: of the tensor, at least two dimensions, of which one behind the first is cut.
        sizes, starts: of the block, for each dimension.
        itemsize: bytes of an element.
    """
    last = max(dim for dim, size in enumerate(sizes) if size != shape[dim])
    within = prod(shape[last + 1 :])  # what lies behind the last cut is whole, so it lies together
    width = sizes[last] * within
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(start * stride for start, stride in zip(starts[1:], strides[1:], strict=True))
    if last == 1:
        yield Rect(0, starts[0], offset, sizes[0], width)
        return
    at = 0
    for row, *index in itertools.product(*map(range, sizes[:last])):
        col = offset + sum(one * stride for one, stride in zip(index, strides[1:last], strict=True))
        yield Rect(at, starts[0] + row, col, 1, width)
        at += width * itemsize
