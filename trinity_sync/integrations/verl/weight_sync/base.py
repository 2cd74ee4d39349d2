"""What a mode of the weight sync is: how the bytes of a bucket get from a sender to the receivers.

1. `Mode.prepare`, on senders, before anybody is told of anybody.
2. `Offer.outgoing` on senders and `Mode.incoming` on receivers, for each sender, once they are linked.
3. Per bucket `Outgoing.room`, `Outgoing.put` and, once a receiver is told, `Incoming.take`.
4. `Outgoing.end`, after the last bucket.
5. `close` of all, in whatever way it ends; where the sync has failed, with `failed`, and `Offer.withdraw`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from trinity_sync.integrations.verl.weight_sync.link import BucketNotice, End, Hub, MemberPlace, Sender, Spoke
from trinity_sync.weights.layout import PartLayout


class Outgoing(ABC):
    """A sender's half of a sync."""

    @abstractmethod
    def room(self, nbytes: int) -> torch.Tensor:
        """Give the memory of the next bucket (uint8, at least so many bytes), once it is free.

        Raises:
            RunError: there is none, or a receiver is gone.
            WaitTimeout: a receiver does not take what is in it.
        """

    @abstractmethod
    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        """Send a bucket.

        Args:
            number: counted from 0.
            layout: what lies where in it.
            data: its bytes, in the memory that `room` gave.
            digest: xxh3_128 of them (16 bytes).

        Raises:
            RunError: it cannot be sent.
            WaitTimeout: a receiver does not read.
        """

    @abstractmethod
    def end(self, end: End) -> None:
        """Tell the receivers that all was sent. Errors as of `put`."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Give back what the sync has held."""


class Incoming(ABC):
    """A receiver's half of a sync, for one sender."""

    @abstractmethod
    def take(self, bucket: BucketNotice) -> torch.Tensor:
        """Return a bucket's bytes (uint8, of the layout's length), which nobody else changes any more.

        Raises:
            RunError: they cannot be had.
        """

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Give back what the sync has held, but for what `take` returned."""


class Offer(ABC):
    """What a sender has made for a sync before anybody is linked.

    Attributes:
        meeting: what receivers have to know of it.
    """

    meeting: str | None = None

    @abstractmethod
    def outgoing(self, hub: Hub, place: MemberPlace) -> Outgoing:
        """Begin to send. Returns once all receivers can receive.

        Raises:
            RunError, WaitTimeout: they cannot.
        """

    @abstractmethod
    def withdraw(self) -> None:
        """Take it back, where nothing came of it. May be called again."""


class Mode(ABC):
    """How bytes travel. One for each engine of verl's, for all its syncs."""

    @abstractmethod
    def prepare(self, host: str) -> Offer:
        """As a sender, make what a sync needs beforehand.

        Args:
            host: this node's address.

        Raises:
            RunError, WaitTimeout: it cannot be made.
        """

    @abstractmethod
    def incoming(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> Incoming:
        """Begin to receive. Errors as of `Offer.outgoing`."""
