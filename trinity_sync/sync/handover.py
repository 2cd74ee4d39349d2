"""The synchronizer's calls for programs that hand over whole state dicts, or broadcast them themselves, in place of
slots and node agents: the actor's half and the client's, bases of `SynchronizerActor` and `Synchronizer`.

The actor holds references, sizes and digests, never the bytes of a tensor.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import RayError

from trinity_sync.actors.calls import ANSWER_S, Call, this_process
from trinity_sync.actors.changes import Changes
from trinity_sync.actors.synchronizer import StoredState, SynchronizerClient
from trinity_sync.errors import RunError
from trinity_sync.protocol.members import Member, Roll
from trinity_sync.protocol.rounds import TRAINER, RoundBook, RoundError, WeightSyncGroup
from trinity_sync.protocol.versions import Place, Version, VersionBook, VersionError, Whereabouts
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from ray import ObjectRef

    from trinity_sync.sync.state_dicts import Tensors

T = TypeVar("T")


class Handover:
    """The actor's half.

    Args:
        book: of all versions.
        checkpoint_dir: the checkpoint folder, in which announced versions are; None: it is not known.
    """

    def __init__(self, book: VersionBook, checkpoint_dir: str | None) -> None:
        self._changes = Changes()
        self._book = book
        self._checkpoint_dir = checkpoint_dir
        self._roll = Roll()
        self._rounds = RoundBook(self._roll)
        self._served: set[Member] = set()

    # -- state dicts

    async def put_state(self, version: Version, state: StoredState) -> None:
        """Take note that a state dict is in the object store."""
        try:
            self._book.publish(Version(*version), state)
        except VersionError as error:
            raise RunError(str(error)) from None
        self._changes.announce()

    async def announce(self, version: Version, location: str | None) -> None:
        """Take note that a version is on disk: at `location` or, where the actor knows the checkpoint folder, in it."""
        version = Version(*version)
        if location is None and self._checkpoint_dir is not None:
            folder = Path(self._checkpoint_dir) / f"global_step_{version.step}"
            if (folder / "manifest.json").is_file():
                location = str(folder)
            elif version.step > 0:
                raise RunError(f"version {version} cannot be announced: {folder} is not a committed checkpoint")
        self._book.announce(version, location)
        self._changes.announce()

    async def find(self) -> Whereabouts | None:
        """Return the newest version with what is needed to have its tensors; None before the first."""
        return self._book.find()

    async def state_lost(self, version: Version) -> Whereabouts | None:
        """Take note that the tensors of a version are lost; return what serves in its place."""
        return self._book.lost(Version(*version))

    async def described(self) -> list[Described] | None:
        """Return what the last state dict is made of, or what is sent over the group: (name, dtype, shape) in order."""
        stored = self._book.newest_in(Place.STORE)
        if stored is not None and isinstance(stored.state, StoredState):
            return stored.state.tensors
        return self._rounds.group.meta if self._rounds.group is not None else None

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

    async def ready(self, member: Member, step: int | None, timeout_s: float) -> int:
        """Wait until the trainer and all explorers of the group are here; return the step that is going to be sent."""
        try:
            meeting = self._rounds.arrive(member, step)
        except RoundError as error:
            raise RunError(str(error)) from None
        finally:
            self._changes.announce()
        try:
            await self._changes.wait(
                lambda: meeting.ended,
                lambda: (self._rounds.missing(), f"come to the broadcast that {member} is ready for"),
                timeout_s,
            )
        finally:
            if not meeting.ended:
                self._rounds.withdraw(meeting, member)
        if meeting.step is None:
            raise RunError(f"{member} waited in vain: {meeting.failed}")
        return meeting.step

    async def sent(self, trainer: Member, version: Version) -> None:
        """Take note that all explorers of the group have a version."""
        version = Version(*version)
        if not self._rounds.sends(trainer):
            raise RunError(f"version {version} was sent by a {trainer} of an earlier weight sync group")
        self._book.announce(version, place=Place.SENT)
        self._changes.announce()

    # -- whom the actor serves

    async def attach(self, member: Member, owned: list[ObjectRef[None]]) -> None:
        """Notice the end of a process: `owned` holds the reference to its `hold` call, which fails with its owner. When
        the last one is gone, so is the actor.
        """
        self._roll.hear(member)
        self._served.add(member)
        with contextlib.suppress(RayError):
            await owned[0]
        self._served.discard(member)
        self._gone(member)
        self._changes.announce()
        if not self._served:
            # Not `exit_actor`, which waits for the calls that are under way, and some never return.
            ray.kill(ray.get_runtime_context().current_actor)

    def _gone(self, member: Member) -> None:
        """Forget a process that the actor served and that is dead."""
        self._rounds.gone(member)


#: The calls by which actors watch this process; while it lives, so do they.
_attached: dict[tuple[str, Member], tuple[Call[None], Call[None]]] = {}


class HandoverClient:
    """The client's half."""

    def __init__(self, client: SynchronizerClient) -> None:
        self.client = client

    def _answer(self, call: Call[T]) -> T:
        """Wait for the answer of a call that has no limit of its own."""
        return call.result(self.client.timeout_s)

    def _attach(self, name: str) -> Member:
        """Return this process under a name; the actor notices its end from now on."""
        member = this_process(name)
        key = (self.client.handle._actor_id.hex(), member)
        if key not in _attached:
            held = self.client.lifeline()
            _attached[key] = (held, self.client.attach(member, [held.reference]))
        return member

    # -- whole state dicts

    def set_model_state_dict(
        self,
        model_state_dict: Tensors | None,
        trainer_step: int,
        *,
        attempt: int = 0,
        wire_dtype: str | None = None,
        location: str | None = None,
    ) -> None:
        """Publish a version. Its tensors go into the object store in large buckets; the actor gets references.

        Called by one process of the trainer, which has to live as long as readers are to have the tensors.

        Args:
            model_state_dict: name -> whole tensor on any device, or an iterable of such pairs, which is consumed one
                tensor at a time. None: the version is the checkpoint of that step on disk.
            trainer_step: names the version.
            attempt: the run's attempt.
            wire_dtype: dtype of floating tensors on their way, such as ``"BF16"``; None: as they are.
            location: the folder of the checkpoint, where there is no state dict and the actor does not know the
                checkpoint folder.

        Raises:
            RunError: the version is not newer than the one before, or there is no committed checkpoint of the step.
        """
        version = Version(attempt, trainer_step)
        if model_state_dict is None:
            self._answer(self.client.announce(version, location))
            return
        from trinity_sync.sync import state_dicts

        stored = state_dicts.put(model_state_dict, wire_dtype=wire_dtype)
        self._answer(self.client.put_state(version, stored))

    def get_model_state_dict(self, *, copy: bool = False) -> tuple[dict[str, torch.Tensor] | None, int]:
        """Return the newest version: its tensors, every byte checked, and its step; both of one version.

        Args:
            copy: give tensors of their own. Else they are views of shared memory, which must not be written to.

        Returns:
            (None, step) where the version is a checkpoint on disk (`get_latest_model_path`), or came another way, and
            (None, -1) before the first.

        Raises:
            RunError: the tensors are lost with the process that published them, or damaged; or cannot be fetched now.
                For lost ones the newest checkpoint, where one is known, serves from then on.
        """
        newest = self._answer(self.client.find())
        if newest is None:
            return None, -1
        if not isinstance(newest.state, StoredState):
            return None, newest.version.step
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
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return tensors, newest.version.step

    def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Describe the tensors of the last state dict, or of what the weight sync group sends, as (name, dtype as torch
        prints it, shape), in the order in which they come.

        Raises:
            RunError: neither is known.
        """
        meta = self._answer(self.client.described())
        if meta is None:
            raise RunError("nothing is known of the tensors: no state dict and no weight sync group was set up")
        return [(name, dtype, tuple(shape)) for name, dtype, shape in meta]

    # -- broadcasts over a group of the program's own

    def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        state_dict_meta: Sequence[Described] | None = None,
        *,
        explorers: int = 1,
    ) -> WeightSyncGroup:
        """As rank 0 of the trainer, tell the explorers where to meet for broadcasts.

        Args:
            master_address, master_port: address of a store that serves already.
            state_dict_meta: (name, dtype, shape) of what is going to be sent, in order.
            explorers: number of explorers in the group. The group before it is over.
        """
        trainer = self._attach(TRAINER)
        meta = (
            None if state_dict_meta is None else [(name, str(kind), list(size)) for name, kind, size in state_dict_meta]
        )
        return self._answer(self.client.open_group(trainer, master_address, int(master_port), meta, explorers))

    def join_weight_sync_group(self, explorer: str, *, after: int = 0) -> WeightSyncGroup:
        """As an explorer, wait for a group and take a place in it.

        Args:
            explorer: the explorer's name, unique in the run.
            after: the id of the group that it was in before.

        Raises:
            RunError: all places are taken.
            WaitTimeout: the trainer set up none.
        """
        member = self._attach(explorer)
        limit = self.client.timeout_s
        return self.client.join_group(member, after, limit).result(limit + ANSWER_S)

    def ready_to_nccl_sync(
        self, module: str, trainer_step: int | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Wait until the trainer and all explorers of the group are ready for a broadcast.

        Args:
            module: ``"trainer"``, or the explorer's name.
            trainer_step: the step that the trainer is going to send; None from an explorer.
            timeout_s: limit, seconds; the configured one unless given.

        Returns:
            The step that is going to be sent. It is the newest version only after `notify_nccl_sync_done`, so that no
            label stands before its bytes.

        Raises:
            RunError: a member of the group died.
            WaitTimeout: names who did not come. Whoever waited is not counted as ready any more.
        """
        member = self._attach(module)
        limit = self.client.timeout_s if timeout_s is None else timeout_s
        return self.client.ready(member, trainer_step, limit).result(limit + ANSWER_S)

    def notify_nccl_sync_done(self, trainer_step: int, *, attempt: int = 0) -> None:
        """As the trainer, say that the version was sent to all explorers of the group."""
        self._answer(self.client.sent(this_process(TRAINER), Version(attempt, trainer_step)))
