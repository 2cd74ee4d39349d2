"""Client of the synchronizer, and the types of its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.actors.client import MethodNames, RayClient, RemoteMethod
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from trinity_sync.sync.synchronizer import SynchronizerActor
else:
    SynchronizerActor = MethodNames()


SYNCHRONIZER = "synchronizer"
"""Name of the actor in a run's Ray namespace."""


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """A state dict in Ray's object store, packed as in `weights.packing`. Equal if the bytes are equal."""

    tensors: list[Described]  # in the order of the bytes
    bucket_bytes: int
    digests: list[bytes]  # of each bucket, xxh3_128
    buckets: list[ObjectRef[np.ndarray]] = field(compare=False)  # in a list, so Ray does not fetch the bytes


@dataclass(frozen=True, kw_only=True)
class SealedVersion:
    """A version whose bytes are all in the slots, ready to be published."""

    version: Version
    slot: int  # its number in every node's arena
    digest: str | None  # None unless `sync.verify` is full
    parts: dict[str, PartInfo]  # by name

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(info.nbytes for info in self.parts.values())

    @property
    def blocked_s(self) -> float:
        """Seconds for which the trainer was blocked."""
        return max((info.blocked_s for info in self.parts.values()), default=0.0)

    @property
    def digest_s(self) -> float:
        """Seconds for the digests on the slowest node."""
        return max((info.digest_s for info in self.parts.values()), default=0.0)


class SynchronizerMemory(TypedDict):
    """Peak resident bytes of the synchronizer's process, its pid, and whether torch was loaded into it."""

    peak_rss: int
    pid: int
    torch: bool


class SynchronizerClient(RayClient):
    """Client of the synchronizer. Programs use `trinity_sync.sync.Synchronizer`.

    Args:
        handle: Ray's handle of the synchronizer.
        timeout_s: limit of the waits that have none of their own (`sync.timeout_s`), seconds; a `WaitLimit` where the
            waits for bytes of its users grow.
    """

    def __init__(self, handle: ActorHandle, timeout_s: float) -> None:
        super().__init__(handle, "the synchronizer")
        self.timeout_s = timeout_s

    begin = RemoteMethod(SynchronizerActor.begin)
    begin_if_free = RemoteMethod(SynchronizerActor.begin_if_free)
    staged = RemoteMethod(SynchronizerActor.staged)
    digested = RemoteMethod(SynchronizerActor.digested)
    failed = RemoteMethod(SynchronizerActor.failed)
    wait_sealed = RemoteMethod(SynchronizerActor.wait_sealed)
    commit = RemoteMethod(SynchronizerActor.commit)
    discard = RemoteMethod(SynchronizerActor.discard)

    lifeline = RemoteMethod(SynchronizerActor.lifeline)
    watch = RemoteMethod(SynchronizerActor.watch)
    attach = RemoteMethod(SynchronizerActor.attach)

    lease = RemoteMethod(SynchronizerActor.lease)
    holds = RemoteMethod(SynchronizerActor.holds)
    release = RemoteMethod(SynchronizerActor.release)
    drop_reader = RemoteMethod(SynchronizerActor.drop_reader)
    wait_newer = RemoteMethod(SynchronizerActor.wait_newer)
    newest = RemoteMethod(SynchronizerActor.newest)

    set_trainer_status = RemoteMethod(SynchronizerActor.set_trainer_status)
    memory = RemoteMethod(SynchronizerActor.memory)

    follow = RemoteMethod(SynchronizerActor.follow)
    find = RemoteMethod(SynchronizerActor.find)
    state_lost = RemoteMethod(SynchronizerActor.state_lost)
    set_model_state_dict = RemoteMethod(SynchronizerActor.set_model_state_dict)
    open_group = RemoteMethod(SynchronizerActor.open_group)
    join_group = RemoteMethod(SynchronizerActor.join_group)
    ready = RemoteMethod(SynchronizerActor.ready)
    sent = RemoteMethod(SynchronizerActor.sent)
    wait_new_model_state_dict = RemoteMethod(SynchronizerActor.wait_new_model_state_dict)
    set_explorer_status = RemoteMethod(SynchronizerActor.set_explorer_status)
