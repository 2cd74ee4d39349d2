"""Whole parameters over a process group: what a trainer broadcasts to explorers, one by one or packed in buckets.

The groups are objects of their own beside torch's default group; rank 0 is the trainer's first rank. Both ends know the
list of (name, dtype, shape), so nothing but bytes travels: per parameter one broadcast each, in order; packed, buckets
(`weights.packing.plan`), each followed by 16 bytes of digest unless that is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from trinity_sync.actors.synchronizer import Described
from trinity_sync.errors import RunError
from trinity_sync.protocol.rounds import WeightSyncGroup
from trinity_sync.sync.process_group import Group, begin_broadcast, make_group
from trinity_sync.sync.synchronizer import Synchronizer
from trinity_sync.weights.digests import DIGEST_BYTES
from trinity_sync.weights.packing import BUCKET_BYTES, bucket_digest, cast_for_wire, check_bucket, pack, plan, unpack
from trinity_sync.weights.tensors import from_torch, to_torch, wire_name

Meta = Sequence[Described]
"""What is sent, in the order of travel."""


def describe(
    tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: str | None = None
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Describe tensors as a receiver has to know them."""
    return [
        (name, str(to_torch(wire_name(from_torch(tensor.dtype), wire_dtype))), tuple(tensor.shape))
        for name, tensor in tensors
    ]


# ---- the group


def open_group(
    synchronizer: Synchronizer,
    host: str,
    meta: Meta | None,
    *,
    explorers: int,
    transport: str = "gloo",
    timeout_s: float,
) -> Group:
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
) -> tuple[Group, WeightSyncGroup]:
    """As an explorer, wait for the group and enter it; return the group, and what was told of it.

    Args:
        explorer: the explorer's name.
        after: id of the group that it was in before.
        transport, timeout_s: as for `open_group`.
    """
    told = synchronizer.join_weight_sync_group(explorer, after=after)
    store = dist.TCPStore(told.address, told.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return _group(store, told, transport, timeout_s), told


def _group(store: dist.Store, told: WeightSyncGroup, transport: str, timeout_s: float) -> Group:
    prefixed = dist.PrefixStore(f"weights-{told.id}/", store)
    return make_group(prefixed, told.rank, told.world_size, transport, timeout_s)


# ---- sending


def broadcast_each(
    group: Group, tensors: Iterable[tuple[str, torch.Tensor]], *, wire_dtype: str | None = None, timeout_s: float
) -> None:
    """Send each tensor in a broadcast of its own, from rank 0 of the group."""
    device = _device_of(group)
    for name, tensor in tensors:
        _broadcast(group, cast_for_wire(tensor, wire_dtype).to(device), timeout_s, name)


def broadcast_packed(
    group: Group,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float,
) -> None:
    """Send tensors in large buckets, from rank 0 of the group, each followed by its digest where `verify` is set."""
    device = _device_of(group)
    for number, (_, data) in enumerate(pack(tensors, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, device=device)):
        _broadcast(group, data, timeout_s, f"bucket {number}")
        if verify:
            digest = torch.frombuffer(bytearray(bucket_digest(data)), dtype=torch.uint8).to(device)
            _broadcast(group, digest, timeout_s, f"the digest of bucket {number}")


# ---- receiving


def receive(
    group: Group,
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
        packed, bucket_bytes, verify: the same as at the sender.
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
            tensor = torch.empty(tuple(shape), dtype=_dtype(dtype), device=device)
            _broadcast(group, tensor, timeout_s, name)
            yield name, tensor
        return
    buckets = plan([(name, from_torch(_dtype(dtype)), shape) for name, dtype, shape in meta], bucket_bytes)
    room = torch.empty(max((bucket.nbytes for bucket in buckets), default=0), dtype=torch.uint8, device=device)
    for number, bucket in enumerate(buckets):
        data = room[: bucket.nbytes]
        _broadcast(group, data, timeout_s, f"bucket {number}")
        if verify:
            digest = torch.empty(DIGEST_BYTES, dtype=torch.uint8, device=device)
            _broadcast(group, digest, timeout_s, f"the digest of bucket {number}")
            check_bucket(data, bytes(digest.cpu().tolist()), f"bucket {number}")
        yield from unpack(bucket, data)


def _broadcast(group: Group, tensor: torch.Tensor, timeout_s: float, what: str) -> None:
    try:
        begin_broadcast(group, tensor, timeout_s).wait()
    except RuntimeError as error:
        raise RunError(f"{what} could not be broadcast within {timeout_s:g} s: {error}") from error


def _device_of(group: Group) -> torch.device:
    if group.name().lower() == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
