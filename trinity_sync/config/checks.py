"""Checks a composed configuration: missing values, ranges, and rules between fields. `check` collects all problems
before it raises. A rule between fields is skipped while one of its fields is wrong itself, so that one mistake gives
one message.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.util import find_spec
from operator import gt, le, lt
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.composition import plain
from trinity_sync.config.lookup import (
    LABELS,
    OF_ENGINES,
    TARGET,
    build,
    load,
    load_class,
    missing,
    own_labels,
    own_options,
    own_targets,
)
from trinity_sync.config.lora_settings import check_lora
from trinity_sync.config.model_checks import (
    Check,
    Get,
    Problem,
    check_attention,
    check_files,
    check_model,
    check_positions,
    check_validation,
    check_vllm,
    check_vllm_server,
    check_workload,
)
from trinity_sync.config.schema import Config, build_policy
from trinity_sync.errors import ConfigError, near
from trinity_sync.protocol.retention import KeepVersions
from trinity_sync.weights.slots import DEFAULT_ROOT

# base classes of the options of these groups, as text since their packages lie above this one
_CHECKING = {
    "backend": "trinity_sync.backends.option.BackendOption",
    "algorithm": "trinity_sync.trainer.algorithms.base.Algorithm",
}


# base classes of the keys of `checkpoint` that name a class
_SAVING = {
    "checkpoint.monitor": "trinity_sync.checkpoint.monitor.CheckpointMonitor",
    "checkpoint.coordinator": "trinity_sync.checkpoint.coordinator.CheckpointCoordinator",
}


class _UnknownValueError(Exception):
    """A check needs a key that is missing or wrong itself."""


def check(cfg: DictConfig) -> None:
    """Check a composed configuration: missing values, ranges, and rules between fields.

    Checks values, the paths that they name, and the source of users' classes, without importing those. Of other files
    it reads only the model's `config.json`, the headers of its weights, an adapter's `adapter_config.json`, and tables
    in the source of transformers and verl. Starts nothing.
    """
    problems = _find_problems(cfg)
    if problems:
        raise ConfigError(_join(problems))


def check_own_classes(cfg: DictConfig) -> None:
    """Check the users' classes for saving, build a user's backend and algorithm once, and run their checks on a
    configuration that has passed `check`.
    """
    for key, kind in _SAVING.items():
        named = str(OmegaConf.select(cfg, f"{key}.{TARGET}"))
        if named not in own_targets():
            load_class(f"{key}.{TARGET}", named, load(key, kind))
    targets = {group: str(cfg[group][TARGET]) for group in _CHECKING}
    foreign = [group for group, target in targets.items() if target not in own_labels(group).values()]
    if not foreign:
        return
    classes = {
        group: load_class(f"{group}.{TARGET}", target, load(group, _CHECKING[group]))
        for group, target in targets.items()
    }
    for group in foreign:  # first, so that the checks can rely on types
        build(group, plain(cfg[group]), classes[group])
    checks = [check for group in foreign for check in classes[group].all_checks()]
    problems = list(_run([*checks, partial(_check_batch, classes)], partial(OmegaConf.select, cfg)))
    if problems:
        raise ConfigError(_join(problems))


def _join(problems: Sequence[Problem]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    return f"{len(problems)} settings are wrong:\n" + "\n".join(f"  {problem}" for problem in problems)


def _find_problems(cfg: DictConfig) -> list[Problem]:
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        return [Problem(str(error.full_key), f"cannot be resolved: {str(error).splitlines()[0]}")]
    problems = [Problem(key, _missing_text(key)) for key in sorted(OmegaConf.missing_keys(cfg))]
    problems += _field_problems(cfg, "")
    bad = {problem.key for problem in problems}

    def get(key: str) -> object:
        if any(key == other or key.startswith(f"{other}.") for other in bad):
            raise _UnknownValueError
        return OmegaConf.select(cfg, key)

    return problems + list(_run((*_CHECKS, *_checks_of_classes(cfg)), get))


def _checks_of_classes(cfg: DictConfig) -> list[Check]:
    """Return the checks of our own classes, which are light; for users' classes see `check_own_classes`."""
    targets = {group: _target(OmegaConf.select(cfg, group)) or "" for group in _CHECKING}
    classes = {group: load(group, name) for group, name in targets.items() if name in own_labels(group).values()}
    checks = [check for of in classes.values() for check in of.all_checks()]
    if "algorithm" in classes:
        checks.append(_check_explorer_dtype if classes["algorithm"].explores else _check_publishes)
    return [*checks, partial(_check_batch, classes)] if len(classes) == len(_CHECKING) else checks


def _run(checks: Sequence[Check], get: Get) -> Iterator[Problem]:
    for between_fields in checks:
        with suppress(_UnknownValueError):
            yield from between_fields(get)


def _missing_text(key: str) -> str:
    if key in ("retention", "retention.policies"):
        return "names no policy; choose at least one, retention=[keep_all] keeps every checkpoint"
    if key.rpartition(".")[2] == TARGET:
        group = key.partition(".")[0]
        return f"names no class; choose an option of the group, {group}=..., or give a dotted name"
    if key in Config.__dataclass_fields__:
        return f"has no value; choose an option of the group, {key}=..."
    return f"has no value and needs one; give {key}=..."


def _field_problems(node: DictConfig, prefix: str) -> Iterator[Problem]:
    """Yield the values below `node` that are outside the range of their dataclass field."""
    schema = OmegaConf.get_type(node)
    limits = {f.name: f.metadata for f in fields(schema)} if schema is not None and is_dataclass(schema) else {}
    # Hydra accepts '+key=value'; a user's class may have more keys than our option
    closed = bool(limits) and _target(node) in (None, *own_targets())
    for name in map(str, node):
        if OmegaConf.is_missing(node, name):
            continue
        key, value = f"{prefix}{name}", node[name]
        if closed and name not in limits:
            known = ", ".join(known for known in limits if known != TARGET) or "none"
            yield Problem(key, f"is not a setting; {prefix.rstrip('.') or 'the configuration'} has {known}")
        elif isinstance(value, DictConfig):
            yield from _field_problems(value, f"{key}.")
        elif isinstance(value, ListConfig):
            texts = (_limit_text(item, limits.get(name, {})) for item in value)
            yield from (Problem(key, text) for text in texts if text)
        elif text := _limit_text(value, limits.get(name, {})):
            yield Problem(key, text)


def _target(node: object) -> str | None:
    """Return the class that a node names, if it names one."""
    if not isinstance(node, DictConfig) or TARGET not in node or OmegaConf.is_missing(node, TARGET):
        return None
    return str(node[TARGET])


def _limit_text(value: object, limits: Mapping[str, Any]) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}; must be a finite number"
    if value is None or not limits:
        return None
    if "choices" in limits:
        return _choice_text(value, limits["choices"])
    for name, words, wrong in _BOUNDS:
        if name in limits and isinstance(value, int | float) and wrong(value, limits[name]):
            return f"is {value}; must be {words} {limits[name]}"
    return None


_BOUNDS = (("at_least", "at least", lt), ("more_than", "more than", le), ("at_most", "at most", gt))
"""Bounds of a number in the schema, and how a value is found to break them."""


def _choice_text(value: object, choices: Sequence[str]) -> str | None:
    if value in choices:
        return None
    if len(choices) == 1:
        return f"is {value}; this version knows {choices[0]} only"
    text = f"is {value}; must be one of {', '.join(choices)}"
    if value == "False" and "off" in choices:
        # YAML reads a bare off as a boolean
        return text + ' (in a YAML file write "off" with its quotes)'
    return text + near(str(value), choices)


def _check_option(group: str, get: Get) -> Iterator[Problem]:
    """Check that an option's class exists, and that a user's option does not have the label of one of ours."""
    target, label, own = get(f"{group}.{TARGET}"), f"{group}.{LABELS[group]}", own_labels(group)
    if target not in own.values():
        if reason := missing(target):
            yield Problem(f"{group}.{TARGET}", f"is {target}, which cannot be used: {reason}")
        elif group not in OF_ENGINES and target not in own_targets() and (said := get(label)) in own:
            yield Problem(
                label,
                f"is {said}, as events and reports call {own[said]}, but {group}.{TARGET} is {target}; "
                "give that a name of its own",
            )
        return
    said = get(label)
    if text := _choice_text(said, tuple(own)):
        yield Problem(label, text)
    elif own[said] != target:
        named = ", ".join(other for other, of in own.items() if of == target)
        yield Problem(label, f"is {said}, but the option that was chosen is {group}={named}; choose {group}={said}")


def _check_saving(key: str, get: Get) -> Iterator[Problem]:
    """Check that the class for saving exists, and that our own class gets no keys, since it has none."""
    node = get(key)
    target = _target(node)
    if target is None:
        yield Problem(f"{key}.{TARGET}", _missing_text(f"{key}.{TARGET}"))
    elif target not in own_targets():
        if reason := missing(target):
            yield Problem(f"{key}.{TARGET}", f"is {target}, which cannot be used: {reason}")
    else:
        others = (str(name) for name in node if name != TARGET)
        yield from (Problem(f"{key}.{name}", f"is not a setting of {target}") for name in others)


def _check_name(get: Get) -> Iterator[Problem]:
    name = get("name")
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        yield Problem("name", f"is {name!r}; it becomes a folder, so use letters, digits, '.', '_' and '-' only")


def _check_staleness(get: Get) -> Iterator[Problem]:
    interval, staleness = get("sync.interval"), get("sync.max_staleness")
    if staleness < interval - 1:
        yield Problem(
            "sync.max_staleness",
            f"is {staleness}, but with sync.interval={interval} samples lag up to {interval - 1} steps behind; "
            f"set sync.max_staleness={interval - 1} or more, or sync.interval={staleness + 1} or less",
        )


_TAKE_DELTAS = ("hf", "vllm", "bytes")
"""Kinds of explorers. One of a user's own may, if it gives its weights back."""


def _check_encoding(get: Get) -> Iterator[Problem]:
    if get("sync.encoding") == "delta":
        if get(f"sync.{TARGET}") not in own_targets():
            told = "is delta, which a sync mode of your own does not take; set it to auto or full"
            yield Problem("sync.encoding", told)
        if (chosen := get("explorer.kind")) in own_labels("explorer") and chosen not in _TAKE_DELTAS:
            told = f"is delta, which explorer={chosen} does not take; choose explorer=hf, or set it to auto or full"
            yield Problem("sync.encoding", told)


def _check_transport(get: Get) -> Iterator[Problem]:
    if get("sync.mode") == "nccl" and (chosen := get("sync.transport")) in ("tcp", "nixl", "ray"):
        yield Problem("sync.transport", f"is {chosen}, which is for sync=memory; set it to auto, nccl or gloo")
    elif get("sync.transport") == "nixl" and find_spec("nixl") is None:
        told = "is nixl, which is not installed here; install nixl and nixl-cu12 (docs/sync.md), or set it to auto"
        yield Problem("sync.transport", told)


def sync_settings(settings: Mapping[str, object], explorer: str) -> dict[str, object]:
    """Return the settings of a sync mode for a kind of explorers. ``auto`` is ``full`` where one of both may not take
    deltas.
    """
    full = settings["encoding"] == "auto" and (settings[TARGET] not in own_targets() or explorer not in _TAKE_DELTAS)
    return {**settings, **({"encoding": "full"} if full else {})}


def _check_explorer_dtype(get: Get) -> Iterator[Problem]:
    """Check that explorers need not round the weights that they receive."""
    wire, held = get("sync.wire_dtype"), get("explorer.dtype")
    if held not in (wire, "fp32"):
        yield Problem(
            "explorer.dtype",
            f"is {held}, to which explorers would have to round weights that travel in {wire}; set explorer.dtype to "
            f"{wire} or fp32, or sync.wire_dtype={held}",
        )


def _check_batch(classes: Mapping[str, Any], get: Get) -> Iterator[Problem]:
    """Check that a step's sequences can be divided among the ranks."""
    sharing = classes["backend"].sharing_ranks(get)
    if sharing is None:
        return
    ranks, named = sharing
    parts = ranks * get("trainer.mini_batches")
    number, key, counted = classes["algorithm"].sequences(get)
    if number % parts:
        yield Problem(key, f"{counted}; it must be a multiple of {named} x trainer.mini_batches ({parts})")


def _check_optimizer(get: Get) -> Iterator[Problem]:
    betas = get("trainer.betas")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem("trainer.betas", f"is {list(betas)}; must be two numbers, at least 0 and less than 1")
    warmup, steps = get("trainer.warmup_steps"), get("trainer.steps")
    if (epochs := get("trainer.total_epochs")) is not None:  # the start knows the steps, and checks again
        if steps != (default := own_options("trainer")["default"]["steps"]):
            told = f"is {epochs}, but trainer.steps is {steps}; leave one of them out, or set trainer.steps={default}"
            yield Problem("trainer.total_epochs", f"{told} (its default) or trainer.total_epochs=null")
    elif warmup > steps > 0:
        yield Problem(
            "trainer.warmup_steps", f"is {warmup}, more than trainer.steps ({steps}); set it to {steps} or less"
        )


def _check_retention(get: Get) -> Iterator[Problem]:
    for name, node in get("retention.policies").items():
        key = f"retention.policies.{name}"
        if not isinstance(node, DictConfig):
            yield Problem(key, f"is {node}; must hold the fields of a policy, such as {{n: 2}}")
            continue
        target = _target(node)
        if target is not None and target not in own_targets():
            if reason := missing(target):
                yield Problem(f"{key}.{TARGET}", f"is {target}, which cannot be used: {reason}")
            continue  # it is built by `check_inputs`
        try:
            policy = build_policy(str(name), plain(node))
            if isinstance(policy, KeepVersions) and (get("sync.mode"), get("sync.encoding")) != ("checkpoint", "delta"):
                told = "is for sync=checkpoint sync.encoding=delta, where versions are files; choose these"
                yield Problem(key, f"{told}, or leave keep_versions out of retention")
            elif isinstance(policy, KeepVersions) and get("sync.verify") != "full":
                yield Problem(
                    "sync.verify", f"is {get('sync.verify')}; keep_versions compares digests, so set it to full"
                )
        except ConfigError as error:
            # policies know their ranges and name the key themselves
            key, _, text = str(error).partition(" ")
            yield Problem(key, text)


def _check_store(get: Get) -> Iterator[Problem]:
    store = get("sync.store")
    if store is None:
        return
    # fsspec, and the client of the place, are imported only where there is a store
    from trinity_sync.host.urls import are_same, place_problem

    key, none = "sync.store", ", or sync.store=null"
    if problem := place_problem(store):
        yield Problem(key, problem)
    elif (mirror := get("checkpoint.mirror")) and are_same(mirror, store):
        yield Problem(key, "is the place of checkpoint.mirror, too; name another folder or URL for one of the two")
    if get("sync.mode") != "checkpoint" or get(f"sync.{TARGET}") not in own_targets():
        yield Problem(key, f"is for sync=checkpoint, where versions are files; choose sync=checkpoint{none}")
    elif get("sync.verify") != "full":
        yield Problem("sync.verify", f"is {get('sync.verify')}; followers compare digests, so set it to full{none}")
    if get("workload.kind") == "bytes":
        yield Problem(key, f"is for models, and workload=bytes has none; choose another workload{none}")


def _check_publishes(get: Get) -> Iterator[Problem]:
    """Check what needs versions, for an algorithm that publishes none."""
    if get("sync.store") is not None:
        yield Problem(
            "sync.store", "is for versions, and this algorithm has no explorers and publishes none; set it to null"
        )


def _check_mirror(get: Get) -> Iterator[Problem]:
    mirror = get("checkpoint.mirror")
    if mirror is None:
        return
    # fsspec, and the client of the place, are imported only where there is a mirror
    from trinity_sync.host.urls import place_problem

    if problem := place_problem(mirror):
        yield Problem("checkpoint.mirror", problem)
    if "protocol" in get("checkpoint.mirror_options"):
        yield Problem(
            "checkpoint.mirror_options.protocol",
            "would take the place of what checkpoint.mirror names; say it there, such as s3://bucket/run",
        )


def _check_folder(key: str, get: Get) -> Iterator[Problem]:
    """Check that a folder exists or can be made."""
    folder = get(key)
    if folder is None:
        return
    if folder.startswith("~"):
        yield Problem(key, f"is {folder}, but '~' cannot be expanded here; write the whole path")
        return
    nearest = Path(folder).absolute()
    while not os.access(nearest, os.F_OK):
        nearest = nearest.parent
    # it accepts no files from any user
    of_kernel = any(map(nearest.is_relative_to, ("/proc", "/sys"))) and not os.statvfs(nearest).f_blocks
    if not nearest.is_dir():
        yield Problem(key, f"is {folder}, but {nearest} is a file; name a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK) or of_kernel:
        yield Problem(key, f"is {folder}, but {nearest} cannot be written to; name a folder of your own")


def _check_shared_memory(get: Get) -> Iterator[Problem]:
    """Check the folder of the slots, except on other machines, and except the default, in whose place the run's folder
    is used.
    """
    folder = get("sync.shm_dir")
    if get("cluster.address") is None and folder != DEFAULT_ROOT:
        if not os.access(folder, os.F_OK):
            yield Problem("sync.shm_dir", f"is {folder}, which does not exist; name a folder in memory: {DEFAULT_ROOT}")
        yield from _check_folder("sync.shm_dir", get)


def _check_memory_interval(get: Get) -> Iterator[Problem]:
    if get("checkpoint.memory_interval") and get("cluster.address") is not None:
        yield Problem(
            "checkpoint.memory_interval",
            f"is {get('checkpoint.memory_interval')}, but with cluster.address the ranks may be on other machines than "
            "the driver's memory; set 0, and a shorter checkpoint.interval",
        )


def _check_task(get: Get) -> Iterator[Problem]:
    task = get("task")
    if not isinstance(task, DictConfig) or not isinstance(task.get("_target_"), str):
        yield Problem(
            "task._target_", "names no class; choose an option such as task=copy_digits, or give a dotted name"
        )
        return
    ours = is_dataclass(OmegaConf.get_type(task))  # the path of another task may be anything
    if "path" in task and (isinstance(path := get("task.path"), str) or ours):
        yield from check_files("task.path", path)
    needs = re.search(r"trinity_sync\.tasks\.rewards\.([a-z]\w*)", str(task.get("reward")))
    if ours and needs and task.get("answer_key", "") is None:
        told = f"is null, but the reward {needs[1]} compares responses with an answer; name the field of the answers"
        yield Problem("task.answer_key", f"{told}, or choose another task.reward")


_CHECKS: tuple[Check, ...] = (
    *(partial(_check_option, group) for group in LABELS),
    _check_name,
    _check_staleness,
    _check_encoding,
    _check_transport,
    _check_optimizer,
    _check_retention,
    *(partial(_check_saving, key) for key in _SAVING),
    _check_mirror,
    _check_store,
    *(partial(_check_folder, key) for key in ("checkpoint.dir", "cluster.temp_dir", "tracker.trackio.folder")),
    _check_shared_memory,
    _check_memory_interval,
    check_workload,
    check_model,
    check_attention,
    check_positions,
    check_lora,
    check_vllm,
    check_vllm_server,
    _check_task,
    check_validation,
)
