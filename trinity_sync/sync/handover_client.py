"""The client's half of `handover`, base of `Synchronizer`: whole state dicts, and broadcasts of a program's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from trinity_sync.actors.calls import Call, this_process
from trinity_sync.actors.handles import asked, fetched, fetched_each
from trinity_sync.actors.synchronizer import StoredState, SynchronizerClient
from trinity_sync.errors import RunError
from trinity_sync.protocol.members import Member
from trinity_sync.protocol.rounds import TRAINER, WeightSyncGroup
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle

    from trinity_sync.sync.state_dicts import Tensors

T = TypeVar("T")

#: The calls by which actors watch this process; while it lives, so do they.
_attached: dict[tuple[str, Member], tuple[Call[None], Call[None]]] = {}


class HandoverClient:
    """The client's half. Each method is called plainly, and waits for its answer, or with `.remote`, which returns
    Ray's reference to it.
    """

    def __init__(self, client: SynchronizerClient) -> None:
        self.client = client

    @property
    def timeout_s(self) -> float:
        """The actor's limit of a wait that names none, seconds."""
        return self.client.timeout_s

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

        Called by one process of the trainer, which has to live as long as readers are to have the tensors.

        Args:
            model_state_dict: name -> whole tensor on any device, or an iterable of such pairs, which is consumed one
                tensor at a time. A path: readers are told it, and read it themselves. None: the version is the
                checkpoint of that step on disk; its commit is waited for.
            trainer_step: names the version.
            attempt: the run's attempt; None: that of the version before, or the next one for an earlier step, as from a
                trainer that was started again.
            wire_dtype: dtype of floating tensors on their way, such as ``"BF16"``; None: as they are.
            location: the folder of the checkpoint, where there is no state dict and the actor does not know the
                checkpoint folder.

        Raises:
            RunError: the attempt has a later version, or the version was published with other weights; or the step's
                checkpoint failed, or there is none and nobody who saves it.
            WaitTimeout: the checkpoint was not committed in time; names what is missing.
        """
        state: object = None
        if isinstance(model_state_dict, (str, os.PathLike)):
            state = os.fspath(model_state_dict)
        elif model_state_dict is not None:
            from trinity_sync.sync import state_dicts

            state = state_dicts.put(model_state_dict, wire_dtype=wire_dtype)
        publisher = this_process(TRAINER)
        return self.client.set_model_state_dict(trainer_step, attempt, state, location, publisher)

    @fetched
    def get_model_state_dict(self, *, copy: bool = False) -> tuple[dict[str, torch.Tensor] | str | None, int]:
        """Return the newest version: its tensors, every byte checked, and its step; both of one version.

        Args:
            copy: give tensors of their own. Else they are views of shared memory, which must not be written to.

        Returns:
            (None, step) where the version is a checkpoint on disk (`get_latest_model_path`), or came another way,
            (path, step) where it was published as a path, and (None, -1) before the first.

        Raises:
            RunError: the tensors are lost with the process that published them, or damaged; or cannot be fetched now.
                For lost ones the newest checkpoint, where one is known, serves from then on.
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
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return tensors, newest.version.step

    @fetched_each
    def get_model_state_dict_iterator(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the newest version, all of one version; nothing where it is not in memory. `.remote`
        yields Ray's references to such pairs.

        Raises:
            RunError: as `get_model_state_dict`; or the version was published as a path.
        """
        state, step = self.get_model_state_dict()
        if isinstance(state, str):
            raise RunError(f"version {step} was published as the path {state!r}, and has no tensors here")
        yield from (state or {}).items()

    @asked
    def get_state_dict_meta(self) -> Call[list[tuple[str, str, tuple[int, ...]]] | None]:
        """Describe the tensors of the last state dict, or of what the weight sync group sends, as (name, dtype such as
        ``bfloat16``, shape), in the order in which they come; None: neither is known.
        """
        return self.client.get_state_dict_meta()

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
        return self.client.setup_weight_sync_group(trainer, master_address, int(master_port), meta, explorers)

    @asked
    def join_weight_sync_group(self, explorer: str, *, after: int = 0) -> Call[WeightSyncGroup]:
        """As an explorer, wait for a group and take a place in it.

        Args:
            explorer: the explorer's name, unique in the run.
            after: the id of the group that it was in before.

        Raises:
            RunError: all places are taken.
            WaitTimeout: the trainer set up none.
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
            trainer_step: the step that the trainer is going to send; of an explorer it means nothing.
            timeout_s: limit, seconds; the configured one unless given.

        Returns:
            The step that is going to be sent. It is the newest version only after `notify_nccl_sync_done`, so that no
            label stands before its bytes. None: there is nobody to wait for, since the trainer, or every explorer that
            had said its status, has stopped.

        Raises:
            RunError: a member of the group died.
            WaitTimeout: names who did not come. Whoever waited is not counted as ready any more.
        """
        member = self._attach(module)
        limit = self.client.timeout_s if timeout_s is None else timeout_s
        return self.client.ready(member, trainer_step, limit)

    @asked
    def notify_nccl_sync_done(self, trainer_step: int, *, attempt: int = 0) -> Call[None]:
        """As the trainer, say that the version was sent to all explorers of the group."""
        return self.client.sent(this_process(TRAINER), Version(attempt, trainer_step))

    @asked
    def coordinate_weight_sync_setup(self, timeout_s: float | None = None) -> Call[None]:
        """Have the trainer's and the explorer's actor enter a process group of the program's own: those that the config
        names, in the run's namespace. The trainer's `get_weight_sync_info` gives (address, port, meta); both are told
        them by `setup_weight_sync_group(address, port, world_size, group_name, timeout_s)`, together; the explorer
        gets the meta by `set_state_dict_meta`.

        Args:
            timeout_s: limit of each of these calls, seconds; the configured one unless given.

        Raises:
            RunError: there is no such actor, or it failed.
            WaitTimeout: one does not answer.
        """
        return self.client.coordinate_weight_sync_setup(timeout_s)

    @asked
    def coordinate_weight_sync_teardown(self) -> Call[None]:
        """Have the explorer's and then the trainer's actor leave that group, by `teardown_weight_sync_group`. One that
        is dead, or fails, is passed over, and logged.
        """
        return self.client.coordinate_weight_sync_teardown()

    @asked
    def add_module(self, module_ref: ActorHandle | None) -> Call[None]:
        """Have the actor serve an actor of the program: it stays until that one is gone, too. A process that calls
        `get_actor` is served anyhow; None is such a process.
        """
        return self.client.add_module(module_ref)
