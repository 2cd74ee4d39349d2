"""The synchronizer's calls for programs without slots and node agents, which hand over whole state dicts or broadcast
them. The actor keeps references, sizes and digests, never the bytes of a tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayError

from trinity_sync.actors.calls import ANSWER_S, Call
from trinity_sync.actors.monitor_client import MONITOR, MonitorClient
from trinity_sync.actors.pending import Changes
from trinity_sync.actors.synchronizer_client import StoredState
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.logs import story
from trinity_sync.protocol.parts import MANIFEST, STATE_DICT
from trinity_sync.protocol.rounds import TRAINER, Roll, RoundBook, RoundError, RoundMember, WeightSyncGroup
from trinity_sync.protocol.statuses import StatusBook
from trinity_sync.protocol.versions import Place, Version, VersionBook, VersionError, VersionPlace
from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from ray.actor import ActorHandle


T = TypeVar("T")

#: The tracker of the newest committed weights in the checkpoint folder, as verl and Trinity-RFT name it.
_TRACKER = "latest_state_dict_iteration.txt"

#: Timeout of the commits that are under way when the trainer stops, seconds.
_LAST_COMMITS_S = 60.0

#: Interval at which a module is asked whether it is alive, seconds.
_ALIVE_S = 1.0


class Handover:
    """The base of `SynchronizerActor`."""

    def __init__(self, book: VersionBook, config: SynchronizerConfig) -> None:
        self._changes = Changes()
        self._book = book
        self._config = config
        self._checkpoint_dir = None if config.checkpoint_dir is None else Path(config.checkpoint_dir)
        self._statuses = StatusBook(expects_trainer=not config.trinity)
        self._roll = Roll()
        self._rounds = RoundBook(self._roll)
        self._served: set[RoundMember] = set()
        # The processes that were running when the newest version on disk became known.
        self._here: set[str] = set()
        self._meta: list[Described] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._follow_newest()

    # -- state dicts

    async def set_model_state_dict(
        self, step: int, attempt: int | None, state: object, location: str | None, publisher: RoundMember
    ) -> None:
        """Publish a version: by `put_state`, or by `announce` where there is no state."""
        saved = self._book.newest_in(Place.DISK)
        restarted = saved is not None and saved.version == self._book.latest and publisher.life not in self._here
        version = self._version(step, attempt, restarted=restarted or state is not None)
        if state is None:
            await self.announce(version, location, publisher.life)
        else:
            await self.put_state(version, state)

    def _version(self, step: int, attempt: int | None, *, restarted: bool) -> Version:
        newest = self._book.latest
        if attempt is not None or newest is None:
            return Version(attempt or 0, step)
        if step >= newest.step or not restarted:
            return Version(newest.attempt, step)
        story.warning("step %d follows version %s: the trainer has gone back", step, newest)
        return Version(newest.attempt + 1, step)

    async def put_state(self, version: Version, state: object) -> None:
        """Record a state dict in the object store, or its path, which readers open themselves."""
        try:
            self._book.publish(Version(*version), state)
        except VersionError as error:
            raise RunError(str(error)) from None
        self._changes.announce()

    async def announce(self, version: Version, location: str | None, publisher: str) -> None:
        """Record a version on disk: at `location`, or in the checkpoint folder, if the actor knows it. Wait for its
        commit where it is not committed yet, or is being saved again.
        """
        version = Version(*version)
        if location is None and self._checkpoint_dir is not None:
            location = await self._committed(version, self._step_dir(version.step))
        before = self._book.newest
        self._book.announce(version, location)
        self._note_here(before, publisher)

    async def _committed(self, version: Version, folder: Path) -> str | None:
        """Wait for the commit of a version's weights; return their folder, None where step 0 was not saved."""
        limit, monitor = self._config.timeout_s, self._monitor()
        saved = await asyncio.to_thread((folder / MANIFEST).is_file)
        if monitor is not None and (version.step > 0 or saved):
            state = (await monitor.status(version.step).answer(limit))["state"]
            if state != "unknown" or not saved:
                committed = monitor.wait_committed(version.step, None, limit, kind=STATE_DICT)
                return (await committed.answer(limit + ANSWER_S))["path"]
        if not saved and version.step > 0:
            raise RunError(f"version {version} cannot be announced: {folder} is not a committed checkpoint")
        return str(folder) if saved else None

    def _note_here(self, before: Version | None, *publishers: str) -> None:
        """Record the running processes when a version on disk has become the newest."""
        if self._book.newest != before:
            self._here = {member.life for member in self._served} | set(publishers)
        self._changes.announce()

    def _monitor(self) -> MonitorClient | None:
        with contextlib.suppress(ValueError):  # there is none
            return MonitorClient(ray.get_actor(MONITOR, namespace=self._config.namespace))
        return None

    async def follow(self, version: Version, location: str) -> None:
        """Record a commit of the run's checkpoint monitor."""
        if self._config.follow_commits is not False and self._checkpoint_dir is not None:
            before = self._book.newest
            self._book.follow(Version(*version), location, always=self._config.follow_commits is True)
            self._note_here(before)

    async def _follow_last(self) -> None:
        """Record the commits that are under way, when the trainer has stopped."""
        if not self._config.follow_commits:
            return
        try:
            if (monitor := self._monitor()) is not None:
                await monitor.finish_saves(_LAST_COMMITS_S).answer(_LAST_COMMITS_S + ANSWER_S)
            self._follow_newest()
        except RunError as error:
            story.warning("saves that were under way when the trainer stopped may be no versions: %s", error)

    def _follow_newest(self) -> None:
        """Record the newest weights in the checkpoint folder."""
        if self._config.follow_commits is False or self._checkpoint_dir is None:
            return
        try:
            folder = self._step_dir(step := int((self._checkpoint_dir / _TRACKER).read_text()))
            attempt = int(json.loads((folder / MANIFEST).read_text())["attempt"])
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return  # no commit, or a damaged one
        except OSError as error:
            raise RunError(f"the newest commit in {self._checkpoint_dir} cannot be read now: {error}") from error
        self._book.follow(Version(attempt, step), str(folder), always=self._config.follow_commits is True)

    def _step_dir(self, step: int) -> Path:
        assert self._checkpoint_dir is not None, "callers check it"
        return self._checkpoint_dir / f"global_step_{step}"

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Return the newest version's folder; see `Synchronizer.get_latest_model_path`."""
        newest, location = self._book.find(), self._book.location
        if newest is not None and newest.state is not None and newest.location is None:
            location = None if self._checkpoint_dir is None else str(self._step_dir(newest.version.step))
        if location is None:
            return None
        return f"{location}/actor/huggingface" if use_huggingface else f"{location}/actor"

    async def find(self) -> VersionPlace | None:
        """Return the newest version and the place of its tensors; None before the first version."""
        return self._book.find()

    async def state_lost(self, version: Version) -> VersionPlace | None:
        """Record that the tensors of a version are lost; return the version that replaces it."""
        return self._book.lost(Version(*version))

    async def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Describe the tensors that explorers get; see `Synchronizer.get_state_dict_meta`."""
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
        self, trainer: RoundMember, address: str, port: int, meta: list[Described] | None, explorers: int
    ) -> WeightSyncGroup:
        """Record the address of a group for broadcasts, which the trainer has set up."""
        try:
            group = self._rounds.open(trainer, address, port, meta, explorers)
        except RoundError as error:
            raise RunError(str(error)) from None
        self._changes.announce()
        return group

    async def join_group(self, explorer: RoundMember, after: int, timeout_s: float) -> WeightSyncGroup:
        """Wait for a group with an id above `after`; return it, with the explorer's rank in it."""
        rounds, over = self._rounds, self._statuses.trainer_requires_sync
        deadline, what = time.monotonic() + timeout_s, f"set up a weight sync group for {explorer}"
        while True:
            await self._changes.wait(
                lambda: rounds.joinable(after) or over() is None, lambda: ("the trainer", what), timeout_s, deadline
            )
            if not rounds.joinable(after):
                raise RunError(f"the trainer has stopped, and does not {what}")
            try:
                return rounds.join(explorer)
            except RoundError as error:
                if rounds.joinable(after):
                    raise RunError(str(error)) from None
                # That ended the group, which had an earlier process of this explorer. Wait for the next group.
                self._changes.announce()

    async def ready(self, member: RoundMember, step: int | None, timeout_s: float) -> int | None:
        """Wait until the trainer and all explorers of the group are ready; return the step that will be sent. None: the
        other side has stopped.
        """
        trainer, statuses = member.name == TRAINER, self._statuses
        died = trainer and self._rounds.failed is not None and statuses.explorer_died
        if self._stopped(trainer) and not died:
            return None
        try:
            meeting = self._rounds.arrive(member, step)
        except RoundError as error:
            raise RunError(str(error)) from None
        finally:
            self._changes.announce()
        waiting = statuses.trainer_requiring_sync() if trainer else statuses.requiring_sync(member)
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
            # Such a program does not report that it has sent a version.
            self._book.announce(self._version(meeting.step, None, restarted=True), place=Place.SENT)
            self._changes.announce()
        return meeting.step

    def _stopped(self, trainer: bool) -> bool:
        """Return whether the other side of a broadcast has stopped."""
        return self._statuses.explorers_stopped if trainer else self._statuses.trainer_requires_sync() is None

    async def sent(self, trainer: RoundMember, version: Version) -> None:
        """Record that all explorers of the group have a version."""
        version = Version(*version)
        if not self._rounds.sends(trainer):
            raise RunError(f"version {version} was sent by a {trainer} of an earlier weight sync group")
        self._book.announce(version, place=Place.SENT)
        self._changes.announce()

    # -- a program whose trainer and explorer are named actors of Ray's

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        """Have the program's own actors enter a group; see `Synchronizer.coordinate_weight_sync_setup`."""
        config, limit = self._config, timeout or self._config.timeout_s
        trainer, explorer, deadline = config.trainer_name, config.explorer_name, time.monotonic() + limit
        info = await self._ask_module(trainer, deadline, "get_weight_sync_info")
        address, port, self._meta = cast("tuple[str, int, list[Described]]", info)
        group = (address, port, 1 + config.explorer_world_size, config.group_name, limit)
        both = (self._ask_module(name, deadline, "setup_weight_sync_group", *group) for name in (trainer, explorer))
        await asyncio.gather(*both)
        await self._ask_module(explorer, deadline, "set_state_dict_meta", self._meta)

    async def coordinate_weight_sync_teardown(self) -> None:
        """Have both actors leave the group; see `Synchronizer.coordinate_weight_sync_teardown`."""
        for name in (self._config.explorer_name, self._config.trainer_name):
            try:
                limit = time.monotonic() + self._config.timeout_s / 2
                await self._ask_module(name, limit, "teardown_weight_sync_group")
            except RunError as error:
                story.warning("%s has not left its weight sync group: %s", name, error)

    async def _ask_module(self, name: str, deadline: float, method: str, *args: object) -> object:
        """Call a named actor of the program; `deadline` in seconds of `time.monotonic`."""
        namespace = self._config.namespace
        try:
            actor = ray.get_actor(name, namespace=namespace)
        except ValueError:
            raise RunError(f"there is no actor {name!r} in Ray namespace {namespace!r}") from None
        call: Call[object] = Call(getattr(actor, method).remote(*args), name, f"answer {method}")
        return await call.answer(round(deadline - time.monotonic(), 1))

    # -- the processes that the actor serves

    async def attach(self, member: RoundMember, owned: Sequence[Awaitable[None]]) -> None:
        """Serve a process until it ends: `owned` has the reference of its `lifeline` call, which then fails. The actor
        ends with the last process.
        """
        self._roll.hear(member)
        self._served.add(member)
        with contextlib.suppress(RayError):
            await owned[0]
        self._rounds.gone(member)
        self._statuses.drop(member)
        self._served.discard(member)
        self._changes.announce()
        if not self._served:
            # Not `exit_actor`: it waits for all calls, and some never return.
            ray.kill(ray.get_runtime_context().current_actor)

    async def add_module(self, module_ref: ActorHandle | None) -> None:
        """Serve an actor of the program, until it ends; see `Synchronizer.add_module`."""
        if module_ref is None or (module := RoundMember("module", module_ref._actor_id.hex())) in self._served:
            return
        self._served.add(module)
        watch = asyncio.ensure_future(self.attach(module, [_dead(module_ref)]))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)


async def _dead(module: ActorHandle) -> None:
    """Raise when an actor is dead; a busy one answers later."""
    while True:
        with contextlib.suppress(ActorUnavailableError):  # Ray restarts it
            await module.__ray_ready__.remote()
        await asyncio.sleep(_ALIVE_S)
