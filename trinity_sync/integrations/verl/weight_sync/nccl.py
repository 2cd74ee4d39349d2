"""Mode ``nccl``: buckets are broadcast over a process group of the sync: NCCL between GPUs, gloo between CPUs.

The group has the sender as its rank 0 and all receivers, and lives for one sync, so what a dead member breaks is gone
with the next one. It is none of verl's groups, and not torch's default one.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.base import Incoming, Mode, Offer, Outgoing
from trinity_sync.integrations.verl.weight_sync.link import BucketNotice, End, Hub, MemberPlace, Sender, Spoke
from trinity_sync.sync.nccl import RoundGroup, begin_broadcast, close, make_group, wait
from trinity_sync.weights.layout import PartLayout

_ROOMS = 2


class NcclTransfer(Mode):
    """A process group.

    Args:
        transport: ``nccl``, ``gloo``, or ``auto`` as there are GPUs.
        timeout_s: limit of the meeting and of each broadcast, seconds.
    """

    def __init__(self, transport: str, timeout_s: float) -> None:
        auto = "nccl" if torch.cuda.is_available() else "gloo"
        self._transport = auto if transport == "auto" else transport
        self._timeout_s = timeout_s

    def prepare(self, host: str) -> Offer:
        """Serve a store where the group meets."""
        limit = timedelta(seconds=self._timeout_s)
        try:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise RunError(f"the group of the sync cannot meet at {host}, which is this node: {error}") from error
        return _NcclOffer(store, host, self)

    def incoming(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> Incoming:
        _, port, host = str(sender.meeting).split(" ", 2)
        with _told(f"{sender.name} cannot be met at {host}:{port}", spoke.check):
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self._timeout_s))
        member = self.enter(store, str(sender.meeting), 1 + place.index, place, spoke.check)
        return _NcclIncoming(spoke, member)

    def enter(
        self, store: dist.Store, meeting: str, rank: int, place: MemberPlace, check: Callable[[], None]
    ) -> _Member:
        """Enter the group. Errors as of `Offer.outgoing`; `check` says who is gone, if that is why."""
        with _told(f"the {self._transport} group of the sync could not be made in {self._timeout_s:g} s", check):
            prefixed = dist.PrefixStore(f"{meeting.split(' ', 1)[0]}/", store)
            group = make_group(prefixed, rank, 1 + len(place.receivers), self._transport, self._timeout_s)
        return _Member(group, self._transport, self._timeout_s)


class _NcclOffer(Offer):
    def __init__(self, store: dist.TCPStore, host: str, mode: NcclTransfer) -> None:
        self._store: dist.TCPStore | None = store
        self._mode = mode
        self.meeting = f"{secrets.token_hex(8)} {store.port} {host}"

    def outgoing(self, hub: Hub, place: MemberPlace) -> Outgoing:
        assert self._store is not None, "it was not withdrawn"
        return _NcclOutgoing(hub, self._mode.enter(self._store, str(self.meeting), 0, place, hub.check))

    def withdraw(self) -> None:
        self._store = None


class _Member:
    """What both ends of a group do with it."""

    def __init__(self, group: RoundGroup, transport: str, timeout_s: float) -> None:
        self._groups = [group]
        self._transport = transport
        self._timeout_s = timeout_s
        self._has_met = False
        self.device = torch.device("cpu" if transport == "gloo" else f"cuda:{torch.cuda.current_device()}")

    def begin(self, data: torch.Tensor) -> Work:
        """Begin to broadcast. NCCL's members meet in the first one, without a limit: the wait for a thread has one."""
        begun: SimpleQueue[Work | Exception] = SimpleQueue()
        if self._has_met:
            return begin_broadcast(self._groups[0], data, self._timeout_s)
        threading.Thread(target=self._begin_first, args=(data, begun), name="meet in a group", daemon=True).start()
        try:
            work = begun.get(timeout=self._timeout_s)
        except Empty:
            raise RuntimeError(f"its members did not meet within {self._timeout_s:g} s") from None
        if isinstance(work, Exception):
            raise work
        self._has_met = True
        return work

    def _begin_first(self, data: torch.Tensor, begun: SimpleQueue[Work | Exception]) -> None:
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                begun.put(begin_broadcast(self._groups[0], data, self._timeout_s))
        except Exception as error:
            begun.put(error)

    def wait(self, work: Work, what: str, check: Callable[[], None]) -> None:
        with _told(f"{what} could not be broadcast within {self._timeout_s:g} s", check):
            wait(work, self._timeout_s, nccl=self._transport == "nccl")

    def leave(self, *, failed: bool) -> None:
        if failed and self._transport == "nccl" and self._groups:
            with contextlib.suppress(RuntimeError):
                self._groups[0].abort()
        if self._groups:
            close(self._groups, self._transport)


class _NcclOutgoing(Outgoing):
    def __init__(self, hub: Hub, member: _Member) -> None:
        self._hub = hub
        self._member = member
        self._rooms = [torch.empty(0, dtype=torch.uint8, device=self._member.device) for _ in range(_ROOMS)]
        self._under_way: dict[int, Work] = {}
        self._asked = 0

    def room(self, nbytes: int) -> torch.Tensor:
        number, at = self._asked, self._asked % _ROOMS
        self._asked += 1
        self._wait_sent(number - _ROOMS)
        if self._rooms[at].numel() < nbytes:
            self._rooms[at] = torch.empty(nbytes, dtype=torch.uint8, device=self._member.device)
        return self._rooms[at]

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        self._hub.tell(BucketNotice(number, layout, digest, None))
        with _told(f"bucket {number} could not be broadcast", self._hub.check):
            self._under_way[number] = self._member.begin(data)

    def end(self, end: End) -> None:
        for number in sorted(self._under_way):
            self._wait_sent(number)
        self._hub.tell(end)

    def _wait_sent(self, number: int) -> None:
        work = self._under_way.pop(number, None)
        if work is not None:
            self._member.wait(work, f"bucket {number}", self._hub.check)

    def close(self, *, failed: bool) -> None:
        self._under_way.clear()
        self._member.leave(failed=failed)


class _NcclIncoming(Incoming):
    def __init__(self, spoke: Spoke, member: _Member) -> None:
        self._spoke = spoke
        self._member = member

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8, device=self._member.device)
        what = f"bucket {bucket.number} of {self._spoke.sender}"
        with _told(f"{what} could not be received", self._spoke.check):
            work = self._member.begin(data)
        self._member.wait(work, what, self._spoke.check)
        return data

    def close(self, *, failed: bool) -> None:
        self._member.leave(failed=failed)


@contextlib.contextmanager
def _told(what: str, check: Callable[[], None]) -> Iterator[None]:
    """Errors of torch's in our words: that of the link, which knows who is gone, if it has one."""
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:
        check()
        raise RunError(f"{what}: {error}") from error
