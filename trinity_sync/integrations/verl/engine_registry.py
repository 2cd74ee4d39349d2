"""verl's engines with our checkpoint manager in place of verl's, registered for the vendor `trinity`.

A verl engine saves and loads through its checkpoint manager, so only the manager is replaced. Two things are added: the
engine tells the manager when the trainer goes on, as the trainer's own files are whole then; and the engine waits for
the copy of the newest save before parameters, optimizer or schedule change or move.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl import remote_copies
from trinity_sync.integrations.verl.at_exit import finish_at_exit
from trinity_sync.integrations.verl.committed_saves import CommittedSaves
from trinity_sync.integrations.verl.local_run import is_in_memory, open_monitor, under_ray
from trinity_sync.integrations.verl.vendor import MEMORY_INTERVAL, RETENTION, VENDOR, say
from trinity_sync.protocol.retention import KeepVersions, Policy, make_policies

if TYPE_CHECKING:
    from trinity_sync.backends.base import Engine

_DEVICES = ["cuda", "cpu"]

_CLASSES = {
    "FSDPEngineWithLMHead": ("language_model", ["fsdp", "fsdp2"]),
    "FSDPEngineWithValueHead": ("value_model", ["fsdp", "fsdp2"]),
    "MegatronEngineWithLMHead": ("language_model", ["megatron"]),
    "MegatronEngineWithValueHead": ("value_model", ["megatron"]),
}
"""verl's classes: the model type and the strategies for which verl registers them."""


_PAST_THE_ENGINE = "verl.experimental.separation.engine_workers"
"""A module whose workers write to the parameters without the engine."""


class SavesThroughUs:
    """Stands before one of verl's engines among the bases of a class."""

    _saves: CommittedSaves | None = None

    def initialize(self) -> None:
        """Make model and optimizer as verl does, and put our manager in. Collective."""
        super().initialize()  # type: ignore[misc]
        self._saves = _saves_of(self)

    def train_mode(self, **kwargs: object) -> AbstractContextManager[None]:
        self._went_on()
        mode: AbstractContextManager[None] = super().train_mode(**kwargs)  # type: ignore[misc]
        return mode

    def eval_mode(self, **kwargs: object) -> AbstractContextManager[None]:
        self._went_on()
        mode: AbstractContextManager[None] = super().eval_mode(**kwargs)  # type: ignore[misc]
        return mode

    def get_per_tensor_param(self, *args: object, **kwargs: object) -> object:
        """As verl's, which also merges adapters into the base weights for a while."""
        self._went_on()
        self._wait_until_copied()
        return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self) -> object:
        self._wait_until_copied()
        return super().optimizer_step()  # type: ignore[misc]

    def lr_scheduler_step(self) -> object:
        self._wait_until_copied()
        return super().lr_scheduler_step()  # type: ignore[misc]

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if model or optimizer:
            self._wait_until_copied()
        super().to(device, model=model, optimizer=optimizer, grad=grad)  # type: ignore[misc]

    def load_checkpoint(self, *args: object, **kwargs: object) -> None:
        self._wait_until_copied()
        super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def save_checkpoint(self, local_path: str, *args: object, **kwargs: object) -> None:
        """Save through our manager. The program's last save is written when this returns, as Ray kills workers at
        once.
        """
        if self._saves is None and is_in_memory(local_path):  # verl's limit of checkpoints would count those on disk
            raise ConfigError(
                f"{MEMORY_INTERVAL}: verl saves the checkpoints of this engine itself; unset the variable"
            )
        self._went_on()
        self._wait_until_copied()
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        if self._saves is not None and _is_last(self):
            self._saves.finish_writing()

    def _went_on(self) -> None:
        if self._saves is not None:
            self._saves.trainer_went_on()

    def _wait_until_copied(self) -> None:
        if self._saves is not None:
            self._saves.wait_until_copied()


def _saves_of(engine: Any) -> CommittedSaves | None:
    """Put our manager into an engine. Return None, with a warning, if the engine keeps verl's manager. Raises
    ConfigError: `RETENTION` names an unknown policy.
    """
    if getattr(engine.engine_config, "forward_only", False):
        return None  # a reference model saves nothing
    opens = partial(open_monitor, policies=policies_in(os.environ))
    try:
        if engine.engine_config.strategy == "megatron":
            from trinity_sync.integrations.verl.megatron_manager import use_in_megatron as use
        else:
            from trinity_sync.integrations.verl.manager import use_in as use  # type: ignore[assignment]
        manager: CommittedSaves = use(engine, opens=opens, lazily=_stays_put(engine))
    except ConfigError as error:
        if dist.get_rank() == 0:
            say(
                f"verl saves the checkpoints of this engine itself: {error}. Where those of another "
                "engine are ours, leave this one's limit (trainer.max_*_ckpt_to_keep) unset: by it verl deletes this "
                "engine's share of steps that are committed"
            )
        return None
    manager.trainer_file = _trainer_file(engine)
    finish_at_exit(manager)
    if under_ray():
        from trinity_sync.actors.calls import end_with_raylet  # imports Ray

        end_with_raylet()
    remote_copies.of_manager(manager)
    return manager


def _trainer_file(engine: Any) -> str | None:
    """Return the file that verl's SFT trainer writes in this process; under Ray the driver writes it."""
    if under_ray() or not engine.is_mp_src_rank_with_outputs():
        return None
    return f"data_{engine.get_data_parallel_rank()}.pt"


def _stays_put(engine: Engine) -> bool:
    """Return whether only the engine's own methods change or move parameters and optimizer. Not with offloading, where
    verl's save moves them out at its end; and not with verl's workers that restore a CPU copy of the model without the
    engine.
    """
    offloads = engine.is_param_offload_enabled or engine.is_optimizer_offload_enabled
    return not offloads and _PAST_THE_ENGINE not in sys.modules


def _is_last(engine: Any) -> bool:
    """Return whether the step just saved is the program's last. Under Ray, also if that is not known. With several
    optimizer updates a step, verl counts updates, as the scheduler does.
    """
    last = getattr(engine.optimizer_config, "total_training_steps", None)
    if last is None or last <= 0:
        return under_ray()
    return bool(last <= max(engine._saves.previous_global_step or 0, _updates(engine)))


def _updates(engine: Any) -> int:
    """Return how many updates the schedule has counted, including those before a resume."""
    scheduler = getattr(engine, "lr_scheduler", None)
    return int(getattr(scheduler, "last_epoch", 0) or getattr(scheduler, "num_steps", 0))


def register(module: ModuleType) -> None:
    """Register an engine of ours for each of verl's engines in a module of verl's."""
    from verl.workers.engine.base import EngineRegistry

    for name, (model_type, strategies) in _CLASSES.items():
        verls = vars(module).get(name)
        if verls is not None:
            EngineRegistry.register(model_type, strategies, device=_DEVICES, vendor=VENDOR)(through_us(verls))


def through_us(engine: type) -> type:
    """Return a subclass of a verl engine that saves through us."""
    return type(f"Trinity{engine.__name__}", (SavesThroughUs, engine), {"__doc__": SavesThroughUs.__doc__})


def policies_in(environment: Mapping[str, str]) -> tuple[Policy, ...]:
    """Read the policies in `RETENTION`: ``POLICY`` or ``POLICY.FIELD=VALUE``, separated by spaces. A checkpoint stays
    if any policy keeps it. Returns none if the variable is not set. Raises ConfigError if an unknown policy or field,
    or a value out of range.
    """
    named: dict[str, dict[str, int | float | str]] = {}
    for word in environment.get(RETENTION, "").split():
        key, has_value, text = word.partition("=")
        policy, _, name = key.partition(".")
        if bool(name) != bool(has_value):
            raise ConfigError(f"{RETENTION} has {word!r}; allowed are POLICY or POLICY.FIELD=VALUE")
        fields = named.setdefault(policy, {})
        if name:
            fields[name] = _value(text)
    if KeepVersions.name in named:
        raise ConfigError(f"{RETENTION}: keep_versions is for runs with sync=checkpoint sync.encoding=delta")
    try:
        return make_policies(named)
    except ConfigError as error:
        raise ConfigError(f"{RETENTION}: {error}") from None


def _value(text: str) -> int | float | str:
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return number if isinstance(number, int | float) else text
