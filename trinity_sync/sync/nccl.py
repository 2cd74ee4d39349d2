"""`sync=nccl`: rounds of broadcasts over fresh process groups (NCCL between GPUs, gloo between CPUs).

A round carries one version to the explorers that take part in it. Every trainer rank sends its own part over a group
of its own with the explorers, so no rank receives bytes that it does not need, and torch's default group stays
untouched. An error ends the round for all members within `sync.timeout_s`; the driver then repeats the round without
the explorers that died. `BroadcastGroup`, at the end, is also the group of `sync.stream` and of verl's weight sync.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import ray

from trinity_sync.actors.calls import Call, MemberDied, results
from trinity_sync.actors.explorer_client import ExplorerClient, LoadReport
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import Sealed
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import part_name
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import (
    Bucket,
    BucketReceiver,
    BucketSender,
    BucketTransfer,
    Delivery,
    ExplorerSide,
    FindDestination,
    LayoutCache,
    SyncMode,
    TrainerSide,
)
from trinity_sync.sync.links import BucketNotice, End, Hub, Spoke

if TYPE_CHECKING:
    import torch
    from torch.distributed import BroadcastOptions, Store, TCPStore
    from torch.distributed.distributed_c10d import Work

    from trinity_sync.weights.layout import Cut, PartLayout


_AHEAD = 4
"""Broadcasts in flight."""

_BUFFERS = 2
"""Pieces in buffers: one is copied into the model while the next one arrives."""


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
    """The driver's half: commits the version, then leads rounds until every living explorer has it."""

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
        """Serve the store at which the members of all rounds meet. The driver serves it, for ranks may die."""
        if self._store is None:
            self._store = serve_store(ray.util.get_node_ip_address(), timeout_s)
        return self._store


def send(broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
    """Broadcast a trainer rank's staged part to the explorers of a round; return the bytes sent."""
    group = _join(broadcast, broadcast.senders.index(part), 0)
    try:
        return _send(broadcast, group, layout, segment)
    finally:
        group.close()


def _send(broadcast: Broadcast, group: BroadcastGroup, layout: PartLayout, segment: mmap.mmap) -> int:
    import torch

    staged = torch.frombuffer(segment, dtype=torch.uint8)[: layout.nbytes]
    waits: deque[Wait] = deque()
    sent = 0
    for start, stop in layout.pieces(broadcast.cut):
        if len(waits) == _AHEAD:
            waits.popleft()()
        # `to` copies nothing between CPUs.
        waits.append(group.begin(staged[start:stop].to(group.device)))
        sent += stop - start
    for wait in waits:
        wait()
    return sent


class NcclTransport:
    """The explorer's half: receives the parts one sender after another, piece by piece. A piece arrives in its
    destination where that is possible; else in a buffer, which is copied while the next pieces arrive.
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
        # A piece that has to be checked before its use cannot arrive in its destination.
        find = find_destination if broadcast.cut == "tensor" else _no_destination
        for sender, part in enumerate(broadcast.senders):
            info = lease.parts[part]
            layout = self._layouts.get(info)
            arrivals = _PieceArrivals(
                _join(broadcast, sender, rank), layout, broadcast.cut, find, self._make_buffers(layout)
            )
            try:
                for number, data in arrivals:
                    digest = None if info.buckets is None else info.buckets[number]
                    yield Bucket(layout, number, data, digest, broadcast.cut)
            finally:
                if not arrivals.close():
                    self._buffers = []

    def _make_buffers(self, layout: PartLayout) -> list[torch.Tensor]:
        import torch

        if not self._buffers or self._buffers[0].numel() < layout.bucket_bytes:
            self._buffers = [torch.empty(layout.bucket_bytes, dtype=torch.uint8) for _ in range(_BUFFERS)]
        return self._buffers


class _PieceArrivals:
    """The pieces of one part, in order: (number, bytes), or (number, None) for a piece in its destination. The bytes
    are valid until the next piece.
    """

    def __init__(
        self,
        group: BroadcastGroup,
        layout: PartLayout,
        cut: Cut,
        find_destination: FindDestination,
        buffers: list[torch.Tensor],
    ) -> None:
        self._group = group
        self._layout = layout
        self._cut: Cut = cut
        self._sizes = [stop - start for start, stop in layout.pieces(cut)]
        self._find_destination = find_destination
        self._free = list(buffers)
        self._next = 0
        self._in_flight: deque[_PieceArrival] = deque()

    def __iter__(self) -> Iterator[tuple[int, memoryview | None]]:
        for number in range(len(self._sizes)):
            self._begin_more()
            arrival = self._in_flight[0]
            arrival.wait()
            self._in_flight.popleft()
            self._begin_more()
            yield number, arrival.data
            if arrival.buffer is not None:
                self._free.append(arrival.buffer)

    def close(self) -> bool:
        """Wait until no byte arrives any more, also after an error: the memory is used for other bytes afterwards.

        A broadcast in flight still arrives, fails with its connection, or times out.

        Returns:
            Whether no broadcast was in flight.
        """
        clean = not self._in_flight
        try:
            if not clean:
                self._group.abort()
            for arrival in self._in_flight:
                with contextlib.suppress(RuntimeError):
                    arrival.wait()
        finally:
            self._in_flight.clear()
            self._group.close()
        return clean

    def _begin_more(self) -> None:
        while self._next < len(self._sizes) and len(self._in_flight) < _AHEAD:
            place = self._find_destination(self._layout, self._next, self._cut)
            if place is not None and place.is_cuda and place.device.index != self._group.device.index:
                place = None  # gloo writes to the CPU's memory; NCCL to that of one device, and through it to the CPU's
            if place is None and not self._free:
                return
            buffer = None if place is not None else self._free.pop()
            self._in_flight.append(_PieceArrival(self._group, place, buffer, self._sizes[self._next]))
            self._next += 1


class _PieceArrival:
    """One broadcast in flight, into the destination of a piece or into a buffer of the CPU."""

    def __init__(
        self, group: BroadcastGroup, place: torch.Tensor | None, buffer: torch.Tensor | None, nbytes: int
    ) -> None:
        import torch

        self.buffer = buffer
        self._bytes = None if buffer is None else buffer[:nbytes]
        target = place if self._bytes is None else self._bytes
        assert target is not None, "a piece has a destination or a buffer"
        # NCCL reaches the device's memory alone.
        through_device = group.device.type == "cuda" and not target.is_cuda
        self._target = torch.empty(nbytes, dtype=torch.uint8, device=group.device) if through_device else target
        self._copy_to = target if through_device else None
        self._wait = group.begin(self._target)

    def wait(self) -> None:
        self._wait()
        if self._copy_to is not None:
            self._copy_to.copy_(self._target)

    @property
    def data(self) -> memoryview | None:
        return None if self._bytes is None else self._bytes.numpy().data


def _no_destination(layout: PartLayout, number: int, cut: Cut) -> None:
    """Have every piece arrive in a buffer (a `FindDestination`)."""


# ---- where the members of a round meet: keys in a store that the driver serves


def give_up(store: Store, broadcast: Broadcast) -> None:
    """Release the members that still wait for others, or come later. Those that have met find connections closed."""
    for sender in range(len(broadcast.senders)):
        store.compare_set(f"{broadcast.prefix(sender)}decision", "", "over")
    forget(store, broadcast, but="decision")


def forget(store: Store, broadcast: Broadcast, but: str | None = None) -> None:
    """Remove the keys of a round, so that the store does not grow with every version."""
    prefixes = tuple(broadcast.prefix(sender) for sender in range(len(broadcast.senders)))
    for key in store.list_keys():
        if key.startswith(prefixes) and key.rsplit("/", 1)[1] != but:
            store.delete_key(key)


@functools.cache
def _connect(host: str, port: int, timeout_s: float) -> Store:
    """Return this process's client of the store, one for all rounds: torch looks up the names of both ends for each
    connection, which takes seconds where there is no name server.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _join(broadcast: Broadcast, sender: int, rank: int) -> BroadcastGroup:
    """Enter the group of one sender (rank 0) and all explorers, once all of them are there.

    Raises:
        DistStoreError: a member did not come in time.
    """
    from torch.distributed import PrefixStore

    store = _connect(broadcast.host, broadcast.port, broadcast.timeout_s)
    prefix = broadcast.prefix(sender)
    size = 1 + len(broadcast.explorers)
    if store.add(f"{prefix}joined", 1) == size:
        store.compare_set(f"{prefix}decision", "", "go")
    store.wait([f"{prefix}decision"], timedelta(seconds=broadcast.timeout_s))
    if store.get(f"{prefix}decision") != b"go":
        raise RunError(f"the round for version {broadcast.version} was given up")
    return enter(PrefixStore(f"{prefix}group", store), rank, size, broadcast.transport, broadcast.timeout_s)


# ---- programs without slots: buckets are broadcast over a group of one sender and all receivers, which lives for one
# sync


_ROOMS = 2
"""One bucket is filled while the one before travels."""


class GroupTransfer(BucketTransfer):
    """Broadcasts over ``nccl`` or ``gloo``; ``auto``: over NCCL where there are GPUs."""

    def __init__(self, transport: str, timeout_s: float) -> None:
        import torch

        auto = "nccl" if torch.cuda.is_available() else "gloo"
        self._transport = auto if transport == "auto" else transport
        self.timeout_s = timeout_s

    def sender(self, host: str) -> GroupSender:
        try:
            store = serve_store(host, self.timeout_s)
        except RuntimeError as error:
            raise RunError(f"the group of the sync cannot meet at {host}, which is this node: {error}") from error
        return GroupSender(f"{secrets.token_hex(8)} {store.port} {host}", store, self)

    def receiver(self, spoke: Spoke, meeting: str | None, index: int, receivers: int) -> GroupReceiver:
        from torch.distributed import TCPStore

        _, port, host = str(meeting).split(" ", 2)
        with _blame(spoke.check, f"{spoke.sender} cannot be met at {host}:{port}"):
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self.timeout_s))
        return GroupReceiver(spoke, self.enter(store, str(meeting), 1 + index, 1 + receivers, spoke.check))

    def enter(self, store: Store, meeting: str, rank: int, size: int, check: Callable[[], None]) -> BroadcastGroup:
        from torch.distributed import PrefixStore

        with _blame(check, f"the {self._transport} group of the sync could not be made in {self.timeout_s:g} s"):
            own = PrefixStore(f"{meeting.split(' ', 1)[0]}/", store)
            return enter(own, rank, size, self._transport, self.timeout_s)


class GroupSender(BucketSender):
    """Rank 0 of the group."""

    def __init__(self, meeting: str, store: Store, transfer: GroupTransfer) -> None:
        self.meeting: str = meeting
        self._store: Store | None = store
        self._transfer = transfer
        self._group: BroadcastGroup | None = None
        self._rooms: dict[int, torch.Tensor] = {}
        self._waits: dict[int, Wait] = {}
        self._count = 0

    def connect(self, hub: Hub, receivers: int) -> None:
        super().connect(hub, receivers)
        assert self._store is not None, "it was not closed"
        self._group = self._transfer.enter(self._store, self.meeting, 0, 1 + receivers, hub.check)

    def room(self, nbytes: int) -> torch.Tensor:
        import torch

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
        if self._group is not None:
            self._group.close(failed=failed)


class GroupReceiver(BucketReceiver):
    """A further rank of the group."""

    def __init__(self, spoke: Spoke, group: BroadcastGroup) -> None:
        self._spoke = spoke
        self._group = group

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        import torch

        data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8, device=self._group.device)
        with _blame(self._spoke.check, f"bucket {bucket.number} of {self._spoke.sender} could not be received"):
            self._group.broadcast(data)
        return data

    def close(self, *, failed: bool) -> None:
        self._group.close(failed=failed)


@contextlib.contextmanager
def _blame(check: Callable[[], None], what: str) -> Iterator[None]:
    """Translate an error of torch's: into the link's where `check` finds that a member is gone, else by `what`."""
    try:
        yield
    except RuntimeError as error:
        check()
        raise RunError(f"{what}: {error}") from error


# ---- process groups beside torch's default one


_WATCHDOG_S = 60.0
"""NCCL's watchdog ends the whole process at its own timeout, so the error of a wait has to come before that."""

Wait = Callable[[], None]
"""Waits until a broadcast has ended; RuntimeError of torch's: it failed, or did not end in time."""


class TorchGroup(Protocol):
    """torch's process groups; their stubs leave out `broadcast`."""

    def name(self) -> str: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


def make_group(store: Store, rank: int, size: int, transport: str, timeout_s: float) -> TorchGroup:
    """Enter a group of ``gloo`` or ``nccl``; of gloo it returns when all members have met.

    Args:
        timeout_s: timeout of each operation, seconds.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout + timedelta(seconds=_WATCHDOG_S)
        return cast(TorchGroup, dist.ProcessGroupNCCL(store, rank, size, options))
    return cast(TorchGroup, dist.ProcessGroupGloo(store, rank, size, timeout))


def enter(store: Store, rank: int, size: int, transport: str, timeout_s: float) -> BroadcastGroup:
    """Enter a group for broadcasts of rank 0; see `make_group`."""
    group = make_group(store, rank, size, transport, timeout_s)
    return BroadcastGroup(group, device_of(transport), timeout_s)


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Serve a store, at which the members of a group meet, at an address of this node; RuntimeError: it is not one.

    Args:
        timeout_s: timeout of each wait for a key, seconds.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def device_of(transport: str) -> torch.device:
    """Return the device whose memory a transport reaches: the CPU, or the current GPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")


class BroadcastGroup:
    """Broadcasts of rank 0 of a process group to all other members, each with a timeout. Errors are torch's own
    RuntimeErrors: in a round the driver looks for the member that caused them (`actors.calls.results`).

    Args:
        group: the group.
        device: where the tensors are: a GPU for NCCL, the CPU for gloo.
        timeout_s: timeout of each broadcast, seconds.
    """

    def __init__(self, group: TorchGroup, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self.timeout_s = timeout_s
        # A list, for `close` to empty: the traceback of an error may refer to this object for long.
        self._groups = [group]
        self._has_met = False

    def begin(self, tensor: torch.Tensor) -> Wait:
        """Begin to send a tensor of the group's device, on rank 0, or to receive into it; return the function that
        waits for its end. Its memory is in use until then.

        Raises:
            RuntimeError: it cannot be sent, or a member did not come to the group's first broadcast.
        """
        return partial(self._wait, self._begin(tensor) if self._has_met else self._meet(tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor, on rank 0, or receive into it; errors as of `begin`."""
        self.begin(tensor)()

    def abort(self) -> None:
        """Break off the broadcasts in flight: NCCL's, for gloo's end with their connections."""
        if self.device.type == "cuda" and self._groups:
            with contextlib.suppress(RuntimeError):
                self._groups[0].abort()

    def close(self, *, failed: bool = False) -> None:
        """Leave the group; `failed`: after an `abort`. May be called again.

        gloo takes 20 ms to close its connections (two turns of its loop), so a thread does it. NCCL would break off
        what is in flight without a shutdown before.
        """
        if failed:
            self.abort()
        if self.device.type == "cpu":
            threading.Thread(target=self._groups.clear, name="close group", daemon=True).start()
            return
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.shutdown()
        self._groups.clear()

    def _begin(self, tensor: torch.Tensor) -> Work:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self.timeout_s)
        return self._groups[0].broadcast([tensor], options)

    def _meet(self, tensor: torch.Tensor) -> Work:
        """Begin the first broadcast. NCCL's members meet in it, without a timeout, so a thread begins it."""
        import torch

        # A new thread would use the first GPU, and not wait for the work of this thread's stream.
        stream = torch.cuda.current_stream(self.device) if torch.cuda.is_initialized() else None
        answer: SimpleQueue[Work | Exception] = SimpleQueue()

        def begin() -> None:
            try:
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    answer.put(self._begin(tensor))
            except Exception as error:
                answer.put(error)

        threading.Thread(target=begin, name="meet in a group", daemon=True).start()
        try:
            work = answer.get(timeout=self.timeout_s)
        except Empty:
            raise RuntimeError(f"its members did not meet within {self.timeout_s:g} s") from None
        if isinstance(work, Exception):
            raise work
        self._has_met = True
        return work

    def _wait(self, work: Work) -> None:
        if self.device.type == "cuda":
            # Without a timeout NCCL's would only make the device's stream wait.
            work.wait(timedelta(seconds=self.timeout_s))
        else:
            # gloo keeps the group's timeout, and closes its connections when a wait with another one ends.
            work.wait()
