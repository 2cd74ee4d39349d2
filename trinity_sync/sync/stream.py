"""Whole parameters over a process group: what a trainer broadcasts to explorers, one by one or packed in buckets.

The groups are objects of their own beside torch's default group; rank 0 is the trainer's first rank. Both ends know the
list of (name, dtype, shape), so nothing but bytes travels: per parameter one broadcast each, in order; packed, buckets
(`weights.packing`), each followed by 16 bytes of digest unless that is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.protocol.rounds import WeightSyncGroup
from trinity_sync.sync.nccl import RoundGroup, begin_broadcast, make_group, wait
from trinity_sync.sync.synchronizer import Synchronizer
from trinity_sync.weights.apply import check_bytes
from trinity_sync.weights.digests import DIGEST_BYTES
from trinity_sync.weights.packing import BUCKET_BYTES, describe, layouts, pack, unpack
from trinity_sync.weights.shards import Described
from trinity_sync.weights.tensors import from_torch, to_torch, torch_dtype, wire_name

__all__ = ["BUCKET_BYTES", "broadcast", "describe", "join_group", "open_group", "receive"]

Meta = Sequence[Described]
"""What is sent, in the order of travel."""

_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16)
"""What gloo has no name for."""


# ---- the group


def open_group(
    synchronizer: Synchronizer,
    host: str,
    meta: Meta | None,
    *,
    explorers: int,
    transport: str = "gloo",
    timeout_s: float,
) -> RoundGroup:
    """As the trainer's rank 0, serve a store, tell the explorers of it, and wait for them; return the group.

    Args:
        host: an address of this node that the explorers reach.
        meta: what is going to be sent.
        explorers: number of explorers in the group.
        transport: ``gloo`` or ``nccl``.
        timeout_s: limit of the meeting and of each operation, seconds.
    """
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    told = synchronizer.setup_weight_sync_group(host, store.port, list(meta) if meta else None, explorers=explorers)
    return _group(store, told, transport, timeout_s)


def join_group(
    synchronizer: Synchronizer, explorer: str, *, after: int = 0, transport: str = "gloo", timeout_s: float
) -> tuple[RoundGroup, WeightSyncGroup]:
    """As an explorer, wait for the group and enter it; return the group, and what was told of it.

    Args:
        explorer: the explorer's name.
        after: id of the group that it was in before.
        transport: as for `open_group`.
        timeout_s: as for `open_group`.
    """
    told = synchronizer.join_weight_sync_group(explorer, after=after)
    store = dist.TCPStore(told.address, told.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return _group(store, told, transport, timeout_s), told


def _group(store: dist.Store, told: WeightSyncGroup, transport: str, timeout_s: float) -> RoundGroup:
    prefixed = dist.PrefixStore(f"weights-{told.id}/", store)
    return make_group(prefixed, told.rank, told.world_size, transport, timeout_s)


# ---- sending and receiving


def broadcast(
    group: RoundGroup,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    packed: bool = False,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float,
) -> None:
    """Send tensors from rank 0 of the group: each in a broadcast of its own, as the receivers of others expect it, or
    packed in large buckets, each followed by its digest where `verify` is set.
    """
    device = _device_of(group)
    if not packed:
        for name, tensor in tensors:
            wire = to_torch(wire_name(from_torch(tensor.dtype), wire_dtype))
            _broadcast(group, tensor.detach().to(wire).contiguous().to(device), timeout_s, name)
        return
    for bucket, data in pack(tensors, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, device=device):
        _broadcast(group, data, timeout_s, bucket.part)
        if verify:
            digest = torch.frombuffer(bytearray(xxh3_128_digest(data.cpu().numpy().data)), dtype=torch.uint8)
            _broadcast(group, digest.to(device), timeout_s, f"the digest of {bucket.part}")


def receive(
    group: RoundGroup,
    meta: Meta,
    *,
    packed: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive what rank 0 of the group sends. Go through all of it, and take the version for loaded only after that.

    Args:
        meta: what is sent, in the dtypes in which it is sent.
        packed: the same as at the sender.
        bucket_bytes: the same as at the sender.
        verify: the same as at the sender.
        timeout_s: limit of every broadcast, seconds.

    Yields:
        (name, tensor); with `packed` the tensor is valid until the next bucket, so copy it out.

    Raises:
        RunError: the sender or another member is gone, or did not send in time.
        ChecksumError: a bucket arrived damaged; nothing of it was handed out.
    """
    device = _device_of(group)
    if not packed:
        for name, dtype, shape in meta:
            tensor = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=device)
            _broadcast(group, tensor, timeout_s, name)
            yield name, tensor
        return
    buckets = list(layouts(meta, bucket_bytes))
    room = torch.empty(max((bucket.nbytes for bucket in buckets), default=0), dtype=torch.uint8, device=device)
    for bucket in buckets:
        data = room[: bucket.nbytes]
        _broadcast(group, data, timeout_s, bucket.part)
        if verify:
            digest = torch.empty(DIGEST_BYTES, dtype=torch.uint8, device=device)
            _broadcast(group, digest, timeout_s, f"the digest of {bucket.part}")
            check_bytes(bucket.part, data.cpu().numpy().data, bucket.nbytes, bytes(digest.cpu().tolist()))
        yield from unpack(bucket, data)


def _broadcast(group: RoundGroup, tensor: torch.Tensor, timeout_s: float, what: str) -> None:
    if tensor.dtype in _AS_BYTES:
        tensor = tensor.view(-1).view(torch.uint8)
    try:
        wait(begin_broadcast(group, tensor, timeout_s), timeout_s, nccl=tensor.is_cuda)
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(f"{what} could not be broadcast within {timeout_s:g} s: {error}") from error


def _device_of(group: RoundGroup) -> torch.device:
    if group.name().lower() == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
