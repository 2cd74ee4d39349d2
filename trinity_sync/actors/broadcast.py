"""What all who take part in the broadcast of a version know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinity_sync.protocol.versions import Version

if TYPE_CHECKING:
    from trinity_sync.weights.layout import Cut


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """One version, sent by the trainer's ranks to explorers.

    Attributes:
        id: unique in the run.
        version: the version that is sent.
        slot: number of the slot in which the senders have it.
        host, port: address of the store at which the members meet, served by the driver.
        senders: parts in sender order, one per rank that holds anything.
        explorers: names of the receivers, in order: an explorer's own, or those of its processes, see `receivers`.
        transport: ``gloo`` or ``nccl``.
        cut: what pieces the parts travel in: buckets where each is checked before it is used, else tensors.
        timeout_s: limit of each operation, seconds.
    """

    id: int
    version: Version
    slot: int
    host: str
    port: int
    senders: Sequence[str]
    explorers: Sequence[str]
    transport: str
    cut: Cut
    timeout_s: float

    def prefix(self, sender: int) -> str:
        """Return the prefix of the keys in the store by which one sender and the explorers meet."""
        return f"round-{self.id}/sender-{sender}/"


def receivers(explorer: str, processes: int) -> list[str]:
    """Name the processes of an explorer that receive weights: as the explorer where it is one process."""
    return [explorer] if processes == 1 else [f"{explorer}.{rank}" for rank in range(processes)]
