"""`sync=nccl`: rounds of broadcasts over fresh process groups (NCCL between GPUs, gloo between CPUs).

A round carries one version to the explorers that take part in it. Every trainer rank sends its own part over a group
of its own with the explorers, so no rank receives bytes that it does not need, and torch's default group stays
untouched. An error ends the round for all members within the limit of a broadcast; the driver then repeats the round
without the explorers that died.

verl's weight sync in mode nccl broadcasts buckets over a group of each sender and all receivers (`GroupTransfer`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import ray

from trinity_sync.actors.agent_client import SharedDelta
from trinity_sync.actors.calls import Call, DeathError, results
from trinity_sync.actors.explorer_client import ExplorerClient, LoadReport
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.errors import RunError, grown, limit_text
from trinity_sync.host.logs import story
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
    Published,
    SyncMode,
    TrainerSide,
    Transport,
    commit,
    is_near,
)
from trinity_sync.sync.broadcast_group import BroadcastGroup, Wait, enter, limited, serve_store
from trinity_sync.sync.deltas import Deltas, DeltaTransport, VersionDeltas, fetch_delta, read_chain
from trinity_sync.sync.links import BucketNotice, End, Hub, Spoke
from trinity_sync.weights.delta import DeltaError, WrongBaseError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore

    from trinity_sync.config.schema import DeltaConfig
    from trinity_sync.weights.layout import Cut, PartLayout


_AHEAD = 4
"""Broadcasts in flight."""

_BUFFERS = 2
"""Pieces in buffers: one is copied into the model while the next one arrives."""


class NcclMode(SyncMode):
    """Versions are broadcast in rounds.

    Args:
        transport: ``gloo``, ``nccl``, or ``auto``: NCCL on GPUs, gloo elsewhere (`sync.transport`).
        encoding: ``full``; ``delta``: what has changed is broadcast; ``auto``: to explorers on a node that has not
            all parts (`sync.encoding`).
        delta: how deltas are made; not for ``full``.
    """

    ranks_take_part: ClassVar[bool] = True

    def __init__(
        self, *, transport: str, encoding: str = "full", delta: DeltaConfig | None = None, **settings: object
    ) -> None:
        self._transport = transport
        self._delta = None if encoding == "full" else delta
        self._always = encoding == "delta"

    def publisher(self, side: TrainerSide) -> NcclPublisher:
        found = "nccl" if side.use_gpu else "gloo"
        transport = found if self._transport == "auto" else self._transport
        return NcclPublisher(side, transport, self._delta, always=self._always)

    def transport(self, side: ExplorerSide) -> NcclTransport | DeltaTransport:
        _connect.cache_clear()  # another attempt's store may have had the same port
        full = NcclTransport(side.name, side.layouts)
        if self._delta is None:
            return full
        return DeltaTransport(side, BroadcastDeltas(full, side.name, side.layouts), always=self._always)

    def send(self, broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
        return send(broadcast, part, layout, segment)


class NcclPublisher:
    """The driver's half: commits the version, then leads rounds until every living explorer has it. Explorers that hold
    the same version take a delta together.
    """

    def __init__(
        self, side: TrainerSide, transport: str, keys: DeltaConfig | None = None, *, always: bool = True
    ) -> None:
        self._side = side
        self._transport = transport
        self._always = always
        self._deltas = None if keys is None else VersionDeltas(side, keys.codec, spans=(), always=always)
        self._ids = itertools.count(1)
        self._sealed: SealedVersion | None = None
        self._store: TCPStore | None = None
        self._held = WeakKeyDictionary[ExplorerClient, Version]()  # where the last load succeeded

    def publish(self, sealed: SealedVersion) -> Published | None:
        report = None
        if self._deltas is not None:
            report = self._deltas.publish(sealed)
        else:
            commit(self._side, sealed.version)
        self._sealed = sealed
        return report

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        if self._sealed is None or self._sealed.version != version:
            raise RunError(f"version {version} was not published last, so no rank has it staged for a round")
        delivery = Delivery()
        together: dict[Version | None, dict[str, ExplorerClient]] = {}
        nodes = {} if self._always else self._side.explorer_nodes()
        for name, client in explorers.items():
            held = self._held.pop(client, None)
            if self._deltas is None or (name in nodes and is_near(nodes[name], self._sealed.parts)):
                held = None
            together.setdefault(held, {})[name] = client
        for base, alive in together.items():
            self._deliver(delivery, self._sealed, alive, base)
        return delivery

    def _deliver(
        self, delivery: Delivery, sealed: SealedVersion, alive: dict[str, ExplorerClient], base: Version | None
    ) -> None:
        faults = dict[str, str]()  # by explorer
        while alive:
            try:
                reports = self._lead_round(sealed, alive, base, faults)
            except DeathError as death:
                if death.who not in alive:
                    raise
                delivery.lost[death.who] = death
                del alive[death.who]
            except DeltaError as error:
                if base is None:
                    raise
                story.warning("version %s is sent once more, in full: %s", sealed.version, error)
            else:
                delivery.reports += [replace(report, fault=faults.get(report.explorer)) for report in reports]
                self._held.update((client, sealed.version) for client in alive.values())
                return
            base = None  # some may have taken the delta

    def _lead_round(
        self,
        sealed: SealedVersion,
        explorers: Mapping[str, ExplorerClient],
        base: Version | None,
        faults: dict[str, str],
    ) -> list[LoadReport]:
        """Lead a round; DeltaError: a delta could not be taken, `faults` says by whom."""
        shared = None if base is None or self._deltas is None else self._deltas.share(sealed, base)
        deltas = shared or {}
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
            sync_timeout_s=limit,
            nbytes=[
                sum(one.nbytes for one in deltas[part]) if deltas else sealed.parts[part].nbytes for part in senders
            ],
            base=base if deltas else None,
            deltas={part: [one._replace(reference=None) for one in chain] for part, chain in deltas.items()},
        )
        sending = [
            ranks[part].send(replace(broadcast, deltas={part: deltas[part]} if deltas else {})) for part in senders
        ]
        loading = [explorer.load(sealed.version, broadcast) for explorer in explorers.values()]
        together: list[Call[object]] = [*sending, *loading]
        try:
            # an engine takes the whole version also after a round of deltas
            nbytes = sum(broadcast.nbytes) + sum(info.nbytes for info in sealed.parts.values())
            whole = grown(limit, nbytes, more_s=limit)
            results(together, whole, f"exchange version {sealed.version}")
        except BaseException as error:
            give_up(store, broadcast)
            if isinstance(error, DeltaError):
                failed = [call.who for call in loading if call.has_ended() and not call.is_answered()]
                told = f"version {sealed.version} was sent once more, in full: {error}"
                faults.update(dict.fromkeys(failed or list(explorers)[:1], told))
            raise
        forget(store, broadcast)
        return results(loading, limit)

    def _open_store(self, timeout_s: float) -> TCPStore:
        """Serve the store at which the members of all rounds meet. The driver serves it, for ranks may die."""
        if self._store is None:
            self._store = serve_store(ray.util.get_node_ip_address(), timeout_s)
        return self._store


def send(broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> int:
    """Broadcast a trainer rank's staged part, or its delta, to the explorers of a round; return the bytes sent."""
    pieces = _pieces_to_send(broadcast, part, layout, segment)
    group = _join(broadcast, broadcast.senders.index(part), 0, max(map(len, pieces), default=0))
    try:
        return _send(group, pieces)
    finally:
        group.close()


def _pieces_to_send(broadcast: Broadcast, part: str, layout: PartLayout, segment: mmap.mmap) -> Sequence[torch.Tensor]:
    from trinity_sync.weights.tensors import byte_tensor

    if broadcast.base is None:
        staged = byte_tensor(layout.view(segment))
        return [staged[start:stop] for start, stop in layout.pieces(broadcast.cut)]
    found = [
        fetch_delta(one, f"the node agent with {part}", broadcast.sync_timeout_s) for one in broadcast.deltas[part]
    ]
    return [piece for data in found for piece in byte_tensor(data).split(layout.bucket_bytes)]


def _send(group: BroadcastGroup, pieces: Sequence[torch.Tensor]) -> int:
    waits: deque[Wait] = deque()
    for piece in pieces:
        if len(waits) == _AHEAD:
            waits.popleft()()
        # `to` copies nothing between CPUs.
        waits.append(group.begin(piece.to(group.device)))
    for wait in waits:
        wait()
    return sum(map(len, pieces))


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
        if broadcast.base is not None:
            raise DeltaError(f"{self._name} takes whole versions only, and a delta was to be broadcast")
        rank = 1 + broadcast.explorers.index(self._name)
        # A piece that has to be checked before its use cannot arrive in its destination.
        find = find_destination if broadcast.cut == "tensor" else _no_destination
        for sender, part in enumerate(broadcast.senders):
            info = lease.parts[part]
            layout = self._layouts.get(info)
            largest = max((stop - start for start, stop in layout.pieces(broadcast.cut)), default=0)
            arrivals = _PieceArrivals(
                _join(broadcast, sender, rank, largest), layout, broadcast.cut, find, self._make_buffers(layout)
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


class BroadcastDeltas:
    """Deltas that arrive by broadcast (a `DeltaSource`)."""

    def __init__(self, full: Transport, name: str, layouts: LayoutCache) -> None:
        self.full = full
        self._name = name
        self._layouts = layouts

    def find(self, lease: Lease, broadcast: Broadcast | None, held: Version | None) -> Deltas | None:
        if broadcast is None or broadcast.base is None:
            return None
        chains = {}
        for sender, part in enumerate(broadcast.senders):
            layout = self._layouts.get(lease.parts[part])
            group = _join(broadcast, sender, 1 + broadcast.explorers.index(self._name), layout.bucket_bytes)
            try:
                receive = partial(_receive_delta, group, layout.bucket_bytes)
                chains[part] = read_chain(layout, broadcast.deltas[part], lease.version, receive)
            except BaseException:
                group.close(failed=True)
                raise
            group.close()
        # not before the round: its other members would wait for this one
        if broadcast.base != held:
            told = "none" if held is None else f"version {held}"
            raise WrongBaseError(f"a delta from version {broadcast.base} was to be broadcast, and {told} is held")
        return Deltas([chain for _, chain in sorted(chains.items())])

    def whole(self, lease: Lease) -> AbstractContextManager[tuple[Transport, Lease]]:
        return contextlib.nullcontext((self.full, lease))


def _receive_delta(group: BroadcastGroup, piece_bytes: int, shared: SharedDelta) -> memoryview:
    import torch

    data = torch.empty(shared.nbytes, dtype=torch.uint8)
    for piece in data.split(piece_bytes):
        _PieceArrival(group, piece, None, len(piece)).wait()
    return data.numpy().data


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


def forget(store: Store, broadcast: Broadcast, but: str = "") -> None:
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


def _join(broadcast: Broadcast, sender: int, rank: int, piece_bytes: int) -> BroadcastGroup:
    """Enter the group of one sender (rank 0) and all explorers, once all of them are there. `piece_bytes`: of the
    largest piece.

    Raises:
        RuntimeError: a member did not come in time.
    """
    from torch.distributed import PrefixStore

    store = _connect(broadcast.host, broadcast.port, broadcast.sync_timeout_s)
    prefix = broadcast.prefix(sender)
    size = 1 + len(broadcast.explorers)
    if store.add(f"{prefix}joined", 1) == size:
        store.compare_set(f"{prefix}decision", "", "go")
    # A sender waits for explorers that receive from those before it, an explorer for others with the last of these.
    before = sum(broadcast.nbytes[:sender]) if rank == 0 else sum(broadcast.nbytes[max(0, sender - 1) : sender])
    with limited(limit_s := grown(broadcast.sync_timeout_s, before)):
        store.wait([f"{prefix}decision"], timedelta(seconds=limit_s))
    if store.get(f"{prefix}decision") != b"go":
        raise RunError(f"the round for version {broadcast.version} was given up")
    limit_s = grown(broadcast.sync_timeout_s, min(broadcast.nbytes[sender], _AHEAD * piece_bytes))
    return enter(PrefixStore(f"{prefix}group", store), rank, size, broadcast.transport, limit_s)


# ---- programs without slots: buckets are broadcast over a group of one sender and all receivers, made for one sync


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

        limit = limit_text(self.timeout_s)
        with _blame(check, f"the {self._transport} group of the sync could not be made in {limit}"):
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
        delta_bytes = data.numel() if data.numel() < layout.nbytes else None
        self._hub.tell(BucketNotice(number, layout, digest, None, delta_bytes))
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
        self.device = group.device
        self._spoke = spoke
        self._group = group

    def take(self, bucket: BucketNotice, into: torch.Tensor) -> None:
        with _blame(self._spoke.check, f"bucket {bucket.number} of {self._spoke.sender} could not be received"):
            self._group.broadcast(into)

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
