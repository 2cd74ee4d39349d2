"""Whole tensors as parts of a few large buckets each: how a state dict travels through Ray's object store or over a
process group, where one message per tensor would cost more than the bytes.

A bucket is a part of its own, and `PartLayout` says what lies where in it. A tensor lies in one bucket, in wire dtype,
so a reader gets views of the bucket and copies nothing. Where it goes follows from the list of (name, dtype, shape) and
the bucket length alone: a receiver packs tensors of torch's ``meta`` device, which have no bytes, and has the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trinity_sync.errors import RunError
from trinity_sync.weights.layout import ALIGNMENT, PartLayout, aligned
from trinity_sync.weights.shards import Described, Shard, whole
from trinity_sync.weights.staging import views
from trinity_sync.weights.tensors import from_torch, to_torch, wire_name

BUCKET_BYTES = 64 << 20


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[PartLayout, torch.Tensor]]:
    """Copy tensors one by one into buckets, cast on the way; a tensor may be let go when the next one is asked for.

    Args:
        tensors: (name, whole tensor) on any device.
        wire_dtype: the dtype of floating tensors on the wire, as safetensors names it; None: as they are.
        bucket_bytes: length of a bucket; a tensor that is larger has one of its own.
        device: where the buckets are.

    Yields:
        The layout and the bytes (uint8, ``layout.nbytes`` long) of each bucket. They are overwritten by the next one's.

    Raises:
        RunError: a name came twice.
        ValueError: a dtype that does not travel.
    """
    room = torch.empty(0, dtype=torch.uint8, device=device)
    entries: list[tuple[Shard, int]] = []
    seen: set[str] = set()
    end = number = 0
    for name, tensor in tensors:
        if name in seen:
            raise RunError(f"the state dict has {name} twice")
        seen.add(name)
        shard, start = _shard(name, tensor, wire_dtype), aligned(end)
        if entries and start + shard.nbytes > bucket_bytes:
            yield _bucket(number, entries), room[:end]
            entries, start, end, number = [], 0, 0, number + 1
        stop = start + shard.nbytes
        if room.numel() < stop:
            # Only the first bytes of a bucket can need more room than there is, so nothing has to be carried over.
            room = torch.empty(max(bucket_bytes, stop), dtype=torch.uint8, device=device)
        if start > end:  # they are part of the digest, so they must not be what an earlier bucket left
            room[end:start] = 0
        room[start:stop].view(to_torch(shard.dtype)).view(tensor.shape).copy_(tensor.detach())
        entries.append((shard, start))
        end = stop
    if entries:
        yield _bucket(number, entries), room[:end]


def unpack(bucket: PartLayout, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what lies in a bucket, as views of its bytes."""
    for shard, tensor in zip(bucket.shards, views(bucket, data), strict=True):
        yield shard.name, tensor.view(shard.shape)


def layouts(described: Iterable[Described], bucket_bytes: int) -> list[PartLayout]:
    """The buckets into which `pack` puts tensors of this description."""
    return [layout for layout, _ in pack(blanks(described, "meta"), bucket_bytes=bucket_bytes, device="meta")]


def blanks(described: Iterable[Described], device: str | torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor that holds nothing yet) of each."""
    for name, dtype, shape in described:
        yield name, torch.empty(tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)


def describe(
    tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: str | None = None
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Describe tensors as a receiver has to know them, floating ones in the wire dtype."""
    return described(_shard(name, tensor, wire_dtype) for name, tensor in tensors)


def described(shards: Iterable[Shard]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Describe the tensors of which these are all."""
    return [(shard.name, str(to_torch(shard.dtype)), shard.shape) for shard in shards]


def _shard(name: str, tensor: torch.Tensor, wire_dtype: str | None) -> Shard:
    return whole(name, wire_name(from_torch(tensor.dtype), wire_dtype), tensor.shape)


def _bucket(number: int, entries: list[tuple[Shard, int]]) -> PartLayout:
    shard, start = entries[-1]
    nbytes = start + shard.nbytes
    return PartLayout(f"bucket {number}", tuple(entries), nbytes, max(aligned(nbytes), ALIGNMENT))
