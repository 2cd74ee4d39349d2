"""One sync at one member: what it holds, and how that ends, in whatever thread and for whatever reason."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from trinity_sync.errors import RunError, WaitTimeout, take_back
from trinity_sync.integrations.verl.weight_sync.link import (
    BucketNotice,
    BucketReceipt,
    Done,
    End,
    Hub,
    MemberPlace,
    Spoke,
)
from trinity_sync.integrations.verl.weight_sync.transfers import BucketReceiver, BucketSender
from trinity_sync.weights.apply import ChecksumError, check_bytes
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.shards import Shard, check_cover, matrix_view
from trinity_sync.weights.staging import views
from trinity_sync.weights.tensors import digest_entry, to_torch

_BRIEFLY_S = 0.1


class Session:
    """One sync. A later one is another object, so what is left of an earlier one cannot reach it.

    Args:
        timeout_s: limit of the wait for a thread that is at work in it, seconds.
        device: the GPU of this member; None: it has none.

    Attributes:
        place: what this member is told; None: not yet, or it was used.
        hub, sender: a sender's.
        streams: a receiver's.
    """

    def __init__(self, timeout_s: float, device: torch.device | None) -> None:
        self.device = device
        self.place: MemberPlace | None = None
        self.hub: Hub | None = None
        self.sender: BucketSender | None = None
        self.streams: list[Stream] = []
        self._timeout_s = timeout_s
        self._work = threading.RLock()
        self._why: str | None = None
        self._over = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Whoever uses what the session holds does so in here, one thread at a time. An error ends the sync.

        Raises:
            RunError: the sync has ended.
        """
        # A thread of its own would work on the first GPU, and be given memory there.
        with self._work, torch.cuda.device(self.device) if self.device is not None else contextlib.nullcontext():
            try:
                self._check()
                yield
                self._check()
            except BaseException as error:
                take_back(error, partial(self._close, self._why or told(error)))
                if self._why is not None:  # it is what the links failed of
                    raise RunError(f"the sync was ended: {self._why}") from error
                raise

    def end(self, why: str, *, briefly: bool = False) -> None:
        """End the sync, unless it has ended, and tell who takes part in it. In any thread.

        Args:
            why: in words, for the others.
            briefly: leave the end to the thread that is at work in it, which is interrupted; else wait for that.

        Raises:
            WaitTimeout: that thread does not end.
        """
        if self._over:
            return
        self._why = self._why or why
        if not self._work.acquire(blocking=False):
            self._interrupt()
            limit = _BRIEFLY_S if briefly else self._timeout_s
            if not self._work.acquire(timeout=limit):
                if briefly:
                    return
                raise WaitTimeout("this member", "end its part in an earlier sync", limit)
        try:
            self._close(why)
        finally:
            self._work.release()

    def finish(self) -> None:
        """Let go of everybody, after all went well. At work."""
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.close(failed=False)
        for stream in self.streams:
            stream.close()
        if self.hub is not None:
            self.hub.close()
        self._over = True

    def _check(self) -> None:
        if self._why is not None and not self._over:
            raise RunError(f"the sync was ended: {self._why}")

    def _interrupt(self) -> None:
        for link in (self.hub, *self.streams):
            if link is not None:
                link.interrupt()

    def _close(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        with ExitStack() as parts:  # from the last to the first; each also where another one cannot be closed
            if self.sender is not None:
                parts.callback(self.sender.close, failed=True)
            for stream in self.streams:
                parts.callback(stream.give_up, why)
            if self.hub is not None:
                parts.callback(self.hub.give_up, why)


def told(error: BaseException) -> str:
    """An error in words, for another member."""
    return f"{type(error).__name__}: {error}"


# The receiving of a version: buckets from each sender, checked, and put together to whole tensors.


Named = tuple[str, torch.Tensor]


class Stream:
    """What comes from one sender.

    Args:
        spoke: the link to it.
        receiver: this member's half of the mode.
    """

    def __init__(self, spoke: Spoke, receiver: BucketReceiver) -> None:
        self._spoke = spoke
        self._receiver = receiver
        self._here: deque[tuple[Shard, torch.Tensor]] = deque()
        self._buckets = 0
        self._tensors = 0
        self.nbytes = 0
        self.end: End | None = None

    @property
    def waits(self) -> bool:
        """Whether the next shard has still to come."""
        return not self._here and self.end is None

    def take(self) -> tuple[Shard, torch.Tensor] | None:
        """The next shard and its elements, flat; None: there are no more.

        Raises:
            RunError: the sender is gone or has given up, or what it sent cannot be had.
            WaitTimeout: nothing comes.
            ChecksumError: what came is not what was sent; nothing of its bucket is handed out.
        """
        while self.waits:
            message = self._spoke.receive(f"send bucket {self._buckets} of the weights")
            if isinstance(message, BucketNotice):
                self._take(message)
            elif isinstance(message, End):
                self._finish(message)
        return self._here.popleft() if self._here else None

    def _take(self, bucket: BucketNotice) -> None:
        what = f"bucket {bucket.number} of {self._spoke.sender}"
        if bucket.number != self._buckets:
            raise ChecksumError(f"{what} came in place of bucket {self._buckets}")
        try:
            data = self._receiver.take(bucket)
            check_bytes(what, data.cpu().numpy().data, bucket.layout.nbytes, bucket.digest)
        except RunError:
            self._spoke.check()  # a sender that gives up takes its memory and files away, too: that is what to tell
            raise
        self._spoke.tell(BucketReceipt(bucket.number))
        self._buckets += 1
        self.nbytes += bucket.layout.nbytes
        self._here.extend(zip(bucket.layout.shards, views(bucket.layout, data), strict=True))
        self._tensors += len(bucket.layout.entries)

    def _finish(self, end: End) -> None:
        if (self._buckets, self._tensors) != (end.buckets, end.tensors):
            raise ChecksumError(
                f"{self._spoke.sender} sent {end.tensors} tensors in {end.buckets} buckets; {self._tensors} tensors in "
                f"{self._buckets} buckets arrived"
            )
        self.end = end

    def done(self, done: Done) -> None:
        """Tell the sender that the version was handed on."""
        self._spoke.tell(done)

    def interrupt(self) -> None:
        """From another thread: end what is waited for here, with an error."""
        self._spoke.interrupt()

    def give_up(self, why: str) -> None:
        """Tell the sender that it was not, and let go."""
        try:
            self._spoke.give_up(why)
        finally:
            self._receiver.close(failed=True)

    def close(self) -> None:
        """Let go."""
        self._spoke.close()
        self._receiver.close(failed=False)


def tensors(
    streams: Sequence[Stream], *, digest: bool, device: torch.device | None = None
) -> Generator[list[Named], None, Done]:
    """Yield whole tensors, as many at a time as there are without a wait; the last of all only after every check.

    Args:
        streams: from all senders, of which each sends a share of every tensor, in one order.
        digest: compute the version's digest, and compare it with that of the sender, if it has one.
        device: where the tensors are to be; None: where they arrived.

    Returns:
        What the senders were told when all was handed on.

    Raises:
        RunError, WaitTimeout, ChecksumError: as of `Stream.take`.
        ChecksumError: the version is not the one that was sent.
        CoverageError: what the senders sent does not make whole tensors.
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
            raise ChecksumError(f"the version that arrived has the digest {found}, the one that was sent {sent}")
    yield ready
    done = Done(found, sum(stream.nbytes for stream in streams))
    for stream in streams:
        stream.done(done)
    return done


def _together(pieces: Sequence[tuple[Shard, torch.Tensor]]) -> Named:
    """The whole tensor of which these are all shares."""
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
