"""Versions that are written into the live tensors of this process.

With `sync.verify=bucket` every bucket is checked before its bytes are used. With ``full`` the version digest of what
the tensors then hold is computed, row by row as the bytes are written, and compared with the trainer's: that sees
whatever went wrong on the way, so no bucket is checked beside it, and a label can never stand on other bytes than its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

import torch

from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.protocol.versions import Lease
from trinity_sync.sync.base import Transport
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.sync.loading import Taken, check_digest, damage
from trinity_sync.weights.apply import Receiver
from trinity_sync.weights.digests import version_digest


class InPlace:
    """Tensors that are overwritten (a `WeightTarget`).

    Args:
        destinations: Hugging Face name -> live tensor.
        transport: the sync mode's explorer half.
        layouts: layouts that were seen before.
        verify: ``full``, ``bucket`` or ``off``.
    """

    def __init__(
        self, destinations: Mapping[str, torch.Tensor], transport: Transport, layouts: LayoutCache, verify: str
    ) -> None:
        self._receiver = Receiver(destinations)
        self._transport = transport
        self._layouts = layouts
        self._checked: frozenset[str] = frozenset()
        self._verify = verify

    def check(self, lease: Lease) -> None:
        """Check that names and shapes fit. Done once per set of layouts."""
        digests = frozenset(info.layout for info in lease.parts.values())
        if digests != self._checked:
            self._receiver.check([self._layouts.get(info) for info in lease.parts.values()])
            self._checked = digests

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> Taken:
        """Overwrite the tensors, from the first piece on."""
        give_up()
        moved = self._apply(lease, broadcast)
        return Taken(moved, self._prove(lease) if self._verify == "full" else None)

    def digests(self) -> dict[str, bytes]:
        """The 16-byte digest of each tensor as it was written last, with ``full``."""
        return {name: digest for name, _, _, digest in self._receiver.taken()}

    def _apply(self, lease: Lease, broadcast: Broadcast | None) -> int:
        moved = 0
        if self._verify == "full":
            self._receiver.begin()
        with closing(self._transport.buckets(lease, broadcast, self._receiver.destination)) as buckets:
            for layout, number, data, digest, cut in buckets:
                if data is None:
                    self._receiver.received(layout, number, cut)
                else:
                    self._receiver.take(layout, number, data, digest if self._verify != "off" else None, cut)
                start, stop = layout.pieces(cut)[number]
                moved += stop - start
        return moved

    def _prove(self, lease: Lease) -> str:
        """Compute the digest of what is held now.

        Raises:
            ChecksumError: it is not the one that was published.
        """
        digest = version_digest(self._receiver.taken())
        check_digest(lease, digest, lambda: damage(self._layouts, lease.version, self.digests()))
        return digest
