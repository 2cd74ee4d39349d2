"""Mode ``memory``: buckets in shared memory of the node, which has no name.

The sender makes memory that no file system lists, and receivers open it by the sender's process and descriptor. So only
processes of the same user reach it, two programs cannot meet, and the kernel takes it back with the last process that
has it, in whatever way that ends: nothing can be left behind. There are two rooms, in turns: one is filled while
receivers copy the other.
"""

from __future__ import annotations

import mmap
import os

import torch

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.base import Incoming, Mode, Offer, Outgoing
from trinity_sync.integrations.verl.weight_sync.link import BucketNotice, End, Hub, MemberPlace, Sender, Source, Spoke
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.tensors import byte_tensor

_ROOMS = 2


class MemoryTransfer(Mode):
    """Shared memory."""

    def prepare(self, host: str) -> Offer:
        return _MemoryOffer()

    def incoming(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> Incoming:
        return _MemoryIncoming(sender.name)


class _MemoryOffer(Offer):
    def outgoing(self, hub: Hub, place: MemberPlace) -> Outgoing:
        try:
            return _MemoryOutgoing(hub)
        except OSError as error:
            raise RunError(f"this system gives no shared memory without a name: {error}; set another mode") from error

    def withdraw(self) -> None:
        """There is nothing to take back."""


class _Room:
    """Shared memory that grows."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("trinity-sync-weights", os.MFD_CLOEXEC)
        os.fchmod(self._descriptor, 0o600)
        self._nbytes = 0
        self._mapped: mmap.mmap | None = None

    def bytes(self, nbytes: int) -> torch.Tensor:
        """At least so many of its bytes, writable."""
        if self._mapped is None or self._nbytes < nbytes:
            self._mapped = None
            os.ftruncate(self._descriptor, nbytes)
            self._mapped = mmap.mmap(self._descriptor, nbytes)
            self._nbytes = nbytes
        return byte_tensor(memoryview(self._mapped))

    def source(self) -> Source:
        """Where receivers find it."""
        return os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino

    def close(self) -> None:
        """Give it back, also where an error that somebody keeps still refers to the mapping."""
        os.close(self._descriptor)
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_REMOVE)
        self._mapped = None


class _MemoryOutgoing(Outgoing):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._rooms = [_Room() for _ in range(_ROOMS)]
        self._asked = 0

    def room(self, nbytes: int) -> torch.Tensor:
        if self._asked >= _ROOMS:
            self._hub.wait_taken(self._asked - _ROOMS)
        self._asked += 1
        room = self._rooms[(self._asked - 1) % _ROOMS]
        try:
            return room.bytes(nbytes)
        except (OSError, ValueError) as error:
            raise RunError(f"there is no room for {nbytes} bytes of shared memory: {error}; lower bucket_mb") from error

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        self._hub.tell(BucketNotice(number, layout, digest, self._rooms[number % _ROOMS].source()))

    def end(self, end: End) -> None:
        self._hub.tell(end)

    def close(self, *, failed: bool) -> None:
        for room in self._rooms:
            room.close()


class _MemoryIncoming(Incoming):
    def __init__(self, sender: str) -> None:
        self._sender = sender

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        assert isinstance(bucket.source, tuple), "the sender is of the same mode"
        pid, number, inode = bucket.source
        data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8)
        descriptor = self._open(pid, number)
        try:
            if os.fstat(descriptor).st_ino != inode:
                raise RunError(f"process {pid} has other memory under its descriptor {number} than {self._sender} said")
            self._read(descriptor, data)
        finally:
            os.close(descriptor)
        return data

    def _open(self, pid: int, number: int) -> int:
        try:
            return os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"the memory of {self._sender} cannot be opened here ({error.strerror}): members have to run as one "
                "user on one node; else set engine_kwargs' mode to nccl or checkpoint"
            ) from error

    def _read(self, descriptor: int, data: torch.Tensor) -> None:
        """Read, not mapped: that would keep, and even make anew, what the sender gives back meanwhile."""
        left, at = data.numpy().data, 0
        while left:
            count = os.preadv(descriptor, [left], at)
            if not count:
                raise RunError(f"the memory of {self._sender} ends after {at} bytes, before its bucket does")
            left, at = left[count:], at + count

    def close(self, *, failed: bool) -> None:
        """Nothing is held."""
