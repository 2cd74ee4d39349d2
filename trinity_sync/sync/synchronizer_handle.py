"""The `Synchronizer` of programs: a handle of the run's `SynchronizerActor`, found or created by name.

Explorers wait for versions and fetch them by it; the trainer of a program without slots publishes by it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray

from trinity_sync.actors.calls import Call, DeathError, this_process
from trinity_sync.actors.handles import asked, fetched, forwarded
from trinity_sync.actors.synchronizer_client import StoredState, SynchronizerClient
from trinity_sync.errors import ConfigError, RunError, WaitLimit
from trinity_sync.protocol.choices import plain
from trinity_sync.protocol.rounds import TRAINER, RoundMember, WeightSyncGroup
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.settings import SynchronizerConfig, check_limit, synchronizer_config
from trinity_sync.sync.synchronizer import ACTOR_NAME, SynchronizerActor, create
from trinity_sync.weights.shards import Described

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle

    from trinity_sync.sync.state_dicts import Tensors

T = TypeVar("T")

#: The calls by which actors watch this process. They last as long as the process.
_attached: dict[tuple[str, RoundMember], tuple[Call[None], Call[None]]] = {}


class Synchronizer:
    """A thin, picklable client of the actor. Make it with `get_actor`; every call is bounded by the actor's timeout.
    Each method is called plainly, or with `.remote`, which returns Ray's reference to the answer, to be awaited.

        synchronizer = Synchronizer.get_actor(SynchronizerConfig(timeout_s=60), namespace="run")  # the driver
        synchronizer.set_model_state_dict(model.state_dict(), 12)  # the trainer
        state_dict, version = Synchronizer.get_actor(namespace="run").get_model_state_dict()  # an explorer
    """

    def __init__(self, actor: ActorHandle, timeout_s: float) -> None:
        self.client = SynchronizerClient(actor, timeout_s)

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
        """Return the run's synchronizer. With a config or a setting it is created where there is none; without them it
        has to exist. The actor serves the calling process from now on, and ends when the last process that it serves
        has ended.

        Args:
            config: a `SynchronizerConfig`, or the `Config` of a Trinity-RFT program.
            namespace: Ray namespace; None: the config's, else that of the program.
            timeout_s: the setting of that name, in place of the config's. An existing actor keeps its own.
            checkpoint_dir: the setting of that name, likewise.

        Raises:
            ConfigError: the config is neither of these, or a field of it is wrong; or the existing synchronizer has
                another checkpoint folder.
            RunError: there is no synchronizer, and no config or setting to create it.
        """
        settings = SynchronizerConfig() if config is None else synchronizer_config(config)
        namespace = namespace or settings.namespace
        if timeout_s is not None:
            check_limit("timeout_s", timeout_s)
            settings = replace(settings, timeout_s=timeout_s)
        if checkpoint_dir is not None:
            settings = replace(settings, checkpoint_dir=str(Path(checkpoint_dir).absolute()))
        limit_s = WaitLimit(settings.timeout_s, settings.min_rate_mbps)  # refuses a wrong rate
        try:
            actor = ray.get_actor(ACTOR_NAME, namespace=namespace)
            its: SynchronizerConfig = Call(actor.settings.remote(), "the synchronizer", "tell its settings").result(60)
        except (ValueError, DeathError):  # there is none, or it has just ended
            if config is None and timeout_s is None and checkpoint_dir is None:
                raise RunError(
                    f"there is no {ACTOR_NAME!r} in Ray namespace {namespace!r}: pass a config to create it"
                ) from None
            its = replace(settings, namespace=namespace or ray.get_runtime_context().namespace)
            actor = create(its)
        else:
            limit_s = WaitLimit(its.timeout_s, its.min_rate_mbps)
            ours, theirs = settings.checkpoint_dir, its.checkpoint_dir
            if ours is not None and theirs is not None and Path(ours).absolute() != Path(theirs).absolute():
                raise ConfigError(
                    f"the synchronizer of Ray namespace {namespace!r} is that of the run in {theirs}, which is not "
                    f"over; the checkpoint folder here is {ours}"
                )
        found = cls(actor, limit_s)
        found._attach(_process_name())
        return found

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

    # -- versions and statuses

    get_latest_model_version = forwarded(SynchronizerActor.get_latest_model_version)
    """`()`: the step of the newest version, -1 before the first."""
    notify_no_new_model_state_dict = forwarded(SynchronizerActor.notify_no_new_model_state_dict)
    """`()`: no version comes now; ends the waits for one that are under way."""
    set_trainer_status = forwarded(SynchronizerActor.set_trainer_status)
    """`(status)`: running, requires_sync or stopped, as text, as an enum's member or as its name. `stopped` ends all
    waits for versions, after the commits that are under way.
    """
    get_trainer_status = forwarded(SynchronizerActor.get_trainer_status)
    """`()`: the trainer's last status."""
    trainer_requires_weight_sync = forwarded(SynchronizerActor.trainer_requires_weight_sync)
    """`()`: whether the trainer waits for a broadcast; None: it has stopped."""
    get_explorer_status_counts = forwarded(SynchronizerActor.get_explorer_status_counts)
    """`()`: the number of explorers in each status, of living processes."""
    explorer_requires_sync = forwarded(SynchronizerActor.explorer_requires_sync)
    """`()`: whether an explorer waits for a version or a broadcast."""

    @asked
    def wait_new_model_state_dict(self, current_version: int) -> Call[int]:
        """Wait for a step past `current_version` and return it. The explorer requires sync while it waits.

        Returns:
            `current_version` itself where the trainer has stopped, or calls `notify_no_new_model_state_dict` meanwhile.
            Before the first version the answer to -1 is 0, at once: the weights that the explorer began with.

        Raises:
            RunError: the newest version is an earlier one.
            WaitTimeout: no version came within the configured timeout.
        """
        return self.client.wait_new_model_state_dict(self._attach(_process_name()), current_version)

    @asked
    def set_explorer_status(self, status: object, old_status: object = None) -> Call[None]:
        """Record that one explorer of this process changes from `old_status` (None: it is new) to `status`. It counts
        while the process lives. Statuses as for `set_trainer_status`.
        """
        process = self._attach(_process_name())
        return self.client.set_explorer_status(process, plain(status), plain(old_status))

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
            raise RunError(f"{error}, the process that published them has ended; {instead}") from error
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

    get_state_dict_meta = forwarded(SynchronizerActor.get_state_dict_meta)
    """`()`: the tensors of the last state dict, or of the weight sync group, as (name, dtype such as ``bfloat16``,
    shape), in order; None: neither is known.
    """
    get_latest_model_path = forwarded(SynchronizerActor.get_latest_model_path)
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
            master_address: host of a store that serves already.
            master_port: its port.
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

    coordinate_weight_sync_setup = forwarded(SynchronizerActor.coordinate_weight_sync_setup)
    """`(timeout=None)`: have the trainer's and the explorer's actors, as the config names them, enter a process group:
    `get_weight_sync_info` of the trainer gives (address, port, meta), `setup_weight_sync_group(address, port,
    world_size, group_name, timeout_s)` is called on both concurrently, `set_state_dict_meta(meta)` on the explorer.
    RunError: an actor does not exist, dies or fails; WaitTimeout: one does not answer within `timeout` seconds (None:
    the configured timeout).
    """
    coordinate_weight_sync_teardown = forwarded(SynchronizerActor.coordinate_weight_sync_teardown)
    """`()`: have the explorer and then the trainer leave that group, by `teardown_weight_sync_group`. An actor that is
    dead, fails, or takes more than half of the configured timeout, is logged and skipped.
    """
    add_module = forwarded(SynchronizerActor.add_module)
    """`(module_ref)`: serve an actor of the program too, until it ends. None: a process that has called `get_actor`,
    which is served already.
    """


def _process_name() -> str:
    return f"process {os.getpid()} of {platform.node()}"


def _own(found: tuple[dict[str, torch.Tensor] | str | None, int]) -> tuple[dict[str, torch.Tensor] | str | None, int]:
    """Copy the tensors of an answer: a view would be pickled with its whole bucket, once per tensor."""
    state, step = found
    return {name: one.clone() for name, one in state.items()} if isinstance(state, dict) else state, step
