"""Paths in a configuration. Relative ones count from the folder in which the run was started, also when it goes on."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.overrides import parse, quote

RESUME_FROM = "checkpoint.resume_from"
"""Counts in the digest as it is given, so that it is put together where it is read."""
PATHS = (
    "checkpoint.dir",
    "checkpoint.mirror",
    "model.path",
    "model.shapes",
    "model.lora.path",
    "algorithm.kl.reference",
    "task.path",
    "task.validation.path",
    "task.reward.function_path",
    "cluster.temp_dir",
)
_OR_NAMES = {"model.path": Path.exists, "model.shapes": Path.is_file, "algorithm.kl.reference": Path.exists}
"""Of these, what may be a name as well, and which paths are none: a model on the hub, or one whose sizes are known."""


def anchored(cfg: DictConfig, folder: Path) -> DictConfig:
    """Return a configuration in which relative paths of a run are absolute where they would be looked for elsewhere,
    and those that begin with ``~/`` everywhere.

    Args:
        cfg: composed; stays as it is.
        folder: in which the run was started.
    """
    found = copy.deepcopy(cfg)
    for key in PATHS:
        with suppress(OmegaConfBaseException):  # the checks tell it
            value = OmegaConf.select(found, key)
            if isinstance(value, str) and (value.startswith("~") or folder.absolute() != Path.cwd()):
                OmegaConf.update(found, key, _absolute(key, value, folder))
    return found


def from_here(overrides: Sequence[str], folder: Path) -> list[str]:
    """Return overrides for a run that was started in another folder, with relative paths as they are meant here.

    Args:
        overrides: as the user has just given them.
        folder: in which the run was started.

    Raises:
        HydraException: one cannot be parsed.
    """
    here = Path.cwd()
    return list(overrides) if folder.absolute() == here else [_from(here, text) for text in overrides]


def _from(here: Path, text: str) -> str:
    override = parse(text)
    name, value = override.get_key_element(), override.value()
    key = name.lstrip("+")
    if key not in (*PATHS, RESUME_FROM) or not isinstance(value, str) or "${" in value:
        return text
    place = _absolute(key, value, here)
    return text if place == value else f"{name}={quote(place)}"


def _absolute(key: str, value: str, folder: Path) -> str:
    """What is no path stays: a URL, what a check refuses, and what is a name and not found in that folder."""
    if not value.strip() or "://" in value:
        return value
    if value.startswith("~"):
        return os.path.expanduser(value)  # noqa: PTH111 - a name that nobody has stays
    place = folder / value
    return value if is_name(key, place) else str(place)


def is_name(key: str, place: Path) -> bool:
    """Return whether a setting that may be a path or a name is a name: nothing is at the path."""
    is_there = _OR_NAMES.get(key, lambda place: True)
    with suppress(OSError):
        return not is_there(place)
    return False
