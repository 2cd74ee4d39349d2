"""Versions that are written into the live tensors of this process.

With `sync.verify=bucket` every bucket is checked before its bytes are used. With ``full`` the version digest of what
the tensors then hold is computed, row by row as the bytes are written, and compared with the trainer's: that sees
whatever went wrong on the way, so no bucket is checked beside it, and a label can never stand on other bytes than its
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import NamedTuple, Protocol

import torch

from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import RunError
from trinity_sync.host.hardware import peak_rss
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import LayoutCache, Transport
from trinity_sync.weights.apply import ChecksumError, MismatchError, Receiver
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.shards import listed


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

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Overwrite the tensors, from the first piece on."""
        give_up()
        moved = self._apply(lease, broadcast)
        return LoadResult(moved, self._prove(lease) if self._verify == "full" else None)

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


# An explorer's load of a version: lease it, have it taken, prove it. The same for every sync mode and every engine.


# A load that met damaged bytes is repeated once from the source; damage that stays is an error.
_TRIES = 2


class LoadResult(NamedTuple):
    """What a target says of the version that it took.

    Attributes:
        moved: bytes that were applied.
        digest: the digest of what it holds, computed from that; None where `sync.verify` is not ``full``.
        reread: the digest was computed from where the lease keeps the bytes, from which they were read once more.
    """

    moved: int
    digest: str | None
    reread: bool = False

    def proves(self, lease: Lease) -> bool:
        """Whether it is the leased version even where the lease was lost meanwhile."""
        return self.digest is not None and lease.digest is not None and not self.reread


class WeightTarget(Protocol):
    """What versions are loaded into."""

    def check(self, lease: Lease) -> None:
        """Check that names and shapes fit, before the first byte is applied.

        Raises:
            MismatchError: they do not.
        """
        ...

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Take a version, whole.

        Args:
            lease: of the version; the bytes stay until this returns.
            broadcast: the broadcast in which it comes, in nccl mode.
            give_up: to be called before anything of the version before is lost.

        Raises:
            ChecksumError: bytes are damaged, or what is held now is not what was published.
            RunError: it cannot be taken.
        """
        ...


class WeightLoader:
    """Holds an explorer's version.

    Args:
        member: the explorer.
        target: what versions are loaded into.
        synchronizer: the run's synchronizer.

    Attributes:
        held: the version that the target holds; None: none, or not all of one.
    """

    def __init__(self, member: RoundMember, target: WeightTarget, synchronizer: SynchronizerClient) -> None:
        self._member = member
        self._name = member.name
        self._target = target
        self._synchronizer = synchronizer
        self._paused = 0.0
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
            self._paused = time.perf_counter()
            taken = self._take(lease, broadcast)
        finally:
            in_time = synchronizer.release(lease.id).result(synchronizer.timeout_s)
        if not (in_time or taken.proves(lease)):
            self.held = None
            raise lost_lease(self._name, lease)
        self.held = lease.version
        ended = time.perf_counter()
        return LoadReport(
            explorer=self._name,
            version=lease.version,
            digest=taken.digest,
            bytes_moved=taken.moved,
            total_s=ended - started,
            paused_s=ended - self._paused,
            peak_rss=peak_rss(),
        )

    def _check(self, lease: Lease) -> None:
        try:
            self._target.check(lease)
        except MismatchError as error:
            raise self._cannot(lease, error) from error

    def _take(self, lease: Lease, broadcast: Broadcast | None) -> LoadResult:
        tries = 1 if broadcast is not None else _TRIES
        for attempt in range(1, tries + 1):
            try:
                return self._target.take(lease, broadcast, self._give_up)
            except ChecksumError as error:
                if attempt == tries:
                    raise self._cannot(lease, error) from error
        raise AssertionError("a load is tried at least once")

    def _give_up(self) -> None:
        if self.held is not None:
            self._paused = time.perf_counter()
        self.held = None

    def _cannot(self, lease: Lease, why: Exception) -> RunError:
        return RunError(f"{self._name} cannot load version {lease.version}: {why}")


def lost_lease(name: str, lease: Lease) -> RunError:
    """What is wrong where an explorer of this name holds what may not be the leased version."""
    return RunError(
        f"{name} lost its lease on version {lease.version} while it loaded, so other bytes may have taken the place of "
        "that version's; raise sync.lease_s"
    )


def check_digest(lease: Lease, digest: str, damage: Callable[[], str]) -> None:
    """Compare the digest of what is held with the one that was published, where one was.

    Args:
        lease: of the version.
        digest: of what is held.
        damage: says which tensors differ; asked only where some do.

    Raises:
        ChecksumError: they differ.
    """
    if lease.digest is not None and digest != lease.digest:
        raise ChecksumError(f"it holds {digest}, the trainer published {lease.digest}; {damage()}")


def damage(layouts: LayoutCache, version: Version, held: Mapping[str, bytes]) -> str:
    """Say which tensors are not those that were published.

    Args:
        layouts: asks who staged them.
        version: the version.
        held: 16-byte digests of the tensors that are held, by name.
    """
    try:
        published = layouts.tensor_digests(version)
    except RunError as error:
        return f"of which tensors is not known, as {error}"
    names = sorted(name for name in held.keys() & published.keys() if held[name] != published[name])
    return f"damaged: {listed(names)}" if names else "which tensors differ is not known"
