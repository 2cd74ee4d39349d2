"""Client of the synchronizer, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.actors.calls import Call, T
from trinity_sync.actors.client import RayClient
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Lease, Version, VersionPlace
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef
    from ray.actor import ActorHandle


SYNCHRONIZER = "synchronizer"
"""Name of the actor in a run's Ray namespace."""


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """A state dict in the object store. Where each tensor lies follows from this: see `weights.packing`.

    Attributes:
        tensors: of what they are made, in order.
        bucket_bytes: length of a bucket.
        digests: of each bucket, xxh3_128.
        buckets: references to the bytes of each; Ray does not fetch them for who holds this. Two state dicts are equal
            where their bytes are, wherever these lie.
    """

    tensors: list[Described]
    bucket_bytes: int
    digests: list[bytes]
    buckets: list[ObjectRef[np.ndarray]] = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A version whose bytes are all in the slots: what publishing it needs.

    Attributes:
        version: the version that is sealed.
        slot: number of the slot that holds it in every node's arena.
        digest: the version's digest, or None where `sync.verify` is not ``full``.
        parts: part name -> what readers need to know of it.
    """

    version: Version
    slot: int
    digest: str | None
    parts: dict[str, PartInfo]

    @property
    def blocked_s(self) -> float:
        """Seconds in which the trainer stood still for it."""
        return max((info.blocked_s for info in self.parts.values()), default=0.0)

    @property
    def digest_s(self) -> float:
        """Seconds that its digests took, of the slowest node."""
        return max((info.digest_s for info in self.parts.values()), default=0.0)


class SynchronizerMemory(TypedDict):
    """Peak resident bytes of the synchronizer's process, its pid, and whether torch was loaded into it."""

    peak_rss: int
    pid: int
    torch: bool


class SynchronizerClient(RayClient):
    """See `trinity_sync.sync.synchronizer.SynchronizerActor`, of which each method here has one. Programs use
    `trinity_sync.sync.Synchronizer`, which has the calls that are theirs alone.

    Args:
        handle: Ray's handle of the synchronizer.
        timeout_s: limit of the waits that have none of their own (`sync.timeout_s`), seconds.
    """

    def __init__(self, handle: ActorHandle, timeout_s: float) -> None:
        super().__init__(handle, "the synchronizer")
        self.timeout_s = timeout_s

    # -- trainer's side

    def begin(self, version: Version, parts: Sequence[str], timeout_s: float) -> Call[int]:
        """Ask for a slot for the version; answered when one is free."""
        return self._ask("begin", version, list(parts), timeout_s)

    def begin_if_free(self, version: Version, parts: Sequence[str]) -> Call[int | None]:
        """Ask for a slot for the version; the answer is None where none is free now."""
        return self._ask("begin_if_free", version, list(parts))

    def staged(self, version: Version, parts: Mapping[str, PartInfo]) -> Call[None]:
        """Say that parts of a node are in its slot."""
        return self._ask("staged", version, dict(parts))

    def digested(self, version: Version, digest: str | None) -> Call[None]:
        """Say that the digest of the whole version is known (None: not asked for)."""
        return self._ask("digested", version, digest)

    def failed(self, version: Version, error: str) -> Call[None]:
        """Say that a part of the version cannot be had; whoever waits for it is told."""
        return self._ask("failed", version, error)

    def wait_sealed(self, version: Version, timeout_s: float) -> Call[Sealed]:
        """Wait until all ranks have staged the version."""
        return self._ask("wait_sealed", version, timeout_s)

    def commit(self, version: Version, location: str | None = None) -> Call[None]:
        """Say that the version is available, in a folder where the sync mode writes one."""
        return self._ask("commit", version, location)

    def discard(self, version: Version) -> Call[None]:
        """Give back the slot of a version that was staged for a checkpoint only."""
        return self._ask("discard", version)

    # -- watching agents and ranks

    def lifeline(self) -> Call[None]:
        """Make a call that is never answered; see `watch`."""
        return self._ask("lifeline")

    def watch(self, member: RoundMember, owned: Sequence[ObjectRef[None]]) -> None:
        """Have the death of a node agent or a rank noticed: `owned` holds the reference to its call of `hold`."""
        self._tell("watch", member, list(owned))

    # -- explorers' side

    def lease(self, reader: Hashable, version: Version | None = None) -> Call[Lease]:
        """Hold a committed version, the newest unless named."""
        return self._ask("lease", reader, version)

    def holds(self, lease_id: int) -> Call[bool]:
        """Ask whether a lease lasts still."""
        return self._ask("holds", lease_id)

    def release(self, lease_id: int) -> Call[bool]:
        """Say that the reader is done; the answer is whether it still held its lease."""
        return self._ask("release", lease_id)

    def drop_reader(self, reader: Hashable) -> Call[None]:
        """Say that the reader is gone; its leases end."""
        return self._ask("drop_reader", reader)

    def wait_newer(self, version: Version | None, timeout_s: float) -> Call[Version | None]:
        """Wait for a version newer than this one; the answer is the newest, or None where none will come."""
        return self._ask("wait_newer", version, timeout_s)

    def newest(self) -> Call[Version | None]:
        """Ask for the newest committed version."""
        return self._ask("newest")

    # -- status

    def set_trainer_status(self, status: str) -> Call[None]:
        """Say what the trainer is doing, one of `sync.synchronizer.STATUSES`."""
        return self._ask("set_trainer_status", status)

    def memory(self) -> Call[SynchronizerMemory]:
        """Ask for the peak resident bytes of its process, and whether torch was loaded into it (it must not be)."""
        return self._ask("memory")

    # -- whole state dicts

    def follow(self, version: Version, location: str) -> Call[None]:
        """Tell of a commit of the checkpoint monitor."""
        return self._ask("follow", version, location)

    def find(self) -> Call[VersionPlace | None]:
        """Ask for the newest version and where it is, with the `StoredState` of a state dict; None before the first."""
        return self._ask("find")

    def state_lost(self, version: Version) -> Call[VersionPlace | None]:
        """Say that the tensors of a version cannot be had; the answer is what serves in its place."""
        return self._ask("state_lost", version)

    # -- whom it serves

    def attach(self, member: RoundMember, owned: Sequence[ObjectRef[None]]) -> Call[None]:
        """Have the end of a process noticed, as `watch`; when the last one that attached is gone, so is the actor."""
        return self._ask("attach", member, list(owned))

    def _ask(self, method: str, *args: object, **kwargs: object) -> Call[T]:
        return self._call(f"answer {method}", method, *args, **kwargs)
