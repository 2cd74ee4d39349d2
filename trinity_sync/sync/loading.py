"""An explorer's load of a version: lease, check, apply, prove. The same for every sync mode.

From the first applied byte to the last check the explorer holds no version. With `sync.verify=bucket` every bucket is
checked before its bytes are used. With ``full`` the explorer computes the version digest of what it then holds, row by
row as the bytes are written, and compares it with the trainer's: that sees whatever went wrong on the way, so no bucket
is checked beside it, and a label can never stand on other bytes than its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing

import torch

from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.actors.explorer import LoadReport
from trinity_sync.actors.synchronizer import SynchronizerClient
from trinity_sync.errors import RunError
from trinity_sync.host.memory import peak_rss
from trinity_sync.protocol.members import Member
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Transport
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.weights.apply import ChecksumError, MismatchError, Receiver
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.shards import listed

# A load that met damaged bytes is repeated once from the source; damage that stays is an error.
_TRIES = 2


class WeightLoader:
    """Holds the explorer's version and the tensors that it names.

    Args:
        member: the explorer.
        destinations: Hugging Face name -> live parameter, overwritten in place.
        synchronizer: the run's synchronizer.
        transport: the sync mode's explorer half.
        layouts: layouts that were seen before.
        verify: ``full``, ``bucket`` or ``off``.
    """

    def __init__(
        self,
        member: Member,
        destinations: Mapping[str, torch.Tensor],
        synchronizer: SynchronizerClient,
        transport: Transport,
        layouts: LayoutCache,
        verify: str,
    ) -> None:
        self._member = member
        self._name = member.name
        self._receiver = Receiver(destinations)
        self._synchronizer = synchronizer
        self._transport = transport
        self._layouts = layouts
        self._checked: frozenset[str] = frozenset()
        self._verify = verify
        self.held: Version | None = None

    def load(self, version: Version | None, broadcast: Broadcast | None = None) -> LoadReport:
        """Take a committed version (the newest for None).

        Raises:
            RunError: it is gone, its bytes are damaged or were replaced meanwhile, or what was loaded is not what the
                trainer published.
        """
        started = time.perf_counter()
        synchronizer = self._synchronizer
        lease = synchronizer.lease(self._member, version).result(synchronizer.timeout_s)
        try:
            self._check(lease)
            paused = time.perf_counter()
            moved, digest = self._take(lease, broadcast)
        finally:
            in_time = synchronizer.release(lease.id).result(synchronizer.timeout_s)
        if not in_time and (digest is None or lease.digest is None):
            raise RunError(
                f"{self._name} lost its lease on version {lease.version} while it loaded, so other bytes may have "
                f"taken the place of that version's; raise sync.lease_s"
            )
        self.held = lease.version
        ended = time.perf_counter()
        return LoadReport(
            explorer=self._name,
            version=lease.version,
            digest=digest,
            bytes_moved=moved,
            total_s=ended - started,
            paused_s=ended - paused,
            peak_rss=peak_rss(),
        )

    def _take(self, lease: Lease, broadcast: Broadcast | None) -> tuple[int, str | None]:
        self.held = None
        tries = 1 if broadcast is not None else _TRIES
        for attempt in range(1, tries + 1):
            try:
                moved = self._apply(lease, broadcast)
                digest = self._prove(lease) if self._verify == "full" else None
                break
            except ChecksumError as error:
                if attempt == tries:
                    raise RunError(f"{self._name} cannot load version {lease.version}: {error}") from error
        return moved, digest

    def _check(self, lease: Lease) -> None:
        """Check that names and shapes fit, before the first byte is applied. Done once per set of layouts."""
        digests = frozenset(info.layout for info in lease.parts.values())
        if digests == self._checked:
            return
        try:
            self._receiver.check([self._layouts.get(info) for info in lease.parts.values()])
        except MismatchError as error:
            raise RunError(f"{self._name} cannot load version {lease.version}: {error}") from error
        self._checked = digests

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
        taken = self._receiver.taken()
        digest = version_digest(taken)
        if lease.digest is not None and digest != lease.digest:
            raise ChecksumError(
                f"it holds {digest}, the trainer published {lease.digest}; {self._damage(lease, taken)}"
            )
        return digest

    def _damage(self, lease: Lease, taken: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
        try:
            published = self._layouts.tensor_digests(lease.version)
        except RunError as error:
            return f"of which tensors is not known, as {error}"
        held = {name: digest for name, _, _, digest in taken}
        names = sorted(name for name in held.keys() & published.keys() if held[name] != published[name])
        return f"damaged: {listed(names)}" if names else "which tensors differ is not known"
