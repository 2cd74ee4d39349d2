"""The synchronizer's calls for programs that hand over whole state dicts, or broadcast them themselves, in place of
slots and node agents: the actor's half, base of `SynchronizerActor`. The client's is `handover_client`.

The actor holds references, sizes and digests, never the bytes of a tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import RayError

from trinity_sync.actors.calls import ANSWER_S
from trinity_sync.actors.changes import Changes
from trinity_sync.actors.monitor import MONITOR, MonitorClient
from trinity_sync.actors.synchronizer import StoredState
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.logs import story
from trinity_sync.protocol.files import MANIFEST
from trinity_sync.protocol.members import Member, Roll
from trinity_sync.protocol.parts import STATE_DICT
from trinity_sync.protocol.rounds import TRAINER, RoundBook, RoundError, WeightSyncGroup
from trinity_sync.protocol.statuses import StatusBook
from trinity_sync.protocol.versions import Place, Version, VersionBook, VersionError, Whereabouts
from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    from collections.abc import Awaitable, Hashable

    from ray import ObjectRef
    from ray.actor import ActorHandle

T = TypeVar("T")

#: Names the newest committed weights in the checkpoint folder, for verl and Trinity-RFT too.
_TRACKER = "latest_state_dict_iteration.txt"

#: A module that answers is asked again after so long whether it lives, seconds.
_ALIVE_S = 1.0


class Handover:
    """The actor's half.

    Args:
        book: of all versions.
        config: the actor's settings.
    """

    def __init__(self, book: VersionBook, config: SynchronizerConfig) -> None:
        self._changes = Changes()
        self._book = book
        self._config = config
        self._checkpoint_dir = None if config.checkpoint_dir is None else Path(config.checkpoint_dir)
        self._statuses = StatusBook(expects_trainer=not config.trinity)
        self._roll = Roll()
        self._rounds = RoundBook(self._roll)
        self._served: set[Hashable] = set()
        self._announcer: Member | None = None
        self._meta: list[Described] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._follow_newest()

    # -- state dicts

    async def set_model_state_dict(
        self, step: int, attempt: int | None, state: object, location: str | None, publisher: Member
    ) -> None:
        """Publish a version: as `put_state`, or as `announce` where there is no state.

        Args:
            attempt: None: that of the newest version, and the next one where the trainer has gone back to an earlier
                step. With what is on disk only another process goes back, for saves may end out of order.
            publisher: the process that calls.
        """
        saved = self._book.newest_in(Place.DISK)
        restarted = saved is not None and saved.version == self._book.newest and publisher != self._announcer
        version = self._version(step, attempt, restarted=restarted or state is not None)
        if state is None:
            await self.announce(version, location)
            self._announcer = publisher
        else:
            await self.put_state(version, state)

    def _version(self, step: int, attempt: int | None, *, restarted: bool) -> Version:
        newest = self._book.newest
        if attempt is not None or newest is None:
            return Version(attempt or 0, step)
        if step >= newest.step or not restarted:
            return Version(newest.attempt, step)
        story.warning("step %d follows version %s: the trainer has gone back", step, newest)
        return Version(newest.attempt + 1, step)

    async def put_state(self, version: Version, state: object) -> None:
        """Take note that a state dict is in the object store, or (a path) where readers know to look."""
        try:
            self._book.publish(Version(*version), state)
        except VersionError as error:
            raise RunError(str(error)) from None
        self._changes.announce()

    async def announce(self, version: Version, location: str | None) -> None:
        """Take note that a version is on disk: at `location` or, where the actor knows the checkpoint folder, in it.
        Where it is not committed yet, wait for its commit.
        """
        version = Version(*version)
        if location is None and self._checkpoint_dir is not None:
            folder = self._step_dir(version.step)
            if (folder / MANIFEST).is_file():
                location = str(folder)
            elif version.step > 0:
                location = await self._committed(version, folder)
        self._book.announce(version, location)
        self._changes.announce()

    async def _committed(self, version: Version, folder: Path) -> str | None:
        """Wait for the commit of a version's weights; return their folder."""
        limit = self._config.timeout_s
        try:
            monitor = MonitorClient(ray.get_actor(MONITOR, namespace=self._config.namespace))
        except ValueError:
            raise RunError(f"version {version} cannot be announced: {folder} is not a committed checkpoint") from None
        committed = monitor.wait_committed(version.step, None, limit, kind=STATE_DICT)
        return (await committed.answer(limit + ANSWER_S))["path"]

    async def follow(self, version: Version, location: str) -> None:
        """Take note of a commit of the run's checkpoint monitor."""
        if self._config.follow_commits and self._checkpoint_dir is not None:
            self._book.follow(Version(*version), location)
            self._announcer = None
            self._changes.announce()

    def _follow_newest(self) -> None:
        """Take note of the newest weights that the checkpoint folder holds already."""
        if not self._config.follow_commits or self._checkpoint_dir is None:
            return
        try:
            folder = self._step_dir(step := int((self._checkpoint_dir / _TRACKER).read_text()))
            attempt = int(json.loads((folder / MANIFEST).read_text())["attempt"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # nothing was committed, or it is not whole
        self._book.follow(Version(attempt, step), str(folder))

    def _step_dir(self, step: int) -> Path:
        assert self._checkpoint_dir is not None, "asked for where it is known"
        return self._checkpoint_dir / f"global_step_{step}"

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Return the newest version's folder; see `Synchronizer.get_latest_model_path`."""
        newest, location = self._book.find(), self._book.location
        if newest is not None and newest.state is not None and newest.location is None:
            location = None if self._checkpoint_dir is None else str(self._step_dir(newest.version.step))
        if location is None:
            return None
        return f"{location}/actor/huggingface" if use_huggingface else f"{location}/actor"

    async def find(self) -> Whereabouts | None:
        """Return the newest version with what is needed to have its tensors; None before the first."""
        return self._book.find()

    async def state_lost(self, version: Version) -> Whereabouts | None:
        """Take note that the tensors of a version are lost; return what serves in its place."""
        return self._book.lost(Version(*version))

    async def get_state_dict_meta(self) -> list[Described] | None:
        """Return what the last state dict is made of, or what is sent over the group; see `Synchronizer`."""
        described = self._described()
        if described is None:
            return None
        return [(name, dtype.removeprefix("torch."), tuple(shape)) for name, dtype, shape in described]

    def _described(self) -> list[Described] | None:
        stored = self._book.newest_in(Place.STORE)
        if stored is not None and isinstance(stored.state, StoredState):
            return stored.state.tensors
        return self._rounds.group.meta if self._rounds.group is not None else self._meta

    # -- broadcasts

    async def open_group(
        self, trainer: Member, address: str, port: int, meta: list[Described] | None, explorers: int
    ) -> WeightSyncGroup:
        """Take note of where a group for broadcasts meets, which the trainer set up."""
        try:
            group = self._rounds.open(trainer, address, port, meta, explorers)
        except RoundError as error:
            raise RunError(str(error)) from None
        self._changes.announce()
        return group

    async def join_group(self, explorer: Member, after: int, timeout_s: float) -> WeightSyncGroup:
        """Wait for a group with an id above `after`; return it, with the explorer's place in it."""
        rounds = self._rounds
        deadline, what = time.monotonic() + timeout_s, f"set up a weight sync group for {explorer}"
        while True:
            await self._changes.wait(lambda: rounds.joinable(after), lambda: ("the trainer", what), timeout_s, deadline)
            try:
                return rounds.join(explorer)
            except RoundError as error:
                if rounds.joinable(after):
                    raise RunError(str(error)) from None
                # The group was over with that: it had the process before this one. There will be another one.
                self._changes.announce()

    async def ready(self, member: Member, step: int | None, timeout_s: float) -> int | None:
        """Wait until the trainer and all explorers of the group are here; return the step that is going to be sent.
        None: there is nobody to wait for, for the others have stopped.
        """
        trainer = member.name == TRAINER
        if self._stopped(trainer):
            return None
        try:
            meeting = self._rounds.arrive(member, step)
        except RoundError as error:
            raise RunError(str(error)) from None
        finally:
            self._changes.announce()
        statuses = self._statuses
        waiting = statuses.trainer_requiring_sync() if trainer else statuses.requiring_sync(self._explorer(member))
        try:
            with waiting:
                await self._changes.wait(
                    lambda: meeting.ended or self._stopped(trainer),
                    lambda: (self._rounds.missing(), f"come to the broadcast that {member} is ready for"),
                    timeout_s,
                )
        except WaitTimeout as error:
            if not self._config.trinity:
                raise
            story.error("no version is sent: %s", error)
        finally:
            if not meeting.ended:
                self._rounds.withdraw(meeting, member)
        if meeting.failed is not None:
            raise RunError(f"{member} waited in vain: {meeting.failed}")
        if meeting.step is not None and self._config.trinity:
            # Such a program says nothing when it has sent a version.
            self._book.announce(self._version(meeting.step, None, restarted=True), place=Place.SENT)
        return meeting.step

    def _stopped(self, trainer: bool) -> bool:
        """Whether the other side of a broadcast is over."""
        return self._statuses.explorers_stopped if trainer else self._statuses.trainer_requires_sync() is None

    def _explorer(self, member: Member) -> Member:
        """Return the process of an explorer, under the name by which its status is known."""
        return next((known for known in self._statuses.explorers if known.life == member.life), member)

    async def sent(self, trainer: Member, version: Version) -> None:
        """Take note that all explorers of the group have a version."""
        version = Version(*version)
        if not self._rounds.sends(trainer):
            raise RunError(f"version {version} was sent by a {trainer} of an earlier weight sync group")
        self._book.announce(version, place=Place.SENT)
        self._changes.announce()

    # -- a program whose modules are named actors of Ray's

    async def setup_weight_sync_group(
        self, trainer: Member, address: str, port: int, meta: list[Described] | None, explorers: int
    ) -> WeightSyncGroup:
        """As `open_group`; an explorer that is such a module is told."""
        group = await self.open_group(trainer, address, port, meta, explorers)
        if self._config.trinity:
            explorer = self._module(self._config.explorer_name)
            await self._within(explorer.setup_weight_sync_group.remote(address, port))
            if meta is not None:
                await self._within(explorer.set_state_dict_meta.remote(meta))
        return group

    async def coordinate_weight_sync_setup(self, timeout_s: float | None) -> None:
        """Have trainer and explorer enter a process group together; see `Synchronizer`."""
        config = self._config
        trainer, explorer = self._module(config.trainer_name), self._module(config.explorer_name)
        limit = timeout_s or config.timeout_s
        address, port, meta = await self._within(trainer.get_weight_sync_info.remote(), limit)
        group = (address, port, 1 + config.explorer_world_size, config.group_name, limit)
        await self._within(
            asyncio.gather(*(one.setup_weight_sync_group.remote(*group) for one in (trainer, explorer))), limit
        )
        await self._within(explorer.set_state_dict_meta.remote(meta), limit)
        self._meta = meta

    async def coordinate_weight_sync_teardown(self) -> None:
        """Have explorer and trainer leave the group, in this order: so nothing is under way. See `Synchronizer`."""
        for name in (self._config.explorer_name, self._config.trainer_name):
            try:
                await self._within(self._module(name).teardown_weight_sync_group.remote())
            except (RunError, RayError) as error:
                story.warning("%s has not left its weight sync group: %s", name, error)

    def _module(self, name: str) -> ActorHandle:
        namespace = self._config.namespace
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            raise RunError(f"there is no actor {name!r} in Ray namespace {namespace!r}") from None

    async def _within(self, answer: Awaitable[T], timeout_s: float | None = None) -> T:
        limit = timeout_s or self._config.timeout_s
        try:
            return await asyncio.wait_for(_awaited(answer), limit)
        except RayError:  # first: an actor's own TimeoutError comes as both
            raise
        except TimeoutError:
            raise WaitTimeout("trainer and explorer", "set up or leave the weight sync group", limit) from None

    # -- whom the actor serves

    async def attach(self, member: Member, owned: list[ObjectRef[None]]) -> None:
        """Notice the end of a process: `owned` holds the reference to its `hold` call, which fails with its owner. When
        the last one is gone, so is the actor.
        """
        self._roll.hear(member)
        self._served.add(member)
        with contextlib.suppress(RayError):
            await owned[0]
        self._rounds.gone(member)
        self._statuses.drop(member)
        self._release(member)

    async def add_module(self, module: ActorHandle | None) -> None:
        """Serve an actor of Ray's as well, until it is gone; None: nothing to do."""
        if module is not None and module not in self._served:
            self._served.add(module)
            watch = asyncio.ensure_future(self._watch_module(module))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def _watch_module(self, module: ActorHandle) -> None:
        with contextlib.suppress(RayError):
            while True:  # a module that is busy answers when it can, and a dead one fails the call
                await module.__ray_ready__.remote()
                await asyncio.sleep(_ALIVE_S)
        self._release(module)

    def _release(self, served: Hashable) -> None:
        self._served.discard(served)
        self._changes.announce()
        if not self._served:
            # Not `exit_actor`, which waits for the calls that are under way, and some never return.
            ray.kill(ray.get_runtime_context().current_actor)


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer
