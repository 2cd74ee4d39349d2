"""Builds objects that the user names by `_target_`, and turns their errors into messages with the key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trinity_sync.config.checks import check_own_classes, sync_settings
from trinity_sync.config.composition import plain, section
from trinity_sync.config.lookup import TARGET, build, load, missing, own_options
from trinity_sync.config.model_checks import KEY, ROWS, validates
from trinity_sync.config.schema import Config, retention_policies
from trinity_sync.errors import ConfigError, TrinityError
from trinity_sync.host.origin import end_text, origin
from trinity_sync.host.references import Settings, setting_of

if TYPE_CHECKING:
    from trinity_sync.tasks.rewards import RewardSettings

# as text, since its package lies above this one
_SYNC_MODE = "trinity_sync.sync.base.SyncMode"


def check_inputs(cfg: DictConfig, task: object = None) -> object:
    """Build everything once that a user's class may refuse: backend, algorithm, retention policies, sync mode and task.
    Reads the task's file line by line and imports its reward function, before Ray starts. Returns the task.
    """
    check_own_classes(cfg)
    retention_policies(cfg)
    task = build_task(cfg.task, cfg.seed) if task is None else task
    algorithm = load(f"algorithm.{TARGET}", cfg.algorithm[TARGET])
    lacking = [name for name in algorithm.task_methods if not callable(getattr(task, name, None))]
    if lacking:
        raise ConfigError(
            f"task._target_ is {cfg.task._target_}, which has no {' and no '.join(lacking)}(), "
            f"but algorithm={cfg.algorithm.kind} needs it; use a task such as {algorithm.tasks}"
        )
    mode = build("sync", sync_settings(plain(cfg.sync), cfg.explorer.kind), load("sync", _SYNC_MODE))
    if mode.ranks_take_part and cfg.trainer.schedule == "free":
        raise ConfigError(
            f"trainer.schedule is free, but in a round of sync={cfg.sync.mode} the trainer's ranks take part, so they "
            "would wait for loads; use sync=memory or sync=checkpoint, or set trainer.schedule=lockstep"
        )
    validation_task(cfg)
    return task


def build_task(node: DictConfig | Mapping[str, object], seed: int) -> Any:
    """Build the task from all keys of its node and the seed. Raises errors as `instantiate_target`."""
    given: Mapping[str, object] = plain(node) if isinstance(node, DictConfig) else node
    values = {**given}
    values.pop("validation", None)  # the task itself does not need it
    _check_text(values, "task")
    parameters = _parameters(values.get(TARGET))
    ours = _judging(values, parameters)
    _leave_out_keys_of_ours(values, parameters)
    try:
        return instantiate_target(OmegaConf.create({"task": values}).task, seed=seed, **ours)
    except ConfigError as error:
        named = setting_of(values, f"reward.{TARGET}")  # of a missing function Hydra reports the key of the task
        if "which cannot be used" in str(error) and isinstance(named, str) and (reason := missing(named, "function")):
            raise ConfigError(f"task.reward.{TARGET} is {named}, which cannot be used: {reason}") from None
        raise


def _parameters(target: object) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a task's constructor; empty if they are unknown."""
    if isinstance(target, str) and missing(target) is None:
        with suppress(TypeError, ValueError):  # such as a class written in C
            return inspect.signature(load(f"task.{TARGET}", target)).parameters
    return {}


def _judging(values: MutableMapping[str, object], parameters: Collection[str]) -> dict[str, RewardSettings]:
    """Take our keys out of `task.reward` for a task with a parameter `judging`; for other tasks they are its own."""
    reward = values.get("reward")
    if not isinstance(reward, dict) or "judging" not in parameters:
        return {}
    from trinity_sync.tasks.rewards import RewardSettings  # imports numpy

    judging, values["reward"] = RewardSettings.taken_from(reward)
    return {"judging": judging}


def _leave_out_keys_of_ours(values: MutableMapping[str, object], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Remove keys of one of our options if the user has replaced its class (``task._target_=...``) by one that has no
    such parameters.
    """
    options = own_options("task").values()
    if not parameters or any(values[TARGET] == option[TARGET] for option in options):
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in {key for option in options for key in option if key != TARGET} - set(parameters):
        values.pop(key, None)


def validation_task(cfg: DictConfig | Config) -> Any:
    """Build the task (`ValidatingTask`) or the rows that a run validates on; None: it does not validate."""
    values = _task_values(cfg)
    if not validates(values):
        return None
    asked = section(values, "validation")
    file = {"path": asked["path"]} if "path" in values else {}
    task = build_task(values | file, cfg.seed)
    method = "validation_rows" if ROWS in asked else "validation_prompts"
    if not hasattr(task, method):
        raise ConfigError(f"{KEY} is given, but task._target_={values[TARGET]} has no {method}()")
    return task


def validation_items(cfg: DictConfig | Config, task: Any) -> list[Any]:
    """Return the prompts of a `validation_task`, or its rows for a validation by the loss."""
    asked = section(_task_values(cfg), "validation")
    by_loss = ROWS in asked
    found: list[object] = task.validation_rows(asked[ROWS]) if by_loss else task.validation_prompts(asked["prompts"])
    return found


def _task_values(cfg: DictConfig | Config) -> Settings:
    return plain(cfg.task) if isinstance(cfg.task, DictConfig) else cfg.task


def _check_text(value: object, key: str) -> None:
    """Refuse text that Hydra would resolve a second time and so might build something else."""
    if isinstance(value, dict | list):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_text(inner, f"{key}.{part}")
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(f"{key} is {value}; a text with '${{' in it cannot be handed to a task")


def instantiate_target(node: DictConfig, **kwargs: object) -> object:
    """Build the object that a node names by `_target_`. The only call of Hydra's `instantiate`."""
    try:
        return instantiate(node, **kwargs)
    except (Exception, SystemExit) as error:  # a module may exit when it is imported
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, TrinityError):
                raise cause from None
            cause = cause.__cause__
        raise ConfigError(_target_text(node, error)) from error


def _target_text(node: DictConfig, error: BaseException) -> str:
    text = str(error)
    named = re.search(r"full_key: (\S+)", text)
    key = named[1] if named else str(node._get_full_key(None) or "")
    key = re.sub(r"(?<=functions)(?=\d)", ".", key)  # Hydra's name of a list's item
    target = OmegaConf.select(node._get_root(), f"{key}.{TARGET}")
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    reason = " ".join((end_text(inner) if origin(inner) is not None else str(inner)).split())
    return f"{key}.{TARGET} is {target}, which cannot be used: {reason.partition(' full_key:')[0]}"
