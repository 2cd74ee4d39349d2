"""The synchronizer's calls for programs without slots and node agents, which hand over whole state dicts or broadcast
them: `Handover`, the base of `SynchronizerActor`, and `HandoverClient`, the base of `Synchronizer`.

The actor keeps references, sizes and digests, never the bytes of a tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayError

from trinity_sync.actors.calls import ANSWER_S, Call, this_process
from trinity_sync.actors.handles import asked, fetched, forwarded
from trinity_sync.actors.monitor_client import MONITOR, MonitorClient
from trinity_sync.actors.pending import Changes
from trinity_sync.actors.synchronizer_client import StoredState, SynchronizerClient
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.logs import story
from trinity_sync.protocol.parts import MANIFEST, STATE_DICT
from trinity_sync.protocol.rounds import TRAINER, Roll, RoundBook, RoundError, RoundMember, WeightSyncGroup
from trinity_sync.protocol.statuses import StatusBook
from trinity_sync.protocol.versions import Place, Version, VersionBook, VersionError, VersionPlace
from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

    import torch
    from ray.actor import ActorHandle

    from trinity_sync.sync.state_dicts import Tensors

T = TypeVar("T")

#: The tracker of the newest committed weights in the checkpoint folder, as verl and Trinity-RFT name it.
_TRACKER = "latest_state_dict_iteration.txt"

#: Timeout of the commits that are under way when the trainer stops, seconds.
_LAST_COMMITS_S = 60.0

#: Interval at which a module is asked whether it is alive, seconds.
_ALIVE_S = 1.0


class Handover:
    """The actor's half."""

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
        """Publish a version: by `put_state`, or by `announce` where there is no state.

        Args:
            attempt: None: that of the newest version, or the next one where the trainer has gone back to an earlier
                step. For a version on disk only a process that started later can go back: saves may end out of order.
            publisher: the process that calls.
        """
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


def _own(found: tuple[dict[str, torch.Tensor] | str | None, int]) -> tuple[dict[str, torch.Tensor] | str | None, int]:
    """Copy the tensors of an answer: a view would be pickled with its whole bucket, once per tensor."""
    state, step = found
    return {name: one.clone() for name, one in state.items()} if isinstance(state, dict) else state, step


#: The calls by which actors watch this process. They last as long as the process.
_attached: dict[tuple[str, RoundMember], tuple[Call[None], Call[None]]] = {}


class HandoverClient:
    """The client's half. A plain call of a method waits for the answer; `.remote` returns Ray's reference to it."""

    def __init__(self, client: SynchronizerClient) -> None:
        self.client = client

    @property
    def timeout_s(self) -> float:
        """The actor's limit of a wait that names none, seconds."""
        return self.client.timeout_s

    def _answer(self, call: Call[T]) -> T:
        """Wait for the answer of a call that has no limit of its own."""
        return call.result(self.client.timeout_s)

    def _attach(self, name: str) -> RoundMember:
        """Return this process under a name; the actor watches it from now on."""
        member = this_process(name)
        key = (self.client.handle._actor_id.hex(), member)
        if key not in _attached:
            lifeline = self.client.lifeline()
            _attached[key] = (lifeline, self.client.attach(member, [lifeline.reference]))
        return member

    # -- whole state dicts

    @asked
    def set_model_state_dict(
        self,
        model_state_dict: Tensors | str | os.PathLike[str] | None,
        trainer_step: int,
        *,
        attempt: int | None = None,
        wire_dtype: str | None = None,
        location: str | None = None,
    ) -> Call[None]:
        """Publish a version. Its tensors go into the object store in large buckets; the actor gets references.

        Called by one process of the trainer. The tensors are lost when that process ends.

        Args:
            model_state_dict: name -> whole tensor on any device, or an iterable of such pairs, which is consumed one
                tensor at a time. A path: readers open it themselves. None: the version is the checkpoint of that step
                on disk; the call waits for its commit.
            trainer_step: names the version.
            attempt: the run's attempt; None: that of the version before, or the next one for an earlier step, as from a
                restarted trainer.
            wire_dtype: dtype of floating tensors on the wire, such as ``"BF16"``; None: as they are.
            location: the folder of the checkpoint, where there is no state dict and the actor does not know the
                checkpoint folder.

        Raises:
            RunError: the attempt has a later version, or the version was published with other weights; the step is
                not a number; or its checkpoint failed, or does not exist and is not being saved.
            WaitTimeout: the checkpoint was not committed in time; names the missing parts.
        """
        if not isinstance(trainer_step, Integral) or trainer_step < 0:
            raise RunError(f"trainer_step is {trainer_step!r}; it has to be a number of steps")
        state: object = None
        if isinstance(model_state_dict, (str, os.PathLike)):
            state = os.fspath(model_state_dict)
        elif model_state_dict is not None:
            from trinity_sync.sync import state_dicts

            state = state_dicts.put(model_state_dict, wire_dtype=wire_dtype)
        publisher = this_process(TRAINER)
        return self.client.set_model_state_dict(int(trainer_step), attempt, state, location, publisher)

    def _fetch(self, *, copy: bool = False) -> tuple[dict[str, torch.Tensor] | str | None, int]:
        """Return the newest version's tensors, every byte checked, and its step.

        Args:
            copy: copy the tensors. Otherwise they are views of shared memory, which must not be written to.

        Returns:
            (None, step) where the version is a checkpoint on disk (`get_latest_model_path`) or was broadcast, (path,
            step) where it was published as a path, and (None, -1) before the first.

        Raises:
            RunError: the tensors are damaged, lost with the process that published them, or cannot be fetched now.
                After a loss the newest known checkpoint replaces the version.
        """
        newest = self._answer(self.client.find())
        if newest is None:
            return None, -1
        if not isinstance(newest.state, StoredState):
            return newest.state if isinstance(newest.state, str) else None, newest.version.step
        from trinity_sync.sync import state_dicts

        try:
            tensors = state_dicts.get(newest.version, newest.state, self.client.timeout_s)
        except state_dicts.StateLostError as error:
            serves = self._answer(self.client.state_lost(newest.version))
            instead = (
                "no checkpoint is known that could serve"
                if serves is None or serves.location is None
                else f"the checkpoint of step {serves.version.step} in {serves.location} serves from now on"
            )
            raise RunError(f"{error}, the process that published them is gone; {instead}") from error
        found = tensors, newest.version.step
        return _own(found) if copy else found

    get_model_state_dict = fetched(_fetch, lambda found: ray.put(_own(found)))

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the newest version; nothing where it is not in memory. `.remote` yields Ray's
        references to such pairs.

        Raises:
            RunError: as `get_model_state_dict`; or the version was published as a path.
        """
        state, step = self.get_model_state_dict()
        if isinstance(state, str):
            raise RunError(f"version {step} was published as the path {state!r}, and has no tensors here")
        yield from (state or {}).items()

    get_model_state_dict_iterator = fetched(
        _iterate, lambda pairs: (ray.put((name, own.clone())) for name, own in pairs)
    )

    get_state_dict_meta = forwarded(Handover.get_state_dict_meta)
    """`()`: the tensors of the last state dict, or of the weight sync group, as (name, dtype such as ``bfloat16``,
    shape), in order; None: neither is known.
    """
    get_latest_model_path = forwarded(Handover.get_latest_model_path)
    """`(use_huggingface=False)`: the folder of the newest version's checkpoint, or the one that it would have, if the
    version is in memory. None: there is no version, or the checkpoint folder is not known.
    """

    # -- broadcasts over a group of the program's own

    @asked
    def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        state_dict_meta: Sequence[Described] | None = None,
        *,
        explorers: int = 1,
    ) -> Call[WeightSyncGroup]:
        """Announce a group for broadcasts, as rank 0 of the trainer. It ends the group before.

        Args:
            master_address, master_port: address of a store that serves already.
            state_dict_meta: (name, dtype, shape) of the tensors that will be sent, in order.
            explorers: number of explorers in the group.
        """
        trainer = self._attach(TRAINER)
        meta: list[Described] | None = None
        if state_dict_meta is not None:
            meta = [(name, str(kind), list(size)) for name, kind, size in state_dict_meta]
        return self.client.open_group(trainer, master_address, int(master_port), meta, explorers)

    @asked
    def join_weight_sync_group(self, explorer: str, *, after: int = 0) -> Call[WeightSyncGroup]:
        """Wait for a group, as an explorer, and take a rank in it.

        Args:
            explorer: the explorer's name, unique in the run.
            after: the id of the explorer's group before.

        Raises:
            RunError: all ranks are taken.
            WaitTimeout: the trainer set up no group.
        """
        member = self._attach(explorer)
        return self.client.join_group(member, after, self.client.timeout_s)

    @asked
    def ready_to_nccl_sync(
        self, module: str, trainer_step: int | None = None, *, timeout_s: float | None = None
    ) -> Call[int | None]:
        """Wait until the trainer and all explorers of the group are ready for a broadcast.

        Args:
            module: ``"trainer"``, or the explorer's name.
            trainer_step: the step that the trainer will send; ignored for an explorer.
            timeout_s: timeout, seconds; None: the configured one.

        Returns:
            The step that will be sent. It becomes the newest version with `notify_nccl_sync_done`, after its bytes.
            None: the trainer has stopped, or every explorer that had set its status.

        Raises:
            RunError: a member of the group died.
            WaitTimeout: names the members that did not come. The caller no longer counts as ready.
        """
        member = self._attach(module)
        limit = self.client.timeout_s if timeout_s is None else timeout_s
        return self.client.ready(member, trainer_step, limit)

    @asked
    def notify_nccl_sync_done(self, trainer_step: int, *, attempt: int = 0) -> Call[None]:
        """Report that the version was sent to all explorers of the group, as the trainer."""
        return self.client.sent(this_process(TRAINER), Version(attempt, trainer_step))

    coordinate_weight_sync_setup = forwarded(Handover.coordinate_weight_sync_setup)
    """`(timeout=None)`: have the trainer's and the explorer's actors, as the config names them, enter a process group:
    `get_weight_sync_info` of the trainer gives (address, port, meta), `setup_weight_sync_group(address, port,
    world_size, group_name, timeout_s)` is called on both concurrently, `set_state_dict_meta(meta)` on the explorer.
    RunError: an actor does not exist, dies or fails; WaitTimeout: one does not answer within `timeout` seconds (None:
    the configured timeout).
    """
    coordinate_weight_sync_teardown = forwarded(Handover.coordinate_weight_sync_teardown)
    """`()`: have the explorer and then the trainer leave that group, by `teardown_weight_sync_group`. An actor that is
    dead, fails, or takes more than half of the configured timeout, is logged and skipped.
    """
    add_module = forwarded(Handover.add_module)
    """`(module_ref)`: serve an actor of the program too, until it ends. None: a process that has called `get_actor`,
    which is served already.
    """
