"""The process groups of a round: where its members meet, one group of each sender and the explorers, and their ends."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.sync import process_group
from trinity_sync.sync.process_group import Group, make_group

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.distributed_c10d import Work


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


def open_group(broadcast: Broadcast, sender: int, rank: int) -> Group:
    """Enter the group of a sender and all explorers, once they are there; errors as of the meeting.

    Args:
        broadcast: the round.
        sender: its place among the senders of the round.
        rank: 0 for the sender, 1 and following for the explorers.
    """
    size = 1 + len(broadcast.explorers)
    return make_group(_meet(broadcast, sender), rank, size, broadcast.transport, broadcast.timeout_s)


def wait(work: Work, broadcast: Broadcast) -> None:
    """Wait until the operation of a round has ended."""
    process_group.wait(work, broadcast.timeout_s, nccl=broadcast.transport == "nccl")
