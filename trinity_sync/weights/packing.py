"""Whole tensors packed into a few large buckets: how a state dict travels through Ray's object store or over a process
group, where one message per tensor would cost more than the bytes.

A tensor lies in one bucket, in wire dtype, on a 64-byte boundary, so a reader gets views of the bucket and copies
nothing. Where a tensor goes follows from the list of (name, dtype, shape) and the bucket length alone: both ends of a
broadcast compute it for themselves (`plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.weights import dtypes
from trinity_sync.weights.apply import ChecksumError
from trinity_sync.weights.layout import ALIGNMENT
from trinity_sync.weights.tensors import castable, from_torch, to_torch, wire_name

BUCKET_BYTES = 64 << 20


class Packed(NamedTuple):
    """The place of a tensor in a bucket.

    Attributes:
        name: the tensor's name.
        dtype: as it travels, safetensors name.
        shape: whole.
        offset: bytes from the start of the bucket.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass
class BucketPlan:
    """What lies in one bucket.

    Attributes:
        tensors: in order.
        nbytes: up to the end of the last one.
    """

    tensors: list[Packed] = field(default_factory=list)
    nbytes: int = 0

    def add(self, name: str, dtype: str, shape: Sequence[int], bucket_bytes: int) -> Packed | None:
        """Place a tensor; None where it belongs in the next bucket. One that is larger than a bucket has its own."""
        offset = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        packed = Packed(name, dtype, tuple(shape), offset)
        if self.tensors and offset + packed.nbytes > bucket_bytes:
            return None
        self.tensors.append(packed)
        self.nbytes = offset + packed.nbytes
        return packed


def plan(described: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int = BUCKET_BYTES) -> list[BucketPlan]:
    """The buckets of these tensors.

    Args:
        described: (name, safetensors dtype on the wire, shape), in the order of travel.
        bucket_bytes: length of a bucket.
    """
    buckets = [BucketPlan()]
    for name, dtype, shape in described:
        if buckets[-1].add(name, dtype, shape, bucket_bytes) is None:
            buckets.append(BucketPlan())
            buckets[-1].add(name, dtype, shape, bucket_bytes)
    return buckets if buckets[0].tensors else []


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[BucketPlan, torch.Tensor]]:
    """Copy tensors one by one into buckets, cast on the way; a tensor may be let go when the next one is asked for.

    Args:
        tensors: (name, whole tensor) on any device.
        wire_dtype: the dtype of floating tensors on the wire, as safetensors names it; None: as they are.
        device: where the buckets are.

    Yields:
        The plan and the bytes (uint8, ``plan.nbytes`` long) of each bucket. The bytes are overwritten by the next one.

    Raises:
        RunError: a name came twice.
        ValueError: a dtype that does not travel.
    """
    room = torch.empty(0, dtype=torch.uint8, device=device)
    bucket = BucketPlan()
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise RunError(f"the state dict has {name} twice")
        seen.add(name)
        dtype = wire_name(from_torch(tensor.dtype), wire_dtype)
        place = bucket.add(name, dtype, tensor.shape, bucket_bytes)
        if place is None:
            yield bucket, room[: bucket.nbytes]
            bucket = BucketPlan()
            place = bucket.add(name, dtype, tensor.shape, bucket_bytes)
            assert place is not None
        if room.numel() < bucket.nbytes:
            # Only the first tensor of a bucket can need more room than there is, so nothing has to be carried over.
            room = torch.empty(max(bucket_bytes, bucket.nbytes), dtype=torch.uint8, device=device)
        _zero_gap(room, bucket)
        _at(room, place).copy_(tensor.detach())
    if bucket.tensors:
        yield bucket, room[: bucket.nbytes]


def unpack(bucket: BucketPlan, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what lies in a bucket, as views of its bytes.

    Raises:
        ChecksumError: there are fewer bytes than the plan says.
    """
    if data.numel() < bucket.nbytes:
        raise ChecksumError(f"a bucket came with {data.numel()} bytes instead of {bucket.nbytes}")
    for packed in bucket.tensors:
        yield packed.name, _at(data, packed)


def bucket_digest(data: torch.Tensor) -> bytes:
    """xxh3_128 of a bucket's bytes (uint8, contiguous); on a GPU they are copied to the CPU for it."""
    return bytes(xxh3_128_digest(data.cpu().numpy().data))


def check_bucket(data: torch.Tensor, expected: bytes, what: str) -> None:
    """Compare the digest of a bucket that arrived.

    Raises:
        ChecksumError: it is another one; `what` names the bucket.
    """
    found = bucket_digest(data)
    if found != expected:
        raise ChecksumError(f"{what} is damaged: its digest is {found.hex()} instead of {expected.hex()}")


def cast_for_wire(tensor: torch.Tensor, wire_dtype: str | None) -> torch.Tensor:
    """A contiguous tensor in the dtype in which it travels, detached."""
    name = from_torch(tensor.dtype)
    target = wire_name(name, wire_dtype)
    assert castable(name, target)
    return tensor.detach().to(to_torch(target)).contiguous()


def _at(data: torch.Tensor, packed: Packed) -> torch.Tensor:
    return data[packed.offset : packed.offset + packed.nbytes].view(to_torch(packed.dtype)).view(packed.shape)


def _zero_gap(room: torch.Tensor, bucket: BucketPlan) -> None:
    """Bytes between tensors are part of the digest, so they must not be what an earlier bucket left."""
    if len(bucket.tensors) > 1:
        before, last = bucket.tensors[-2:]
        room[before.offset + before.nbytes : last.offset] = 0
