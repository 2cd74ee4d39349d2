"""Whole parameters over a process group: what a trainer broadcasts to explorers, one by one or packed in buckets.

The groups exist beside torch's default group; their rank 0 is the trainer's first rank. Both ends know the list of
(name, dtype, shape), so only bytes travel: one broadcast per parameter, in order; or packed, one per bucket
(`weights.packing`), each followed by 16 bytes of digest unless `verify` is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.protocol.rounds import WeightSyncGroup
from trinity_sync.sync.nccl import BroadcastGroup, TorchGroup, device_of, make_group
from trinity_sync.sync.synchronizer_handle import Synchronizer
from trinity_sync.weights.apply import check_bytes
from trinity_sync.weights.digests import DIGEST_BYTES
from trinity_sync.weights.packing import BUCKET_BYTES, describe, layouts, pack, unpack
from trinity_sync.weights.shards import Described
from trinity_sync.weights.tensors import from_torch, to_torch, torch_dtype, wire_name

__all__ = ["BUCKET_BYTES", "broadcast", "describe", "join_group", "open_group", "receive"]

Meta = Sequence[Described]
"""The tensors that are sent, in order."""

_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16)
"""Dtypes that gloo does not know."""


def open_group(
    synchronizer: Synchronizer,
    host: str,
    meta: Meta | None,
    *,
    explorers: int,
    transport: str = "gloo",
    timeout_s: float,
) -> TorchGroup:
    """Open a group, as the trainer's rank 0: serve a store, announce it to the explorers and wait for them.

    Args:
        host: an address of this node that the explorers reach.
        meta: the tensors that will be sent.
        explorers: number of explorers in the group.
        transport: ``gloo`` or ``nccl``.
        timeout_s: timeout of the meeting and of each operation, seconds.
    """
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    place = synchronizer.setup_weight_sync_group(host, store.port, list(meta) if meta else None, explorers=explorers)
    return _enter(store, place, transport, timeout_s)


def join_group(
    synchronizer: Synchronizer, explorer: str, *, after: int = 0, transport: str = "gloo", timeout_s: float
) -> tuple[TorchGroup, WeightSyncGroup]:
    """Wait for a group, as an explorer, and enter it; return the group and its description.

    Args:
        explorer: the explorer's name.
        after: id of the explorer's group before.
        transport: as for `open_group`.
        timeout_s: as for `open_group`.
    """
    place = synchronizer.join_weight_sync_group(explorer, after=after)
    store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return _enter(store, place, transport, timeout_s), place


def _enter(store: dist.Store, place: WeightSyncGroup, transport: str, timeout_s: float) -> TorchGroup:
    prefixed = dist.PrefixStore(f"weights-{place.id}/", store)
    return make_group(prefixed, place.rank, place.world_size, transport, timeout_s)


def broadcast(
    group: TorchGroup,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    packed: bool = False,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float,
) -> None:
    """Send tensors from rank 0 of the group: one broadcast per tensor, as other programs' receivers expect; or packed
    in large buckets, each followed by its digest where `verify` is set.

    Raises:
        RunError: a receiver is gone, or did not receive in time.
    """
    sender = _broadcasts(group, timeout_s)
    if not packed:
        for name, tensor in tensors:
            wire = to_torch(wire_name(from_torch(tensor.dtype), wire_dtype))
            _broadcast(sender, tensor.detach().to(wire).contiguous().to(sender.device), name)
        return
    for bucket, data in pack(tensors, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, device=sender.device):
        _broadcast(sender, data, bucket.part)
        if verify:
            digest = torch.frombuffer(bytearray(xxh3_128_digest(data.cpu().numpy().data)), dtype=torch.uint8)
            _broadcast(sender, digest.to(sender.device), f"the digest of {bucket.part}")


def receive(
    group: TorchGroup,
    meta: Meta,
    *,
    packed: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive the tensors of rank 0 of the group. The version is whole only after the last one.

    Args:
        meta: the tensors, in the dtypes in which they are sent.
        packed: as at the sender.
        bucket_bytes: as at the sender.
        verify: as at the sender.
        timeout_s: timeout of every broadcast, seconds.

    Yields:
        (name, tensor); with `packed` the tensor is valid until the next bucket, so copy it out.

    Raises:
        RunError: the sender or another member is gone, or did not send in time.
        ChecksumError: a bucket arrived damaged; none of its tensors was handed out.
    """
    receiver = _broadcasts(group, timeout_s)
    device = receiver.device
    if not packed:
        for name, dtype, shape in meta:
            tensor = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=device)
            _broadcast(receiver, tensor, name)
            yield name, tensor
        return
    buckets = list(layouts(meta, bucket_bytes))
    room = torch.empty(max((bucket.nbytes for bucket in buckets), default=0), dtype=torch.uint8, device=device)
    for bucket in buckets:
        data = room[: bucket.nbytes]
        _broadcast(receiver, data, bucket.part)
        if verify:
            digest = torch.empty(DIGEST_BYTES, dtype=torch.uint8, device=device)
            _broadcast(receiver, digest, f"the digest of {bucket.part}")
            check_bytes(bucket.part, data.cpu().numpy().data, bucket.nbytes, bytes(digest.cpu().tolist()))
        yield from unpack(bucket, data)


def _broadcasts(group: TorchGroup, timeout_s: float) -> BroadcastGroup:
    on_cpu = group.name().lower() == "gloo" or not torch.cuda.is_available()
    return BroadcastGroup(group, device_of("gloo" if on_cpu else "nccl"), timeout_s)


def _broadcast(group: BroadcastGroup, tensor: torch.Tensor, name: str) -> None:
    try:
        group.broadcast(tensor.view(-1).view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor)
    except RuntimeError as error:
        raise RunError(f"{name} could not be broadcast within {group.timeout_s:g} s: {error}") from error
