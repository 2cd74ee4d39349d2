"""`sync=nccl`: rounds of broadcasts over fresh process groups (NCCL between GPUs, gloo between CPUs).

A round carries one version to the explorers that take part in it. Every trainer rank sends its own part: it and the
explorers form a group of their own, so no rank receives what it does not need, and neither side's default group is
touched. Any error ends the round for everybody in it within `sync.timeout_s`; the driver then repeats it without the
dead.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Bucket, Delivery, TrainerSide
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.sync.parts import part_name
from trinity_sync.sync.remote import MemberDied, resolve
from trinity_sync.sync.synchronizer import Sealed

if TYPE_CHECKING:
    import torch

_UNDER_WAY = 2
"""Buckets on their way at a time: one may be applied while the next one comes, and they are all the memory it takes."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """An invitation that all members of a round hold.

    Attributes:
        id: unique in the run.
        version: what is sent.
        slot: where the senders have it.
        host, port: the store at which the members meet, served by the driver.
        senders: parts in sender order, one per rank that holds anything.
        explorers: names in receiver order.
        transport: ``gloo`` or ``nccl``.
        timeout_s: limit of every operation, seconds.
    """

    id: int
    version: Version
    slot: int
    host: str
    port: int
    senders: list[str]
    explorers: list[str]
    transport: str
    timeout_s: float

    def prefix(self, sender: int) -> str:
        """Of the keys in the store by which one sender and the explorers meet."""
        return f"round-{self.id}/sender-{sender}/"


class NcclMode:
    """The driver's half: commits the version, then leads rounds until every living explorer has it.

    Args:
        side: see `TrainerSide`.
        transport: ``gloo`` or ``nccl``.
    """

    name = "nccl"

    def __init__(self, side: TrainerSide, transport: str) -> None:
        self._side = side
        self._transport = transport
        self._ids = itertools.count(1)
        self._sealed: Sealed | None = None
        self._store: Any = None

    def publish(self, sealed: Sealed) -> None:
        self._side.synchronizer.call("commit", sealed.version)
        self._sealed = sealed

    def deliver(self, explorers: Mapping[str, Any], version: Version) -> Delivery:
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
                self._side.synchronizer.call("drop_reader", death.who)
        return delivery

    def _lead_round(self, sealed: Sealed, explorers: Mapping[str, Any]) -> list[Any]:
        senders = sorted(sealed.parts)
        by_part = {part_name(index): handle for index, handle in enumerate(self._side.ranks.values())}
        names = dict(zip(by_part, self._side.ranks, strict=True))
        round_id, limit = next(self._ids), self._side.timeout_s
        store = self._open_store(limit)
        invitation = Round(
            id=round_id,
            version=sealed.version,
            slot=sealed.slot,
            host=store.host,
            port=store.port,
            senders=senders,
            explorers=list(explorers),
            transport=self._transport,
            timeout_s=limit,
        )
        calls = {names[part]: by_part[part].send_round.remote(invitation) for part in senders}
        calls |= {name: explorer.load.remote(sealed.version, invitation) for name, explorer in explorers.items()}
        try:
            results = resolve(calls, f"exchange version {sealed.version}", limit * 2)
        except BaseException:
            _give_up(store, invitation)
            raise
        _forget(store, invitation)
        return [results[name] for name in explorers]

    def _open_store(self, timeout_s: float) -> Any:
        """Where the members of all rounds meet. The driver serves it, as it never takes part in a round."""
        if self._store is None:
            from torch.distributed import TCPStore

            limit = timedelta(seconds=timeout_s)
            self._store = TCPStore(
                ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False, timeout=limit
            )
        return self._store


def _give_up(store: Any, invitation: Round) -> None:
    """Send home who still waits for the others, and who comes later. Who has met already finds connections closed."""
    for sender in range(len(invitation.senders)):
        store.compare_set(f"{invitation.prefix(sender)}decision", "", "over")
    _forget(store, invitation, but="decision")


def _forget(store: Any, invitation: Round, but: str | None = None) -> None:
    """Remove the keys of a round: what is not removed would grow with every version."""
    prefixes = tuple(invitation.prefix(sender) for sender in range(len(invitation.senders)))
    for key in store.list_keys():
        if key.startswith(prefixes) and key.rsplit("/", 1)[1] != but:
            store.delete_key(key)


@functools.cache
def _connect(host: str, port: int, timeout_s: float) -> Any:
    """This process's client of the store, kept: torch looks up the names of both ends for every connection, which takes
    seconds where there is no name server.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _meet(invitation: Round, sender: int) -> Any:
    """Wait until the sender and all explorers are there; the store for their group.

    Raises:
        RunError: the round was given up meanwhile.
        DistStoreError: somebody did not come in time.
    """
    from torch.distributed import PrefixStore

    store = _connect(invitation.host, invitation.port, invitation.timeout_s)
    prefix = invitation.prefix(sender)
    if store.add(f"{prefix}joined", 1) == 1 + len(invitation.explorers):
        store.compare_set(f"{prefix}decision", "", "go")
    store.wait([f"{prefix}decision"], timedelta(seconds=invitation.timeout_s))
    if store.get(f"{prefix}decision") != b"go":
        raise RunError(f"the round for version {invitation.version} was given up")
    return PrefixStore(f"{prefix}group", store)


def _group(invitation: Round, sender: int, rank: int) -> Any:
    import torch.distributed as dist

    limit = timedelta(seconds=invitation.timeout_s)
    store = _meet(invitation, sender)
    size = 1 + len(invitation.explorers)
    if invitation.transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, limit)


def _broadcast(group: Any, tensor: torch.Tensor, timeout_s: float) -> Any:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)


def send(invitation: Round, part: str, layout: Any, segment: Any) -> int:
    """A trainer rank's share of a round: broadcast its staged part bucket by bucket.

    Args:
        invitation: the round.
        part: the part that this rank staged.
        layout: its `PartLayout`.
        segment: the slot's bytes, mapped.

    Returns:
        Bytes sent.
    """
    import torch

    group = _group(invitation, invitation.senders.index(part), 0)
    staged = torch.frombuffer(segment, dtype=torch.uint8)[: layout.nbytes]
    under_way: deque[Any] = deque()
    for start, stop in layout.buckets():
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
        bucket = staged[start:stop]
        under_way.append(
            _broadcast(group, bucket.cuda() if invitation.transport == "nccl" else bucket, invitation.timeout_s)
        )
    for work in under_way:
        work.wait()
    if invitation.transport == "nccl":
        torch.cuda.synchronize()
    return layout.nbytes


class NcclTransport:
    """The explorer's half: receives the parts one sender after another, bucket by bucket, into buffers that are kept.
    While a bucket is applied the next one is on its way.

    Args:
        name: the explorer's name.
        layouts: layouts that were seen before.
    """

    def __init__(self, name: str, layouts: LayoutCache) -> None:
        self._name = name
        self._layouts = layouts
        self._rooms: list[torch.Tensor] = []

    def buckets(self, lease: Lease, ticket: Any) -> Generator[Bucket, None, None]:
        if not isinstance(ticket, Round):
            raise RunError(f"{self._name} was to load version {lease.version} without an invitation to a round")
        rank = 1 + ticket.explorers.index(self._name)
        for index, part in enumerate(ticket.senders):
            info = lease.parts[part]
            layout = self._layouts.get(info)
            group = _group(ticket, index, rank)
            # Until all has come the rooms are not ours: what is on its way when a load fails may still arrive in them.
            rooms, self._rooms = self._make_rooms(layout.bucket_bytes), []
            sizes = [stop - start for start, stop in layout.buckets()]

            def receive(
                number: int, group: Any = group, sizes: list[int] = sizes, rooms: list[torch.Tensor] = rooms
            ) -> _Receiving:
                return _Receiving(group, rooms[number % _UNDER_WAY][: sizes[number]], ticket)

            under_way = deque(receive(number) for number in range(min(_UNDER_WAY, len(sizes))))
            for number in range(len(sizes)):
                data = self._arrived(under_way.popleft())
                yield Bucket(layout, number, data.numpy(), None if info.buckets is None else info.buckets[number])
                if number + _UNDER_WAY < len(sizes):
                    under_way.append(receive(number + _UNDER_WAY))
            self._rooms = rooms

    def _arrived(self, receiving: _Receiving) -> torch.Tensor:
        return receiving.wait()

    def _make_rooms(self, nbytes: int) -> list[torch.Tensor]:
        import torch

        if not self._rooms or self._rooms[0].numel() < nbytes:
            self._rooms = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(_UNDER_WAY)]
        return self._rooms


class _Receiving:
    """One bucket on its way.

    Args:
        group: of the sender and all explorers.
        room: for the bucket's bytes, in the CPU's memory.
        ticket: the round.
    """

    def __init__(self, group: Any, room: torch.Tensor, ticket: Round) -> None:
        import torch

        self._room = room
        self._target = torch.empty_like(room, device="cuda") if ticket.transport == "nccl" else room
        self._work = _broadcast(group, self._target, ticket.timeout_s)

    def wait(self) -> torch.Tensor:
        """The bytes, once they are all there."""
        self._work.wait()
        if self._target is not self._room:
            self._room.copy_(self._target)
        return self._room
