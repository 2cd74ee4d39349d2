"""The parameters of programs without slots, in order, one by one or packed in buckets (`weights.packing`).

`broadcast` and `receive` send whole parameters over a process group, beside torch's default one, whose rank 0 is the
trainer's first rank. Both ends know the list of (name, dtype, shape), so only bytes travel, and after each bucket 16
bytes of digest unless `verify` is off.

`send` and `tensors` are for members that are linked (`sync.links`), such as those of verl's weight sync: the trainer's
ranks send whole tensors or shards, by the `BucketTransfer` of a mode; receivers check them and put them together.
Where both ends keep the buckets of the last version (`BucketBase`), deltas travel.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.protocol.rounds import WeightSyncGroup
from trinity_sync.sync.base import BucketReceiver, BucketSender
from trinity_sync.sync.broadcast_group import BroadcastGroup, TorchGroup, device_of, make_group, serve_store
from trinity_sync.sync.links import BucketNotice, BucketReceipt, End, Spoke, VersionReceipt
from trinity_sync.sync.synchronizer_handle import Synchronizer
from trinity_sync.weights.apply import ChecksumError, check_bytes
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.digests import DIGEST_BYTES, version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.packing import BUCKET_BYTES, describe, layouts, pack, pack_shards, unpack
from trinity_sync.weights.part_delta import PartDelta, PartEncoder
from trinity_sync.weights.shards import Described, Shard, check_cover, matrix_view
from trinity_sync.weights.staging import views
from trinity_sync.weights.tensors import byte_tensor, digest_entry, from_torch, to_torch, torch_dtype, wire_name

__all__ = ["BUCKET_BYTES", "broadcast", "describe", "join_group", "open_group", "receive"]

Meta = Sequence[Described]
"""The tensors that are sent, in order."""

_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16)
"""Dtypes that gloo does not know."""

_DELTA_CODEC = "gap8z"
"""The fast one: these links are those of a cluster."""
_MOST_THREADS = 8


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
    store = serve_store(host, timeout_s)
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


# ---- buckets between linked members


class _KeptBucket(NamedTuple):
    layout: PartLayout
    data: bytearray
    encoder: PartEncoder


class BucketBase:
    """The buckets of the version that a sender has sent, or a receiver received from it, last: in the CPU's memory, of
    as many bytes. The next version travels as deltas over them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _KeptBucket] = {}
        self._count = 0

    def begin(self, *, follows: bool) -> None:
        """Begin a version. `follows`: both ends have the whole version before it."""
        self._count += 1
        if not follows:
            self._kept.clear()

    def encode(self, number: int, layout: PartLayout, data: torch.Tensor) -> bytes | None:
        """Return the delta of a bucket, and keep its bytes (`data`, on the CPU); None: it is to be sent in full."""
        new, kept = data.numpy().data, self._kept.get(number)
        if kept is None or kept.layout != layout:
            self.keep(number, layout, data)
            return None
        [made] = kept.encoder.encode((0, self._count - 1), (0, self._count), (kept.data, new), _pool())
        sent = b"".join(made.parts)
        kept.data[:] = new
        return sent if len(sent) < layout.nbytes else None

    def apply(self, number: int, layout: PartLayout, sent: torch.Tensor) -> None:
        """Make the kept bucket the newer one, by its delta. DeltaError: that is damaged, or of another bucket."""
        kept = self._kept.get(number)
        if kept is None or kept.layout != layout:
            raise DeltaError(f"bucket {number} came as a delta, over a bucket that is not here")
        PartDelta(layout, sent.cpu().numpy().data, f"the delta of bucket {number}").apply(layout, kept.data, _pool())

    def keep(self, number: int, layout: PartLayout, data: torch.Tensor) -> None:
        """Keep a bucket that travels in full."""
        encoder = PartEncoder(layout, _DELTA_CODEC, spans=())
        self._kept[number] = _KeptBucket(layout, bytearray(data.cpu().numpy().data), encoder)

    def data(self, number: int) -> torch.Tensor:
        """Return the bytes of a kept bucket. They change with the next version."""
        return byte_tensor(memoryview(self._kept[number].data))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """The threads that code deltas, of all bases of this process."""
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "bucket deltas")


def send(
    shards: Iterable[tuple[Shard, torch.Tensor]],
    sender: BucketSender,
    *,
    bucket_bytes: int,
    step: int | None,
    whole: bool,
    base: BucketBase | None = None,
) -> End:
    """Send a version; return the message of its end. `whole`: the shards are whole tensors, so it has a digest. `base`:
    what travels as deltas does so over it.
    """
    entries: list[tuple[str, str, tuple[int, ...], bytes]] = []
    buckets = tensors = 0
    for number, (layout, data) in enumerate(pack_shards(shards, sender.room, bucket_bytes=bucket_bytes)):
        here = data.cpu()
        digest = xxh3_128_digest(here.numpy().data)
        if base is not None and (sent := base.encode(number, layout, here)) is not None:
            here, data = base.data(number), data[: len(sent)]
            data.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
        sender.put(number, layout, data, digest)
        if whole:  # the bucket travels meanwhile
            entries += [digest_entry(name, tensor, None) for name, tensor in unpack(layout, here)]
        buckets, tensors = number + 1, tensors + len(layout.entries)
    if not tensors:
        raise RunError("the engine has no weights to send")
    end = End(step, buckets, tensors, version_digest(entries) if whole else None)
    sender.end(end)
    return end


Named = tuple[str, torch.Tensor]


class Stream:
    """The shards that one sender sends, over a link and the `BucketReceiver` for it. `base`: as of `send`."""

    def __init__(self, spoke: Spoke, receiver: BucketReceiver, base: BucketBase | None = None) -> None:
        self._spoke = spoke
        self._receiver = receiver
        self._base = base
        self._ready: deque[tuple[Shard, torch.Tensor]] = deque()
        self._buckets = 0
        self._tensors = 0
        self.nbytes = 0  # that have travelled
        self.end: End | None = None

    @property
    def waits(self) -> bool:
        """Whether the next shard has not arrived yet."""
        return not self._ready and self.end is None

    def take(self) -> tuple[Shard, torch.Tensor] | None:
        """Return the next shard and its elements (flat); None: there are no more.

        Raises:
            ChecksumError: a bucket is damaged or missing; nothing of it is handed out.
        """
        while self.waits:
            message = self._spoke.receive(f"send bucket {self._buckets} of the weights")
            if isinstance(message, BucketNotice):
                self._take(message)
            elif isinstance(message, End):
                self._finish(message)
        return self._ready.popleft() if self._ready else None

    def _take(self, bucket: BucketNotice) -> None:
        what = f"bucket {bucket.number} of {self._spoke.sender}"
        if bucket.number != self._buckets:
            raise ChecksumError(f"{what} came in place of bucket {self._buckets}")
        try:
            nbytes = bucket.layout.nbytes if bucket.delta_bytes is None else bucket.delta_bytes
            data = torch.empty(nbytes, dtype=torch.uint8, device=self._receiver.device)
            self._receiver.take(bucket, data)
            if bucket.delta_bytes is not None:
                if self._base is None:
                    raise RunError(f"{what} came as a delta, which this receiver does not take")
                self._base.apply(bucket.number, bucket.layout, data)
                data = self._base.data(bucket.number).to(data.device, copy=True)
            check_bytes(what, data.cpu().numpy().data, bucket.layout.nbytes, bucket.digest)
            if self._base is not None and bucket.delta_bytes is None:
                self._base.keep(bucket.number, bucket.layout, data)
        except RunError:
            self._spoke.check()  # a sender that gives up removes its memory and files: then that is the error
            raise
        self._spoke.tell(BucketReceipt(bucket.number))
        self._buckets += 1
        self.nbytes += nbytes
        self._ready.extend(zip(bucket.layout.shards, views(bucket.layout, data), strict=True))
        self._tensors += len(bucket.layout.entries)

    def _finish(self, end: End) -> None:
        if (self._buckets, self._tensors) != (end.buckets, end.tensors):
            raise ChecksumError(
                f"{self._spoke.sender} sent {end.tensors} tensors in {end.buckets} buckets; {self._tensors} tensors in "
                f"{self._buckets} buckets arrived"
            )
        self.end = end

    def done(self, done: VersionReceipt) -> None:
        """Tell the sender that the version was handed to the engine."""
        self._spoke.tell(done)

    def interrupt(self) -> None:
        """End the wait of another thread here, with an error."""
        self._spoke.interrupt()

    def give_up(self, why: str) -> None:
        """Tell the sender why the version was not taken, and close."""
        try:
            self._spoke.give_up(why)
        finally:
            self._receiver.close(failed=True)

    def close(self) -> None:
        self._spoke.close()
        self._receiver.close(failed=False)


def tensors(
    streams: Sequence[Stream], *, digest: bool, device: torch.device | None = None
) -> Iterator[list[Named] | VersionReceipt]:
    """Yield whole tensors, as many at a time as have arrived; the last one only after every check. At the end yield the
    message of success, which the senders have received then.

    Args:
        device: moves the tensors there; None: they stay where they arrived.

    Raises:
        RunError, WaitTimeout, ChecksumError: as of `Stream.take`; ChecksumError also where the digests differ.
        CoverageError: the shares do not make whole tensors.
    """
    entries: list[tuple[str, str, tuple[int, ...], bytes]] = []
    ready: list[Named] = []
    while True:
        if len(ready) > 1 and any(stream.waits for stream in streams):
            yield ready[:-1]
            ready = ready[-1:]
        pieces = [piece for stream in streams if (piece := stream.take()) is not None]
        if not pieces:
            break
        if len(pieces) < len(streams):
            raise RunError(f"only {len(pieces)} of {len(streams)} senders sent a share of {pieces[0][0].name}")
        name, tensor = _together(pieces)
        if digest:
            entries.append(digest_entry(name, tensor, None))
        ready.append((name, tensor if device is None else tensor.to(device)))
    found = version_digest(entries) if digest else None
    for stream in streams:
        sent = stream.end.digest if stream.end is not None else None
        if None not in (found, sent) and found != sent:
            raise ChecksumError(f"the version that arrived has digest {found}; digest {sent} was sent")
    yield ready
    done = VersionReceipt(found, sum(stream.nbytes for stream in streams))
    for stream in streams:
        stream.done(done)
    yield done


def _together(pieces: Sequence[tuple[Shard, torch.Tensor]]) -> Named:
    """Put the shares of one tensor together; CoverageError: they overlap or leave gaps."""
    shard, data = pieces[0]
    if len(pieces) == 1 and data.numel() == prod(shard.shape):
        return shard.name, data.view(shard.shape)
    if any(other.name != shard.name for other, _ in pieces):
        raise RunError(f"the senders send in different orders: {', '.join(sorted({one.name for one, _ in pieces}))}")
    check_cover([[one] for one, _ in pieces])
    whole = torch.empty(shard.shape, dtype=to_torch(shard.dtype), device=data.device)
    matrix = whole.view(matrix_view(shard.shape))
    for one, elements in pieces:
        at = 0
        for rect in one.rects:
            count = rect.rows * rect.cols
            target = matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
            target.copy_(elements[at : at + count].view(rect.rows, rect.cols))
            at += count
    return shard.name, whole
