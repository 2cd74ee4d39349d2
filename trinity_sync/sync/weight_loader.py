"""An explorer's load of a version: lease it, have its target take it, prove it. The same for every sync mode and
engine; `LiveTensors` is the target of live tensors in this process.

With `sync.verify=bucket` every bucket is checked before its bytes are used. With ``full`` the version digest of the
written tensors is computed, row by row as the bytes are written, and compared with the trainer's. That finds an error
anywhere on the way, so buckets are not checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
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
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.shards import listed


class LiveTensors:
    """Live tensors, by Hugging Face name, that are overwritten (a `WeightTarget`)."""

    def __init__(
        self, destinations: Mapping[str, torch.Tensor], transport: Transport, layouts: LayoutCache, verify: str
    ) -> None:
        self._receiver = Receiver(destinations)
        self._transport = transport
        self._layouts = layouts
        self._checked: frozenset[str] = frozenset()
        self._verify = verify

    def check(self, lease: Lease) -> None:
        """Check names and shapes, once per set of layouts."""
        digests = frozenset(info.layout for info in lease.parts.values())
        if digests != self._checked:
            self._receiver.check([self._layouts.get(info) for info in lease.parts.values()])
            self._checked = digests

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Overwrite the tensors, from the first piece on."""
        give_up()
        moved, apply_s = self._apply(lease, broadcast)
        return LoadResult(moved, self._prove(lease) if self._verify == "full" else None, apply_s=apply_s)

    def digests(self) -> dict[str, bytes]:
        """Return the 16-byte digest of each tensor as it was written last, with ``full``."""
        return {name: digest for name, _, _, digest in self._receiver.taken()}

    def _apply(self, lease: Lease, broadcast: Broadcast | None) -> tuple[int, float]:
        moved, took = 0, 0.0
        if self._verify == "full":
            self._receiver.begin()
        with closing(self._transport.buckets(lease, broadcast, self._receiver)) as buckets:
            try:
                for layout, number, data, digest, cut, travelled, apply_s, lasts in buckets:
                    if data is None:
                        self._receiver.received(layout, number, cut)
                    else:
                        digest = digest if self._verify != "off" else None
                        self._receiver.take(layout, number, data, digest, cut, wait=not lasts)
                    start, stop = layout.pieces(cut)[number]
                    moved += stop - start if travelled is None else travelled
                    took += apply_s
            finally:
                self._receiver.settle()
        return moved, took

    def _prove(self, lease: Lease) -> str:
        digest = version_digest(self._receiver.taken())
        check_digest(lease, digest, lambda: damage(self._layouts, lease.version, self.digests()))
        return digest


_TRIES = 2
"""A load that met damaged bytes is repeated once from the source; if they are damaged again, that is an error."""


class LoadResult(NamedTuple):
    """A target's report of a version that it took."""

    moved: int  # bytes that were applied
    digest: str | None  # of the bytes that the target holds; None where `sync.verify` is not ``full``
    reread: bool = False  # the digest was computed from the leased bytes, read again
    apply_s: float = 0.0  # as of `LoadReport`

    def proves(self, lease: Lease) -> bool:
        """Return whether the digest proves the leased version, even if the lease expired meanwhile."""
        return self.digest is not None and lease.digest is not None and not self.reread


class WeightTarget(Protocol):
    """The destination of versions."""

    def check(self, lease: Lease) -> None:
        """Check names and shapes, before the first byte is applied; MismatchError: they do not fit."""
        ...

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Take a whole version.

        Args:
            give_up: to be called before the first byte of the version before is overwritten.

        Raises:
            ChecksumError: bytes are damaged, or the digest is not the one that was published.
        """
        ...


class WeightLoader:
    """Loads versions into an explorer's target.

    Attributes:
        held: the version that the target holds; None: none, or a part of one.
    """

    def __init__(self, member: RoundMember, target: WeightTarget, synchronizer: SynchronizerClient) -> None:
        self._member = member
        self._name = member.name
        self._target = target
        self._synchronizer = synchronizer
        self._paused = 0.0
        self._faults: list[str] = []
        self.held: Version | None = None

    def load(self, version: Version | None, broadcast: Broadcast | None = None) -> LoadReport:
        """Load a committed version (None: the newest)."""
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
        faults, self._faults = self._faults, []  # with those of loads that failed, which had no report
        return LoadReport(
            explorer=self._name,
            version=lease.version,
            digest=taken.digest,
            bytes_moved=taken.moved,
            total_s=ended - started,
            paused_s=ended - self._paused,
            peak_rss=peak_rss(),
            apply_s=taken.apply_s,
            fault="; ".join(faults) or None,
        )

    def note_fault(self, error: str) -> None:
        """Have the report of the current load, or of the next that succeeds, name an error that was overcome."""
        self._faults.append(error)

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
            except (ChecksumError, DeltaError) as error:
                if attempt == tries:
                    by_delta = broadcast is not None and broadcast.base is not None  # then it is sent in full as well
                    raise self._cannot(lease, error, DeltaError if by_delta else RunError) from error
                self.note_fault(f"version {lease.version} was read once more: {error}")
                lease = replace(lease, again=True)
        raise AssertionError("a load is tried at least once")

    def _give_up(self) -> None:
        if self.held is not None:
            self._paused = time.perf_counter()
        self.held = None

    def _cannot(self, lease: Lease, why: Exception, kind: type[RunError] = RunError) -> RunError:
        return kind(f"{self._name} cannot load version {lease.version}: {why}")


def lost_lease(name: str, lease: Lease) -> RunError:
    """Return the error of a lease that expired during a load."""
    return RunError(
        f"{name} lost its lease on version {lease.version} while it loaded, so other bytes may have taken the place of "
        "that version's; raise sync.lease_s, or lower sync.min_rate_mbps"
    )


def check_digest(lease: Lease, digest: str, damage: Callable[[], str]) -> None:
    """Compare the digest of the loaded bytes with the published one, if there is one; ChecksumError: they differ, with
    the text of `damage`.
    """
    if lease.digest is not None and digest != lease.digest:
        raise ChecksumError(f"it holds {digest}, the trainer published {lease.digest}; {damage()}")


def damage(layouts: LayoutCache, version: Version, held: Mapping[str, bytes]) -> str:
    """Return a text that names the tensors whose 16-byte digests in `held` are not the published ones."""
    try:
        published = layouts.tensor_digests(version)
    except RunError as error:
        return f"the damaged tensors are not known: {error}"
    names = sorted(name for name in held.keys() & published.keys() if held[name] != published[name])
    return f"damaged: {listed(names)}" if names else "the damaged tensors are not known"
