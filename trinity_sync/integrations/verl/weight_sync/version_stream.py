"""A version as a stream of buckets: packed and digested at a sender (`send`), checked and put together at a receiver
(`tensors`, from the `Stream` of each sender).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.link import BucketNotice, BucketReceipt, Done, End, Spoke
from trinity_sync.integrations.verl.weight_sync.transfers import BucketReceiver, BucketSender
from trinity_sync.weights.apply import ChecksumError, check_bytes
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.packing import pack_shards, unpack
from trinity_sync.weights.shards import Shard, check_cover, matrix_view
from trinity_sync.weights.staging import views
from trinity_sync.weights.tensors import digest_entry, to_torch


@dataclass(frozen=True)
class Sent:
    """The counts of a version that was sent."""

    nbytes: int  # to each receiver
    tensors: int
    buckets: int
    digest: str | None  # of the version; None: not computed here
    gather_s: float  # spent in waiting for the trainer's tensors


def send(
    shards: Iterable[tuple[Shard, torch.Tensor]],
    sender: BucketSender,
    *,
    bucket_bytes: int,
    step: int | None,
    whole: bool,
) -> Sent:
    """Send a version."""
    timed = _TimedIterator(shards)
    entries: list[tuple[str, str, tuple[int, ...], bytes]] = []
    nbytes = buckets = tensors = 0
    for number, (layout, data) in enumerate(pack_shards(timed, sender.room, bucket_bytes=bucket_bytes)):
        here = data.cpu()
        sender.put(number, layout, data, xxh3_128_digest(here.numpy().data))
        if whole:  # the bucket travels meanwhile
            entries += [digest_entry(name, tensor, None) for name, tensor in unpack(layout, here)]
        nbytes, buckets, tensors = nbytes + layout.nbytes, number + 1, tensors + len(layout.entries)
    if not tensors:
        raise RunError("the engine has no weights to send")
    digest = version_digest(entries) if whole else None
    sender.end(End(step, buckets, tensors, digest))
    return Sent(nbytes, tensors, buckets, digest, timed.seconds)


class _TimedIterator(Iterator[tuple[Shard, torch.Tensor]]):
    """Counts the seconds that `next` takes."""

    def __init__(self, items: Iterable[tuple[Shard, torch.Tensor]]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __next__(self) -> tuple[Shard, torch.Tensor]:
        started = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - started


Named = tuple[str, torch.Tensor]


class Stream:
    """The shards that one sender sends, over a link and the `BucketReceiver` for it."""

    def __init__(self, spoke: Spoke, receiver: BucketReceiver) -> None:
        self._spoke = spoke
        self._receiver = receiver
        self._ready: deque[tuple[Shard, torch.Tensor]] = deque()
        self._buckets = 0
        self._tensors = 0
        self.nbytes = 0
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
            data = self._receiver.take(bucket)
            check_bytes(what, data.cpu().numpy().data, bucket.layout.nbytes, bucket.digest)
        except RunError:
            self._spoke.check()  # a sender that gives up removes its memory and files: then that is the error
            raise
        self._spoke.tell(BucketReceipt(bucket.number))
        self._buckets += 1
        self.nbytes += bucket.layout.nbytes
        self._ready.extend(zip(bucket.layout.shards, views(bucket.layout, data), strict=True))
        self._tensors += len(bucket.layout.entries)

    def _finish(self, end: End) -> None:
        if (self._buckets, self._tensors) != (end.buckets, end.tensors):
            raise ChecksumError(
                f"{self._spoke.sender} sent {end.tensors} tensors in {end.buckets} buckets; {self._tensors} tensors in "
                f"{self._buckets} buckets arrived"
            )
        self.end = end

    def done(self, done: Done) -> None:
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
) -> Generator[list[Named], None, Done]:
    """Yield whole tensors, as many at a time as have arrived; the last one only after every check.

    Args:
        device: moves the tensors there; None: they stay where they arrived.

    Returns:
        The message of success, which the senders have received.

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
    done = Done(found, sum(stream.nbytes for stream in streams))
    for stream in streams:
        stream.done(done)
    return done


def _together(pieces: Sequence[tuple[Shard, torch.Tensor]]) -> Named:
    """Put the shares of one tensor together; CoverageError: they overlap or leave gaps."""
    shard, data = pieces[0]
    if len(pieces) == 1 and data.numel() == _numel(shard):
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


def _numel(shard: Shard) -> int:
    rows, cols = shard.matrix
    return rows * cols
