"""`sync=nccl`: rounds of broadcasts over fresh process groups (NCCL between GPUs, gloo between CPUs).

A round carries one version to the explorers that take part in it. Every trainer rank sends its own part: it and the
explorers form a group of their own, so no rank receives what it does not need, and neither side's default group is
touched. Any error ends the round for everybody in it within `sync.timeout_s`; the driver then repeats it without the
dead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import ray

from trinity_sync.actors.calls import Call, MemberDied, results
from trinity_sync.actors.explorer_client import ExplorerClient, LoadReport
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import Sealed
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import part_name
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Bucket, Delivery, ExplorerSide, FindDestination, SyncMode, TrainerSide
from trinity_sync.sync.layouts import LayoutCache

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import BroadcastOptions, Store, TCPStore
    from torch.distributed.distributed_c10d import Work

    from trinity_sync.weights.layout import Cut, PartLayout


_AHEAD = 4
"""Pieces on their way at a time."""

_BUFFERS = 2
"""Of them in memory beside the model: one is applied while the next one comes."""


class NcclMode(SyncMode):
    """Versions are broadcast in rounds.

    Args:
        transport: ``gloo``, ``nccl``, or ``auto``: NCCL on GPUs, gloo elsewhere (`sync.transport`).
    """

    ranks_take_part: ClassVar[bool] = True

    def __init__(self, *, transport: str, **settings: object) -> None:
        self._transport = transport

    def publisher(self, side: TrainerSide) -> NcclPublisher:
        found = "nccl" if side.use_gpu else "gloo"
        return NcclPublisher(side, found if self._transport == "auto" else self._transport)

    def transport(self, side: ExplorerSide) -> NcclTransport:
        return NcclTransport(side.name, side.layouts)

    def send(self, broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
        return send(broadcast, part, layout, segment)


class NcclPublisher:
    """The driver's half: commits the version, then leads rounds until every living explorer has it.

    Args:
        side: see `TrainerSide`.
        transport: ``gloo`` or ``nccl``.
    """

    def __init__(self, side: TrainerSide, transport: str) -> None:
        self._side = side
        self._transport = transport
        self._ids = itertools.count(1)
        self._sealed: Sealed | None = None
        self._store: TCPStore | None = None

    def publish(self, sealed: Sealed) -> None:
        synchronizer = self._side.synchronizer
        synchronizer.commit(sealed.version).result(synchronizer.timeout_s)
        self._sealed = sealed

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        if self._sealed is None or self._sealed.version != version:
            raise RunError(f"version {version} was not published last, so no rank has it staged for a round")
        delivery, alive = Delivery(), dict(explorers)
        while alive:
            try:
                delivery.reports = self._lead_round(self._sealed, alive)
                return delivery
            except MemberDied as death:
                if death.who not in alive:
                    raise
                delivery.lost[death.who] = death
                del alive[death.who]
        return delivery

    def _lead_round(self, sealed: Sealed, explorers: Mapping[str, ExplorerClient]) -> list[LoadReport]:
        senders = sorted(sealed.parts)
        ranks = {part_name(client.rank): client for client in self._side.ranks}
        limit = self._side.timeout_s
        store = self._open_store(limit)
        broadcast = Broadcast(
            id=next(self._ids),
            version=sealed.version,
            slot=sealed.slot,
            host=store.host,
            port=store.port,
            senders=senders,
            explorers=[name for explorer in explorers.values() for name in explorer.receivers],
            transport=self._transport,
            cut="tensor" if all(info.buckets is None for info in sealed.parts.values()) else "bucket",
            timeout_s=limit,
        )
        sending = [ranks[part].send(broadcast) for part in senders]
        loading = [explorer.load(sealed.version, broadcast) for explorer in explorers.values()]
        together: list[Call[object]] = [*sending, *loading]
        try:
            results(together, limit * 2, f"exchange version {sealed.version}")
        except BaseException:
            give_up(store, broadcast)
            raise
        forget(store, broadcast)
        return results(loading, limit)

    def _open_store(self, timeout_s: float) -> TCPStore:
        """Serve the store at which the members of all rounds meet: the driver's work, as it is in no round."""
        if self._store is None:
            from torch.distributed import TCPStore

            limit = timedelta(seconds=timeout_s)
            self._store = TCPStore(
                ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False, timeout=limit
            )
        return self._store


def send(broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
    """Do a trainer rank's share of a round: broadcast its staged part piece by piece.

    Args:
        broadcast: the round.
        part: name of the part that this rank staged.
        layout: how the part is laid out.
        segment: the slot's bytes, mapped.

    Returns:
        Bytes sent.
    """
    groups = [open_group(broadcast, broadcast.senders.index(part), 0)]
    try:
        sent = _send(broadcast, groups[0], layout, segment)
    finally:
        close(groups, broadcast.transport)
    return sent


def _send(broadcast: Broadcast, group: RoundGroup, layout: PartLayout, segment: mmap.mmap) -> int:
    import torch

    staged = torch.frombuffer(segment, dtype=torch.uint8)[: layout.nbytes]
    under_way: deque[Work] = deque()
    sent = 0
    for start, stop in layout.pieces(broadcast.cut):
        if len(under_way) == _AHEAD:
            wait_round(under_way.popleft(), broadcast)
        piece = staged[start:stop]
        there = piece.cuda() if broadcast.transport == "nccl" else piece
        under_way.append(begin_broadcast(group, there, broadcast.timeout_s))
        sent += stop - start
    for work in under_way:
        wait_round(work, broadcast)
    return sent


class NcclTransport:
    """The explorer's half: receives the parts one sender after another, piece by piece. What can be received where it
    belongs is; the rest arrives in buffers that are kept, and is copied from there while the next pieces come.

    Args:
        name: the explorer's name.
        layouts: layouts that were seen before.
    """

    def __init__(self, name: str, layouts: LayoutCache) -> None:
        self._name = name
        self._layouts = layouts
        self._buffers: list[torch.Tensor] = []

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        if broadcast is None:
            raise RunError(f"{self._name} was to load version {lease.version}, but was not asked to any broadcast")
        rank = 1 + broadcast.explorers.index(self._name)
        for index, part in enumerate(broadcast.senders):
            info = lease.parts[part]
            layout = self._layouts.get(info)
            arriving = _Arriving(
                open_group(broadcast, index, rank), broadcast, layout, find_destination, self._make_buffers(layout)
            )
            try:
                for number, data in arriving:
                    digest = None if info.buckets is None else info.buckets[number]
                    yield Bucket(layout, number, self._arrived(data), digest, broadcast.cut)
            finally:
                if not arriving.close():
                    self._buffers = []

    def _arrived(self, data: np.ndarray | None) -> np.ndarray | None:
        return data

    def _make_buffers(self, layout: PartLayout) -> list[torch.Tensor]:
        import torch

        if not self._buffers or self._buffers[0].numel() < layout.bucket_bytes:
            self._buffers = [torch.empty(layout.bucket_bytes, dtype=torch.uint8) for _ in range(_BUFFERS)]
        return self._buffers


class _Arriving:
    """The pieces of one part, in order: (number, bytes), or (number, None) for one that is in its place. The bytes are
    valid until the next piece.

    Args:
        group: the group of the sender and all explorers.
        broadcast: the round.
        layout: how the part is laid out.
        find_destination: see `FindDestination`.
        buffers: memory for pieces that have no place of their own.
    """

    def __init__(
        self,
        group: RoundGroup,
        broadcast: Broadcast,
        layout: PartLayout,
        find_destination: FindDestination,
        buffers: list[torch.Tensor],
    ) -> None:
        self._groups = [group]
        self._broadcast = broadcast
        self._layout = layout
        self._sizes = [stop - start for start, stop in layout.pieces(broadcast.cut)]
        # What has to be checked before it is used cannot be received where it is used.
        self._find_destination = find_destination if broadcast.cut == "tensor" else _nowhere
        self._free = list(buffers)
        self._next = 0
        self._under_way: deque[_Receiving] = deque()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray | None]]:
        for number in range(len(self._sizes)):
            self._go_on()
            receiving = self._under_way[0]
            receiving.wait()
            self._under_way.popleft()
            self._go_on()
            yield number, receiving.data()
            if receiving.buffer is not None:
                self._free.append(receiving.buffer)

    def close(self) -> bool:
        """Wait until nothing arrives any more, in whatever way it ends: no byte is to come in where others are by then.

        After an error elsewhere what is under way still comes, or ends with the connections, at the latest in time.

        Returns:
            Whether nothing was under way.
        """
        clean = not self._under_way
        try:
            if not clean and self._broadcast.transport == "nccl":
                with contextlib.suppress(RuntimeError):
                    self._groups[0].abort()
            for receiving in self._under_way:
                with contextlib.suppress(RuntimeError):
                    receiving.wait()
        finally:
            self._under_way.clear()
            close(self._groups, self._broadcast.transport)
        return clean

    def _go_on(self) -> None:
        while self._next < len(self._sizes) and len(self._under_way) < _AHEAD:
            place = self._find_destination(self._layout, self._next, self._broadcast.cut)
            if place is not None and not self._reaches(place):
                place = None
            if place is None and not self._free:
                return
            buffer = None if place is not None else self._free.pop()
            self._under_way.append(_Receiving(self._groups[0], place, buffer, self._sizes[self._next], self._broadcast))
            self._next += 1

    def _reaches(self, place: torch.Tensor) -> bool:
        """Tell whether the group can write there: gloo to the CPU's memory, NCCL to the one device that it was made
        for, and through that to the CPU's.
        """
        if not place.is_cuda:
            return True
        import torch

        return self._broadcast.transport == "nccl" and place.device.index == torch.cuda.current_device()


class _Receiving:
    """One piece on its way.

    Args:
        group: the group of the sender and all explorers.
        place: memory in which the piece belongs, or None.
        buffer: memory of the CPU for its bytes, where there is no such place.
        nbytes: length of the piece.
        broadcast: the round.
    """

    def __init__(
        self,
        group: RoundGroup,
        place: torch.Tensor | None,
        buffer: torch.Tensor | None,
        nbytes: int,
        broadcast: Broadcast,
    ) -> None:
        import torch

        self.buffer = buffer
        self._bytes = None if buffer is None else buffer[:nbytes]
        target = place if self._bytes is None else self._bytes
        assert target is not None, "a piece has a place or a buffer"
        # NCCL knows no memory but the device's.
        there = broadcast.transport == "gloo" or target.is_cuda
        self._target = target if there else torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._copy_to = None if there else target
        self._broadcast = broadcast
        self._work = begin_broadcast(group, self._target, broadcast.timeout_s)

    def wait(self) -> None:
        """Wait until all of it is there."""
        wait_round(self._work, self._broadcast)
        if self._copy_to is not None:
            self._copy_to.copy_(self._target)

    def data(self) -> np.ndarray | None:
        """Return the bytes in the buffer, None where they are in their place."""
        return None if self._bytes is None else self._bytes.numpy()


def _nowhere(layout: PartLayout, number: int, cut: Cut) -> None:
    """Find no place, for pieces that all arrive in buffers (a `FindDestination`)."""


# Process groups of our own, beside torch's default one, and broadcasts over them from their rank 0.


_WATCHDOG_S = 60.0


class RoundGroup(Protocol):
    """What is used of torch's groups, gloo between CPUs and NCCL between GPUs. Their stubs leave out `broadcast`."""

    def name(self) -> str:
        """Return ``gloo`` or ``nccl``."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Begin an operation of all members."""
        ...

    def abort(self) -> None:
        """Break off what is under way."""
        ...

    def shutdown(self) -> None:
        """Wait for what is under way, and end."""
        ...


def make_group(store: Store, rank: int, size: int, transport: str, timeout_s: float) -> RoundGroup:
    """Enter a group; returns when its members have met.

    Args:
        store: where they meet; the keys in it are the group's alone.
        rank, size: this process's place among its members, and their number.
        transport: ``gloo`` or ``nccl``.
        timeout_s: limit of each operation, seconds.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    if transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # By its own limit NCCL's watchdog ends the whole process; who waits for an operation is to be first, and told.
        options._timeout = limit + timedelta(seconds=_WATCHDOG_S)
        return cast(RoundGroup, dist.ProcessGroupNCCL(store, rank, size, options))
    return cast(RoundGroup, dist.ProcessGroupGloo(store, rank, size, limit))


def begin_broadcast(group: RoundGroup, tensor: torch.Tensor, timeout_s: float) -> Work:
    """Begin to send a tensor from rank 0 to all others, into theirs; what is returned is waited for."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)


def wait(work: Work, timeout_s: float, *, nccl: bool) -> None:
    """Wait until the operation has ended. Without a limit of its own NCCL's would only make the device's stream wait;
    gloo keeps the group's limit, and closes its connections when a wait with another one ends.
    """
    if nccl:
        work.wait(timedelta(seconds=timeout_s))
    else:
        work.wait()


def close(groups: list[RoundGroup], transport: str) -> None:
    """Let go of a group, which the list refers to and, after an error, its traceback. gloo takes 20 ms to close its
    connections (two turns of its loop): nobody has to wait for that. NCCL's would break off what is under way without a
    shutdown before.
    """
    if transport == "gloo":
        threading.Thread(target=groups.clear, name="close group", daemon=True).start()
        return
    with contextlib.suppress(RuntimeError):
        groups[0].shutdown()
    groups.clear()


# The process groups of a round: where its members meet, one group of each sender and the explorers, and their ends.


def give_up(store: Store, broadcast: Broadcast) -> None:
    """Send home who still waits for the others, and who comes later. Who has met already finds connections closed."""
    for sender in range(len(broadcast.senders)):
        store.compare_set(f"{broadcast.prefix(sender)}decision", "", "over")
    forget(store, broadcast, but="decision")


def forget(store: Store, broadcast: Broadcast, but: str | None = None) -> None:
    """Remove the keys of a round: what is not removed would grow with every version."""
    prefixes = tuple(broadcast.prefix(sender) for sender in range(len(broadcast.senders)))
    for key in store.list_keys():
        if key.startswith(prefixes) and key.rsplit("/", 1)[1] != but:
            store.delete_key(key)


@functools.cache
def _connect(host: str, port: int, timeout_s: float) -> Store:
    """Return this process's client of the store. It is kept: torch looks up the names of both ends for each connection,
    which takes seconds where there is no name server.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _meet(broadcast: Broadcast, sender: int) -> Store:
    """Wait until the sender and all explorers are there; return the store for their group.

    Raises:
        RunError: the round was given up meanwhile.
        DistStoreError: somebody did not come in time.
    """
    from torch.distributed import PrefixStore

    store = _connect(broadcast.host, broadcast.port, broadcast.timeout_s)
    prefix = broadcast.prefix(sender)
    if store.add(f"{prefix}joined", 1) == 1 + len(broadcast.explorers):
        store.compare_set(f"{prefix}decision", "", "go")
    store.wait([f"{prefix}decision"], timedelta(seconds=broadcast.timeout_s))
    if store.get(f"{prefix}decision") != b"go":
        raise RunError(f"the round for version {broadcast.version} was given up")
    return PrefixStore(f"{prefix}group", store)


def open_group(broadcast: Broadcast, sender: int, rank: int) -> RoundGroup:
    """Enter the group of a sender and all explorers, once they are there; errors as of the meeting.

    Args:
        broadcast: the round.
        sender: its place among the senders of the round.
        rank: 0 for the sender, 1 and following for the explorers.
    """
    size = 1 + len(broadcast.explorers)
    return make_group(_meet(broadcast, sender), rank, size, broadcast.transport, broadcast.timeout_s)


def wait_round(work: Work, broadcast: Broadcast) -> None:
    """Wait until the operation of a round has ended."""
    wait(work, broadcast.timeout_s, nccl=broadcast.transport == "nccl")
