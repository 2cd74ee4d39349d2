"""The synchronizer's actor, through which explorers get the trainer's versions: named, one per run, over the pure
`VersionBook`. Programs call it by `synchronizer_handle.Synchronizer`.

It handles names, versions, digests and places, never tensor bytes. The calls for one version:

1. The trainer's driver `begin`s the version and gets a slot (it waits for one up to a timeout).
2. The node agents report `staged` (which parts, where, bucket digests); the lead agent reports `digested`.
3. The driver awaits `wait_sealed`, makes the bytes available in its sync mode, and `commit`s.
4. Explorers `lease` the version, load it, and `release` the lease.

Waiting calls return as soon as the state changes; nothing is polled. Programs without slots hand over whole state dicts
or broadcast them: see `handover`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from trinity_sync.actors.calls import DeathError
from trinity_sync.actors.pending import failures_logged
from trinity_sync.actors.synchronizer_client import SYNCHRONIZER, SealedVersion, SynchronizerMemory
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.hardware import peak_memory
from trinity_sync.host.logs import own_log, story
from trinity_sync.host.process import small_actor
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.statuses import REQUIRES_SYNC, STOPPED, known_status
from trinity_sync.protocol.versions import Lease, State, Version, VersionBook, VersionError
from trinity_sync.sync.handover import Handover
from trinity_sync.sync.settings import SynchronizerConfig

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

ACTOR_NAME = SYNCHRONIZER


class SynchronizerActor(Handover):
    """The actor's body. Methods are coroutines on one event loop, so the state machine needs no lock. Leases expire by
    `clock` (monotonic seconds).
    """

    def __init__(self, config: SynchronizerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        own_log(config.log_dir, "synchronizer")
        super().__init__(VersionBook(config.slots, clock), config)
        self._wakes = 0
        # Agents and ranks that have died and were not started again, by name.
        self._dead: dict[str, RoundMember] = {}

    # -- trainer's side

    async def begin(self, version: Version, parts: list[str], timeout_s: float) -> int:
        """Return a slot for the version; wait while every slot is leased or not yet committed."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_members(f"take version {version}")
            slot = self._book.open(version, parts)
            if slot is not None:
                return _opened(version, slot)
            # An expired lease frees a slot without a call, so wake up for that too.
            changed = await self._changes.next(min(deadline - time.monotonic(), 1.0))
            if not changed and time.monotonic() >= deadline:
                raise WaitTimeout(
                    "the readers of older versions",
                    f"free one of {self._config.slots} slots for version {version}",
                    timeout_s,
                )

    async def begin_if_free(self, version: Version, parts: list[str]) -> int | None:
        """Return a slot for the version; None: none is free now."""
        self._check_members(f"take version {version}")
        slot = self._book.open(version, parts)
        return slot if slot is None else _opened(version, slot)

    async def staged(self, version: Version, parts: dict[str, PartInfo]) -> None:
        """Record that parts of a node are in its slot."""
        self._book.stage(version, parts)
        self._changes.announce()

    async def digested(self, version: Version, digest: str | None) -> None:
        """Record the digest of the whole version (None: not computed)."""
        self._book.digest(version, digest)
        self._changes.announce()

    async def failed(self, version: Version, error: str) -> None:
        """Record that a part of the version failed, which ends all waits for the version."""
        story.error("version %s failed: %s", version, error)
        self._book.fail(version, error)
        self._changes.announce()

    async def wait_sealed(self, version: Version, timeout_s: float) -> SealedVersion:
        """Wait until all ranks have staged the version; return its description for the publisher."""

        def ready() -> bool:
            return bool(self._dead) or self._book.state(version) is not State.OPENED

        await self._changes.wait(ready, lambda: ("the node agents", f"seal version {version}"), timeout_s)
        if self._book.state(version) is State.OPENED:
            self._check_members(f"seal version {version}")
        if self._book.state(version) is State.FAILED:
            raise RunError(f"version {version} could not be staged: {self._book.error(version)}")
        slot, parts, digest = self._book.sealed_info(version)
        return SealedVersion(version=version, slot=slot, digest=digest, parts=parts)

    async def commit(self, version: Version, location: str | None = None) -> None:
        """Make the version the newest one, and wake the explorers that wait for it."""
        self._book.commit(version, location)
        story.info("version %s is the newest%s", version, f", in {location}" if location else "")
        self._changes.announce()

    async def discard(self, version: Version) -> None:
        """Free the slot of a version that was staged for a checkpoint only."""
        self._book.discard(version)
        story.info("version %s was for a checkpoint only; its slot is free", version)
        self._changes.announce()

    # -- watching agents and ranks

    async def lifeline(self) -> None:
        """Never return. Its result belongs to the caller, whose death makes it fail; see `watch`."""
        await asyncio.Event().wait()

    async def watch(self, member: RoundMember, owned: list[ObjectRef[None]]) -> None:
        """Notice the death of a node agent or a rank: `owned` has the reference of its `lifeline` call, which then
        fails. A process that was started again replaces the one before.
        """
        if not self._roll.present(member):
            return
        self._dead.pop(member.name, None)
        try:
            await owned[0]
        except RayError:
            if self._roll.gone(member):
                self._dead[member.name] = member
                story.error("%s has died", member)
                self._changes.announce()

    def _check_members(self, what: str) -> None:
        for member in self._dead.values():
            raise DeathError(str(member), what)

    # -- explorers' side

    async def lease(self, reader: Hashable, version: Version | None = None) -> Lease:
        """Lease a committed version (the newest unless named), together with its parts."""
        try:
            lease = self._book.lease(reader, self._config.lease_of(self._book.nbytes(version)), version)
        except VersionError as error:
            raise RunError(f"{reader} cannot load: {error}") from None
        story.info("%s reads version %s from slot %s", reader, lease.version, lease.slot)
        return lease

    async def holds(self, lease_id: int) -> bool:
        """Return whether a lease has not ended."""
        return self._book.holds(lease_id)

    async def release(self, lease_id: int) -> bool:
        """End a lease. False: it had expired, so the slot may hold another version now."""
        in_time = self._book.release(lease_id)
        self._changes.announce()
        return in_time

    async def drop_reader(self, reader: Hashable) -> None:
        """End the leases of a reader that died; its earlier calls that are still under way get none."""
        self._book.drop_reader(reader)
        story.warning("%s has ended; its leases are released", reader)
        self._changes.announce()

    async def wait_newer(self, version: Version | None, timeout_s: float) -> Version | None:
        """Wait for a version newer than `version`; return the newest. None: the trainer has stopped, or called
        `notify_no_new_model_state_dict`.
        """
        wakes = self._wakes

        def newer() -> Version | None:
            newest = self._book.newest
            return newest if newest is not None and (version is None or newest > version) else None

        await self._changes.wait(
            lambda: self._statuses.trainer_stopped or self._wakes != wakes or newer() is not None,
            lambda: ("the trainer", f"publish a version after {version}"),
            timeout_s,
        )
        return newer()

    async def wait_new_model_state_dict(self, explorer: RoundMember, current_version: int) -> int:
        """Wait for a step past `current_version`; see `Synchronizer.wait_new_model_state_dict`."""
        newest = self._book.newest
        if newest is None and current_version < 0:
            return 0
        if newest is not None and newest.step < current_version:
            raise RunError(
                f"{explorer} has version {current_version}, and the newest is {newest}: the trainer has gone back, so "
                "start the explorer again"
            )
        held = Version(newest.attempt if newest else 0, current_version)
        with self._statuses.requiring_sync(explorer):
            self._changes.announce()
            found = await self.wait_newer(held, self._config.timeout_s)
        return current_version if found is None else found.step

    async def get_latest_model_version(self) -> int:
        """Return the step of the newest version, -1 before the first."""
        return -1 if self._book.newest is None else self._book.newest.step

    async def newest(self) -> Version | None:
        """Return the newest committed version."""
        return self._book.newest

    # -- status

    async def set_trainer_status(self, status: object) -> None:
        """Record the trainer's status; see `Synchronizer.set_trainer_status`."""
        if known_status(status) == STOPPED:
            await self._follow_last()
        self._statuses.set_trainer(status)
        self._changes.announce()

    async def get_trainer_status(self) -> str:
        """Return the trainer's last status."""
        return self._statuses.trainer

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Return whether the trainer waits for a broadcast; None: it has stopped."""
        return self._statuses.trainer_requires_sync()

    async def set_explorer_status(self, member: RoundMember, status: str, old_status: str | None = None) -> None:
        """Record that one explorer of a process changes from `old_status` (None: it is new) to `status`."""
        if not self._roll.present(member):
            raise RunError(f"{member} is dead, so no explorer of it is {status}")
        self._statuses.set_explorer(member, status, old_status)
        self._changes.announce()

    async def get_explorer_status_counts(self) -> dict[str, int]:
        """Count the explorers of living processes per status."""
        return self._statuses.counts()

    async def explorer_requires_sync(self) -> bool:
        """Return whether an explorer waits for a version or a broadcast."""
        return self._statuses.counts()[REQUIRES_SYNC] > 0

    async def notify_no_new_model_state_dict(self) -> None:
        """End the waits for a version that are under way: none comes now."""
        self._wakes += 1
        self._changes.announce()

    async def settings(self) -> SynchronizerConfig:
        """Return the actor's settings, for clients that join by name."""
        return self._config

    async def memory(self) -> SynchronizerMemory:
        """Return the peak resident bytes of this process, and whether it has loaded torch (it must not)."""
        return {"peak_rss": peak_memory(), "pid": os.getpid(), "torch": "torch" in sys.modules}


def _opened(version: Version, slot: int) -> int:
    story.info("version %s gets slot %d", version, slot)
    return slot


def create(settings: SynchronizerConfig) -> ActorHandle:
    """Create the actor, or return the one that another process has created meanwhile."""
    return (
        ray.remote(failures_logged(small_actor(SynchronizerActor, settings)))
        .options(
            name=ACTOR_NAME,
            namespace=settings.namespace,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=10_000,
            **({"lifetime": "detached"} if settings.detached else {}),
        )
        .remote()
    )
