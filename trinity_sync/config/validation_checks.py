"""Validation in a configuration, `task.validation`: whether there is one, and the checks on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trinity_sync.config.problems import Get, Problem
from trinity_sync.config.training_schema import LossValidationConfig, ValidationConfig

KEY = "task.validation"
ROWS = "rows"
"""The key that a validation by the loss has in place of `prompts`."""


def validates(task: Mapping[Any, Any] | DictConfig) -> bool:
    """Whether a task's node asks for validation: by a file, or, where the task has none, by a number of prompts."""
    asked = task.get("validation") or {}
    return asked.get("path") is not None if "path" in task else _count(asked) is not None


def _count(asked: Mapping[Any, Any] | DictConfig) -> int | None:
    """How many prompts or rows are asked for."""
    found: int | None = asked.get(ROWS if ROWS in asked else "prompts")
    return found


def check_validation(get: Get) -> Iterator[Problem]:
    """That what is asked for can be validated, at steps that have a version, and that what goes by it has it."""
    task = get("task")
    if not isinstance(task, DictConfig) or not isinstance(task.get("validation"), DictConfig):
        yield from _check_best(get, None)
        return
    if not validates(task):
        if (count := _count(task.validation)) is not None:
            key = f"{KEY}.{ROWS if ROWS in task.validation else 'prompts'}"
            yield Problem(key, f"is {count}, but there is no file; give {KEY}.path")
        yield from _check_best(get, None)
        return
    if get("workload.kind") != "train":
        yield Problem(KEY, f"is given, but with workload={get('workload.kind')} nothing is generated; leave it out")
        return
    by_loss = ROWS in task.validation
    schema, base = (LossValidationConfig, "loss_validation") if by_loss else (ValidationConfig, "validation")
    needed = schema.__dataclass_fields__.keys() - {"prompts", "path", ROWS}
    if lacking := sorted(name for name in needed if get(f"{KEY}.{name}") is None):
        yield Problem(
            f"{KEY}.{lacking[0]}",
            f"has no value; list '/base/{base}@validation' among the defaults of the task's option file",
        )
        return
    path = task.validation.get("path")
    if path is not None and not Path(path).is_file():
        yield Problem(f"{KEY}.path", f"is {path}, which is no file; name an existing one")
    many, temperature = get(f"{KEY}.samples_per_prompt"), get(f"{KEY}.temperature")
    if not by_loss and many > 1 and temperature == 0:
        yield Problem(
            f"{KEY}.samples_per_prompt",
            f"is {many}, but at temperature 0 all samples of a prompt are the same; set it to 1, or give "
            f"{KEY}.temperature",
        )
    interval, published = get(f"{KEY}.interval"), get("sync.interval")
    if interval % published:
        yield Problem(
            f"{KEY}.interval",
            f"is {interval}, but only versions can be validated, one every sync.interval={published} steps; make it a "
            "multiple of that",
        )
    yield from _check_best(get, interval)


def _check_best(get: Get, interval: int | None) -> Iterator[Problem]:
    """That checkpoints which are kept by a metric of the validation have it."""
    saved = get("checkpoint.interval")
    for name, node in get("retention.policies").items():
        metric = node.get("metric") if isinstance(node, DictConfig) else None
        if not isinstance(metric, str) or not metric.startswith("val/"):
            continue
        key = f"retention.policies.{name}.metric"
        if interval is None:
            yield Problem(key, f"is {metric}, but nothing is validated; see {KEY}")
        elif saved and (not interval or saved % interval):
            yield Problem(
                key,
                f"is {metric}, which not all checkpoints would have, with checkpoint.interval={saved} and "
                f"{KEY}.interval={interval}; make the first a multiple of the second",
            )
