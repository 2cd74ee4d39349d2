"""The `Synchronizer`: where trainer and explorers meet. A named Ray actor, one per run, over the pure `VersionBook`.

Control plane only: names, versions, digests and where things are, never tensor bytes. Who calls what, for one version:

1. The trainer's driver `begin`s the version and gets a slot (waits for one up to a timeout).
2. The node agents report `staged` (which parts, where, bucket digests); the lead agent reports `digested`.
3. The driver awaits `wait_sealed`, makes the bytes available in its sync mode, and `commit`s.
4. Explorers `lease` the version, load it, and `release` the lease.

Waiting calls return as soon as the state changes; nothing is polled. Programs that have no slots hand over whole state
dicts, or broadcast them and meet here for that: see `handover`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from trinity_sync.actors.calls import Call, MemberDied
from trinity_sync.actors.handles import asked, forwarded
from trinity_sync.actors.pending import failures_logged
from trinity_sync.actors.synchronizer_client import SYNCHRONIZER, Sealed, SynchronizerClient, SynchronizerMemory
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.hardware import peak_memory
from trinity_sync.host.logs import own_log, story
from trinity_sync.host.process import small_actor
from trinity_sync.protocol.choices import plain
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.statuses import REQUIRES_SYNC, STATUSES, STOPPED, known_status
from trinity_sync.protocol.versions import Lease, State, Version, VersionBook, VersionError
from trinity_sync.sync.handover import Handover, HandoverClient
from trinity_sync.sync.settings import SynchronizerConfig, check_limit, synchronizer_config

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

__all__ = ["ACTOR_NAME", "STATUSES", "Synchronizer", "SynchronizerActor", "SynchronizerConfig"]

ACTOR_NAME = SYNCHRONIZER


class SynchronizerActor(Handover):
    """The actor's body. Methods are coroutines on one event loop, so the state machine needs no lock.

    Args:
        config: see `SynchronizerConfig`.
        clock: seconds, monotonic; leases expire by it.
    """

    def __init__(self, config: SynchronizerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        own_log(config.log_dir, "synchronizer")
        super().__init__(VersionBook(config.slots, clock), config)
        self._wakes = 0
        # Agents and ranks that are dead, by name, and not yet followed by another process of that name.
        self._dead: dict[str, RoundMember] = {}

    # -- trainer's side

    async def begin(self, version: Version, parts: list[str], timeout_s: float) -> int:
        """Return a slot for the version; wait while every slot is read or still on its way."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_members(f"take version {version}")
            slot = self._book.open(version, parts)
            if slot is not None:
                return _opened(version, slot)
            # An expired lease frees a slot without anybody calling, so wake up for that too.
            changed = await self._changes.next(min(deadline - time.monotonic(), 1.0))
            if not changed and time.monotonic() >= deadline:
                raise WaitTimeout(
                    "the readers of older versions",
                    f"free one of {self._config.slots} slots for version {version}",
                    timeout_s,
                )

    async def begin_if_free(self, version: Version, parts: list[str]) -> int | None:
        """Return a slot for the version, None where none is free now. Does not wait."""
        self._check_members(f"take version {version}")
        slot = self._book.open(version, parts)
        return slot if slot is None else _opened(version, slot)

    async def staged(self, version: Version, parts: dict[str, PartInfo]) -> None:
        """Take note that parts of a node are in its slot."""
        self._book.stage(version, parts)
        self._changes.announce()

    async def digested(self, version: Version, digest: str | None) -> None:
        """Take note of the digest of the whole version (None: not asked for)."""
        self._book.digest(version, digest)
        self._changes.announce()

    async def failed(self, version: Version, error: str) -> None:
        """Take note that a part of the version cannot be had; whoever waits for it is told."""
        story.error("version %s failed: %s", version, error)
        self._book.fail(version, error)
        self._changes.announce()

    async def wait_sealed(self, version: Version, timeout_s: float) -> Sealed:
        """Wait until all ranks have staged the version; return what publishing it needs."""

        def ready() -> bool:
            return bool(self._dead) or self._book.state(version) is not State.OPENED

        await self._changes.wait(ready, lambda: ("the node agents", f"seal version {version}"), timeout_s)
        if self._book.state(version) is State.OPENED:
            self._check_members(f"seal version {version}")
        if self._book.state(version) is State.FAILED:
            raise RunError(f"version {version} could not be staged: {self._book.error(version)}")
        slot, parts, digest = self._book.sealed_info(version)
        return Sealed(version=version, slot=slot, digest=digest, parts=parts)

    async def commit(self, version: Version, location: str | None = None) -> None:
        """Make the version the newest one; explorers that wait for one are woken."""
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
        """Never returns. What it would return belongs to the caller; see `watch`."""
        await asyncio.Event().wait()

    async def watch(self, member: RoundMember, owned: list[ObjectRef[None]]) -> None:
        """Notice the death of a node agent or a rank: `owned` holds the reference to its `hold` call, which fails with
        its owner. One that is started again takes the place of the one before, whatever is heard of that.
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
            raise MemberDied(str(member), what)

    # -- explorers' side

    async def lease(self, reader: Hashable, version: Version | None = None) -> Lease:
        """Hold a committed version (the newest unless named); version and parts come together."""
        try:
            lease = self._book.lease(reader, self._config.lease_s, version)
        except VersionError as error:
            raise RunError(f"{reader} cannot load: {error}") from None
        story.info("%s reads version %s from slot %s", reader, lease.version, lease.slot)
        return lease

    async def holds(self, lease_id: int) -> bool:
        """Whether a lease lasts still."""
        return self._book.holds(lease_id)

    async def release(self, lease_id: int) -> bool:
        """End a lease. False: it had ended before, so the slot may hold another version by now."""
        in_time = self._book.release(lease_id)
        self._changes.announce()
        return in_time

    async def drop_reader(self, reader: Hashable) -> None:
        """End the leases of a reader that is gone; what it asked for before comes too late."""
        self._book.drop_reader(reader)
        story.warning("%s is gone, its leases end", reader)
        self._changes.announce()

    async def wait_newer(self, version: Version | None, timeout_s: float) -> Version | None:
        """Wait for a version newer than `version`; return the newest. None: none will come, as the trainer has stopped,
        or none comes now, as `notify_no_new_model_state_dict` has it.
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
        """Take note of what the trainer is doing; see `Synchronizer.set_trainer_status`."""
        if known_status(status) == STOPPED:
            await self._follow_last()
        self._statuses.set_trainer(status)
        self._changes.announce()

    async def get_trainer_status(self) -> str:
        """Return what the trainer said last."""
        return self._statuses.trainer

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Return whether the trainer waits for a broadcast; None: it has stopped."""
        return self._statuses.trainer_requires_sync()

    async def set_explorer_status(self, member: RoundMember, status: str, old_status: str | None = None) -> None:
        """Take note that one explorer of a process goes from `old_status` (None: it is new) to `status`."""
        if not self._roll.present(member):
            raise RunError(f"{member} is dead, so no explorer of it is {status}")
        self._statuses.set_explorer(member, status, old_status)
        self._changes.announce()

    async def get_explorer_status_counts(self) -> dict[str, int]:
        """Count explorers per status, of processes that live."""
        return self._statuses.counts()

    async def explorer_requires_sync(self) -> bool:
        """Return whether an explorer waits for a version or a broadcast."""
        return self._statuses.counts()[REQUIRES_SYNC] > 0

    async def notify_no_new_model_state_dict(self) -> None:
        """Take note that no version comes now: those who wait for one now wait no longer."""
        self._wakes += 1
        self._changes.announce()

    async def memory(self) -> SynchronizerMemory:
        """Return the peak resident bytes of this process, and whether torch was loaded into it (it must not be)."""
        return {"peak_rss": peak_memory(), "pid": os.getpid(), "torch": "torch" in sys.modules}


def _opened(version: Version, slot: int) -> int:
    story.info("version %s gets slot %d", version, slot)
    return slot


def _process_name() -> str:
    return f"process {os.getpid()} of {platform.node()}"


class Synchronizer(HandoverClient):
    """A thin, picklable client of the actor. Make it with `get_actor`; every call is bounded by the actor's timeout.
    Each method is called plainly, or with `.remote`, which returns Ray's reference to the answer, to be awaited.

    Example:
        synchronizer = Synchronizer.get_actor(SynchronizerConfig(timeout_s=60), namespace="run")    # the driver
        synchronizer.set_model_state_dict(model.state_dict(), 12)                                   # the trainer
        state_dict, version = Synchronizer.get_actor(namespace="run").get_model_state_dict()        # an explorer
    """

    def __init__(self, actor: ActorHandle, timeout_s: float) -> None:
        super().__init__(SynchronizerClient(actor, timeout_s))

    @property
    def actor(self) -> ActorHandle:
        """Ray's handle of the actor."""
        return self.client.handle

    @classmethod
    def get_actor(
        cls,
        config: object | None = None,
        namespace: str | None = None,
        *,
        timeout_s: float | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> Synchronizer:
        """Return the run's synchronizer. With a config or settings it is created where there is none; without any it
        must be there. The actor serves the calling process from now on, and ends when the last one it serves is gone.

        Args:
            config: a `SynchronizerConfig`, or the `Config` of a Trinity-RFT program, whose namespace it then is.
            namespace: Ray namespace; None: the config's, else that of the program.
            timeout_s: the setting of that name, without a config or in place of the config's. Of an actor that is
                there, its own holds.
            checkpoint_dir: the setting of that name, likewise.

        Raises:
            ConfigError: the config is none of these, or a field of it is wrong; or the synchronizer that is there has
                another checkpoint folder.
            RunError: no config or setting was given and there is none.
        """
        settings = None if config is None else synchronizer_config(config)
        namespace = namespace or (settings.namespace if settings is not None else None)
        given: dict[str, Any] = {}
        if timeout_s is not None:
            check_limit("timeout_s", timeout_s)
            given["timeout_s"] = timeout_s
        if checkpoint_dir is not None:
            given["checkpoint_dir"] = str(Path(checkpoint_dir).absolute())
        wanted = given.get("checkpoint_dir") or (settings.checkpoint_dir if settings is not None else None)
        try:
            actor = ray.get_actor(ACTOR_NAME, namespace=namespace)
            its: SynchronizerConfig = Call(actor.settings.remote(), "the synchronizer", "tell its settings").result(60)
        except (ValueError, MemberDied):  # there is none, or it has just ended
            if settings is None and not given:
                raise RunError(
                    f"there is no {ACTOR_NAME!r} in Ray namespace {namespace!r}: pass a config to create it"
                ) from None
        else:
            if (
                wanted is not None
                and its.checkpoint_dir is not None
                and Path(wanted).absolute() != Path(its.checkpoint_dir).absolute()
            ):
                raise ConfigError(
                    f"the synchronizer of Ray namespace {namespace!r} is that of the run in {its.checkpoint_dir}, "
                    f"which is not over; the checkpoint folder here is {wanted}"
                )
            found = cls(actor, its.timeout_s)
            found._attach(_process_name())
            return found
        given["namespace"] = namespace or ray.get_runtime_context().namespace
        settings = replace(settings or SynchronizerConfig(), **given)
        actor = (
            ray.remote(failures_logged(small_actor(_Actor, settings)))
            .options(
                name=ACTOR_NAME,
                namespace=namespace,
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=10_000,
                **({"lifetime": "detached"} if settings.detached else {}),
            )
            .remote()
        )
        made = cls(actor, settings.timeout_s)
        made._attach(_process_name())
        return made

    get_latest_model_version = forwarded(SynchronizerActor.get_latest_model_version)
    """`()`: the step of the newest version, -1 before the first."""
    notify_no_new_model_state_dict = forwarded(SynchronizerActor.notify_no_new_model_state_dict)
    """`()`: no version comes now; those who wait for one now wait no longer."""
    set_trainer_status = forwarded(SynchronizerActor.set_trainer_status)
    """`(status)`: the trainer is running, requires_sync or stopped, as that text, an enum's member or its name. When it
    has stopped all waits for versions end, after the commits that are under way.
    """
    get_trainer_status = forwarded(SynchronizerActor.get_trainer_status)
    """`()`: what the trainer said last."""
    trainer_requires_weight_sync = forwarded(SynchronizerActor.trainer_requires_weight_sync)
    """`()`: whether the trainer waits for a broadcast; None: it has stopped."""
    get_explorer_status_counts = forwarded(SynchronizerActor.get_explorer_status_counts)
    """`()`: how many explorers are in each status, of processes that live."""
    explorer_requires_sync = forwarded(SynchronizerActor.explorer_requires_sync)
    """`()`: whether an explorer waits for a version or a broadcast."""

    @asked
    def wait_new_model_state_dict(self, current_version: int) -> Call[int]:
        """Wait for a step past `current_version` and return it. The explorer requires sync while it waits.

        Returns:
            `current_version` itself where the trainer has stopped, or says meanwhile that none comes now
            (`notify_no_new_model_state_dict`). Before the first version -1 is answered with 0, at once: the weights
            that the explorer began with.

        Raises:
            RunError: the newest version is an earlier one.
            WaitTimeout: nothing came within the configured timeout.
        """
        return self.client.wait_new_model_state_dict(self._attach(_process_name()), current_version)

    @asked
    def set_explorer_status(self, status: object, old_status: object = None) -> Call[None]:
        """Say that one explorer of this process goes from `old_status` (None: it is new) to `status`. It counts while
        the process lives. Statuses as for `set_trainer_status`.
        """
        process = self._attach(_process_name())
        return self.client.set_explorer_status(process, plain(status), plain(old_status))


class _Actor(SynchronizerActor):
    async def settings(self) -> SynchronizerConfig:
        """Return what it was made with, for clients that join by name."""
        return self._config
