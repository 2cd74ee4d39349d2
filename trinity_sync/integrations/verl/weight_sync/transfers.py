"""How buckets travel between the members of a verl program's weight sync, one pair of classes for each mode.

`transfer` makes the `Transfer` of the settings' mode, one per engine. For each sync:

1. a sender's engine makes a `BucketSender`, whose `meeting` travels to the receivers;
2. once the members are linked, it calls `BucketSender.connect`, and a receiver's engine `Transfer.receiver`;
3. for each bucket: `BucketSender.room` and `put`, and `BucketReceiver.take` at each receiver that was notified;
4. after the last bucket `BucketSender.end`;
5. `close` of both, also after an error.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.link import BucketNotice, End, Hub, Spoke, Working
from trinity_sync.integrations.verl.weight_sync.membership import MemberPlace, Sender, WeightSyncSettings
from trinity_sync.sync.checkpoint import VersionFolder, begin_version, lease_version, read_bucket, remove_unleased
from trinity_sync.sync.memory import SharedRoom, read_room
from trinity_sync.sync.nccl import BroadcastGroup, Wait, device_of, make_group
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.tensors import byte_tensor

_ROOMS = 2
"""One bucket is filled while the one before travels."""


class BucketSender(ABC):
    """A sender's half of one sync.

    Attributes:
        meeting: what the receivers need to know of this sender.
    """

    meeting: str | None = None

    def connect(self, hub: Hub, place: MemberPlace) -> None:
        """Begin to send; returns once all receivers can receive. RunError, WaitTimeout: they cannot."""
        self._hub = hub

    @abstractmethod
    def room(self, nbytes: int) -> torch.Tensor:
        """Return memory for the next bucket (uint8, at least `nbytes` long), once it is free."""

    @abstractmethod
    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        """Send bucket `number` (from 0): `data` in the memory of `room`, with the xxh3_128 digest of its bytes."""

    def end(self, end: End) -> None:
        """Tell the receivers that all buckets were sent. Errors as of `put`."""
        self._hub.tell(end)

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Release the memory, group or folder of this sync. May be called before `connect`, and again."""


class BucketReceiver(ABC):
    """A receiver's half of one sync, for one sender."""

    @abstractmethod
    def take(self, bucket: BucketNotice) -> torch.Tensor:
        """Return a bucket's bytes (uint8, as long as its layout), the caller's own from then on."""

    def close(self, *, failed: bool) -> None:  # noqa: B027 - a receiver may have nothing to release
        """Release the group or folder, and not the tensors that `take` returned."""


class Transfer(ABC):
    """How bytes travel in all syncs of one engine of verl's."""

    @abstractmethod
    def sender(self, host: str) -> BucketSender:
        """Prepare a sync at a sender, whose node has this address; RunError, WaitTimeout: it cannot be prepared."""

    @abstractmethod
    def receiver(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> BucketReceiver:
        """Begin to receive; errors as of `BucketSender.connect`."""


def transfer(settings: WeightSyncSettings) -> Transfer:
    """Return how bytes travel by these settings."""
    if settings.mode == "checkpoint":
        return CheckpointTransfer(Path(str(settings.dir)), settings.timeout_s)
    if settings.mode == "nccl":
        return NcclTransfer(settings.transport, settings.timeout_s)
    return MemoryTransfer()


# ---- memory: through shared memory of the node


class MemoryTransfer(Transfer):
    """Buckets lie in shared memory without a name, from which receivers copy them."""

    def sender(self, host: str) -> BucketSender:
        return _MemorySender()

    def receiver(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> BucketReceiver:
        return _MemoryReceiver(sender.name)


class _MemorySender(BucketSender):
    def __init__(self) -> None:
        self._rooms: list[SharedRoom] = []
        self._count = 0

    def connect(self, hub: Hub, place: MemberPlace) -> None:
        super().connect(hub, place)
        self._rooms += [SharedRoom() for _ in range(_ROOMS)]

    def room(self, nbytes: int) -> torch.Tensor:
        if self._count >= _ROOMS:
            self._hub.wait_taken(self._count - _ROOMS)
        room = self._rooms[self._count % _ROOMS]
        self._count += 1
        return byte_tensor(room.bytes(nbytes))

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        self._hub.tell(BucketNotice(number, layout, digest, self._rooms[number % _ROOMS].source))

    def close(self, *, failed: bool) -> None:
        while self._rooms:
            self._rooms.pop().close()


class _MemoryReceiver(BucketReceiver):
    def __init__(self, sender: str) -> None:
        self._sender = sender

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        assert isinstance(bucket.source, tuple), "the sender is of the same mode"
        data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8)
        read_room(bucket.source, data.numpy().data, self._sender)
        return data


# ---- checkpoint: through files of a folder that all nodes share


class CheckpointTransfer(Transfer):
    """Buckets are files that are committed together. The newest version stays in the folder for other readers, until
    all receivers have read the next one.
    """

    def __init__(self, root: Path, timeout_s: float) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._newest: VersionFolder | None = None

    def sender(self, host: str) -> BucketSender:
        return _FolderSender(begin_version(self._root, self._timeout_s), self._keep)

    def receiver(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> BucketReceiver:
        return _FolderReceiver(lease_version(Path(str(sender.meeting))))

    def _keep(self, version: VersionFolder) -> None:
        before, self._newest = self._newest, version
        if before is not None:
            before.release(remove=True)
        remove_unleased(self._root, self._timeout_s)


class _FolderSender(BucketSender):
    def __init__(self, version: VersionFolder, keep: Callable[[VersionFolder], None]) -> None:
        self.meeting = str(version.path)
        self._version = version
        self._keep = keep
        self._room = torch.empty(0, dtype=torch.uint8)
        self._written: list[tuple[PartLayout, bytes]] = []

    def room(self, nbytes: int) -> torch.Tensor:
        if self._room.numel() < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        return self._room

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        self._version.write_bucket(number, layout, data.numpy().data)
        self._written.append((layout, digest))
        self._hub.tell(Working())

    def end(self, end: End) -> None:
        files = self._version.commit(end.step, tensors=end.tensors, digest=end.digest)
        for number, ((layout, digest), path) in enumerate(zip(self._written, files, strict=True)):
            self._hub.tell(BucketNotice(number, layout, digest, str(path)))
        super().end(end)

    def close(self, *, failed: bool) -> None:
        if failed:
            self._version.release(remove=True)
        else:
            self._keep(self._version)


class _FolderReceiver(BucketReceiver):
    def __init__(self, version: VersionFolder) -> None:
        self._version = version

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8)
        read_bucket(Path(str(bucket.source)), bucket.layout, data.numpy().data)
        return data

    def close(self, *, failed: bool) -> None:
        self._version.release(remove=failed)


# ---- nccl: broadcasts over a process group of one sender and all receivers, which lives for one sync


class NcclTransfer(Transfer):
    """Buckets are broadcast, over ``nccl`` or ``gloo``; ``auto``: over NCCL where there are GPUs."""

    def __init__(self, transport: str, timeout_s: float) -> None:
        auto = "nccl" if torch.cuda.is_available() else "gloo"
        self._transport = auto if transport == "auto" else transport
        self.timeout_s = timeout_s

    def sender(self, host: str) -> BucketSender:
        timeout = timedelta(seconds=self.timeout_s)
        try:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise RunError(f"the group of the sync cannot meet at {host}, which is this node: {error}") from error
        return _GroupSender(f"{secrets.token_hex(8)} {store.port} {host}", store, self)

    def receiver(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> BucketReceiver:
        _, port, host = str(sender.meeting).split(" ", 2)
        with _blame(spoke.check, f"{sender.name} cannot be met at {host}:{port}"):
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self.timeout_s))
        return _GroupReceiver(spoke, self.enter(store, str(sender.meeting), 1 + place.index, place, spoke.check))

    def enter(
        self, store: dist.Store, meeting: str, rank: int, place: MemberPlace, check: Callable[[], None]
    ) -> BroadcastGroup:
        with _blame(check, f"the {self._transport} group of the sync could not be made in {self.timeout_s:g} s"):
            own = dist.PrefixStore(f"{meeting.split(' ', 1)[0]}/", store)
            group = make_group(own, rank, 1 + len(place.receivers), self._transport, self.timeout_s)
        return BroadcastGroup(group, device_of(self._transport), self.timeout_s)


class _GroupSender(BucketSender):
    def __init__(self, meeting: str, store: dist.TCPStore, transfer: NcclTransfer) -> None:
        self.meeting: str = meeting
        self._store: dist.TCPStore | None = store
        self._transfer = transfer
        self._group: BroadcastGroup | None = None
        self._rooms: dict[int, torch.Tensor] = {}
        self._waits: dict[int, Wait] = {}
        self._count = 0

    def connect(self, hub: Hub, place: MemberPlace) -> None:
        super().connect(hub, place)
        assert self._store is not None, "it was not closed"
        self._group = self._transfer.enter(self._store, self.meeting, 0, place, hub.check)

    def room(self, nbytes: int) -> torch.Tensor:
        assert self._group is not None, "it was connected"
        number, at = self._count, self._count % _ROOMS
        self._count += 1
        self._wait(number - _ROOMS)
        if at not in self._rooms or self._rooms[at].numel() < nbytes:
            self._rooms.pop(at, None)
            self._rooms[at] = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        return self._rooms[at]

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        assert self._group is not None, "it was connected"
        self._hub.tell(BucketNotice(number, layout, digest, None))
        with _blame(self._hub.check, f"bucket {number} could not be broadcast"):
            self._waits[number] = self._group.begin(data)

    def end(self, end: End) -> None:
        for number in sorted(self._waits):
            self._wait(number)
        super().end(end)

    def _wait(self, number: int) -> None:
        if (wait := self._waits.pop(number, None)) is not None:
            limit = f"within {self._transfer.timeout_s:g} s"
            with _blame(self._hub.check, f"bucket {number} could not be broadcast {limit}"):
                wait()

    def close(self, *, failed: bool) -> None:
        self._waits.clear()
        self._store = None
        _leave(self._group, failed)


class _GroupReceiver(BucketReceiver):
    def __init__(self, spoke: Spoke, group: BroadcastGroup) -> None:
        self._spoke = spoke
        self._group = group

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8, device=self._group.device)
        with _blame(self._spoke.check, f"bucket {bucket.number} of {self._spoke.sender} could not be received"):
            self._group.broadcast(data)
        return data

    def close(self, *, failed: bool) -> None:
        _leave(self._group, failed)


def _leave(group: BroadcastGroup | None, failed: bool) -> None:
    if group is not None:
        if failed:
            group.abort()
        group.close()


@contextlib.contextmanager
def _blame(check: Callable[[], None], what: str) -> Iterator[None]:
    """Translate an error of torch's: into the link's where `check` finds that a member is gone, else by `what`."""
    try:
        yield
    except RuntimeError as error:
        check()
        raise RunError(f"{what}: {error}") from error
