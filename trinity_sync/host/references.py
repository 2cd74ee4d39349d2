"""The values of a configuration, with references that this process cannot resolve or must not show."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from trinity_sync.errors import ConfigError
from trinity_sync.host.masking import masked

_FROM_ENVIRONMENT = "\0"

if TYPE_CHECKING:
    Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"
    """A value of the configuration without OmegaConf."""
    Settings: TypeAlias = dict[str, Value]
    """A part of the configuration without OmegaConf, such as the keys of a user's class."""
else:
    Value, Settings = Any, dict[str, Any]  # as fields of the schema: OmegaConf has no recursive types


def read_written(path: Path) -> Value:
    """Read a YAML file of Hydra's, references as they are written. Raises OSError, ValueError, YAMLError."""
    return cast("Value", OmegaConf.to_container(OmegaConf.load(path), resolve=False))


def read_shown(path: Path) -> tuple[str, Settings]:
    """Read the saved settings of a run: as YAML for display, and their values as `resolved` gives them."""
    config = OmegaConf.load(path)
    if not isinstance(config, DictConfig):
        raise ValueError("it is not a mapping")
    return OmegaConf.to_yaml(OmegaConf.create(shown_values(config))), resolved(config)


def read_started_in(path: Path) -> str:
    """Read the working directory of a run from its `hydra.yaml`."""
    return str(OmegaConf.load(path).hydra.runtime.cwd)


def select_values(values: Settings, keys: Sequence[str]) -> list[object]:
    """Return the values of dotted keys, references resolved."""
    config = OmegaConf.create(values)
    return [OmegaConf.select(config, key) for key in keys]


def shown_values(cfg: DictConfig) -> Settings:
    """Return the values for display and for sending: secrets are masked, and references to the environment stay."""
    values: Settings = masked(with_references(cfg))
    return values


def with_references(cfg: DictConfig) -> Settings:
    """Resolve a configuration, except values from the environment, which stay as they are written."""
    OmegaConf.register_new_resolver("oc.env", lambda *_: _FROM_ENVIRONMENT, replace=True)
    try:
        return resolved(cfg)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def resolved(cfg: DictConfig) -> Settings:
    """Resolve a configuration; a value that cannot be resolved stays as it is written."""
    values = _resolved(cfg)
    assert isinstance(values, dict)
    return values


def _resolved(node: object) -> Value:
    if not isinstance(node, DictConfig | ListConfig):
        return cast("Value", node)
    written = cast("Value", OmegaConf.to_container(node, resolve=False))
    if isinstance(written, dict):
        return {str(name): resolved_part(node, name, text) for name, text in written.items()}
    return [resolved_part(node, index, text) for index, text in enumerate(written if isinstance(written, list) else ())]


def resolved_part(node: DictConfig | ListConfig, part: object, written: Value) -> Value:
    """Resolve one part of a node, as `resolved` does."""
    try:
        value = _resolved(node[part])  # type: ignore[index]
    except OmegaConfBaseException:
        return written
    return written if isinstance(value, str) and _FROM_ENVIRONMENT in value else value


# -- the files that a setting names


def path_list(value: object) -> list[str]:
    """Return the paths and patterns of a setting that takes one or a list of them."""
    return list(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def matched_files(value: object) -> list[str]:
    """Return the files that a setting names: by a path, which is not checked, a pattern such as ``data/*.jsonl``, whose
    files are sorted by name, or a list of these. A file and links to it that match one pattern are one file. Raises
    ConfigError, whose text lacks the key, where a pattern matches no file or a file is named twice.
    """
    found: dict[str, tuple[str, int, str]] = {}
    for at, named in enumerate(path_list(value)):
        text = os.path.expanduser(named)  # noqa: PTH111 - the name of an unknown user stays
        matching = glob.has_magic(text) and not os.path.exists(text)  # noqa: PTH110
        files = [named] if not matching else sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))  # noqa: PTH207
        if not files:
            told = "which does not exist and as a pattern matches no file; name an existing one"
            raise ConfigError(f"has {named}, {told}")
        for file in files:
            place = os.path.realpath(os.path.expanduser(file))  # noqa: PTH111
            _, first, by = found.setdefault(place, (file, at, named))
            if first != at:
                raise ConfigError(f"has the file {file} twice, by {by} and by {named}; name it once")
    if not found:
        raise ConfigError("is an empty list; name a file")
    return [file for file, *_ in found.values()]


# -- the names of a run's task and model


_TELLS_NOTHING = re.compile(
    r"(?i)|\d+|\d{4}-\d\d-\d\d.*|[0-9a-f]{40}|(train(ing)?|test|val(id(ation)?)?|eval|data(set)?s?|prompts?|pairs|rows|hf"
    r"|huggingface|snapshots|models?|exports?|checkpoints?|actor|config|final|last|best|merged|(global_step|checkpoint|step)[_-]?\d+)"
)
"""File and folder names that many tasks and models share; the folder above them has a better name."""
_ENDING = re.compile(r"(?i)([-_.]?[\d*?]+-of-[\d*?]+)?(\.(jsonl?|parquet|gz))+$")
_LONGEST_NAME = 40


def task_name(settings: Mapping[str, object]) -> str | None:
    """Return a short name of a run's task from its settings: of its file, else of its class; None: not known. It has
    letters, digits, '.', '_' and '-' only.
    """
    if setting_of(settings, "workload.kind") == "bytes":
        return "bytes"
    path = setting_of(settings, "task.path")
    first = next(iter(path), None) if isinstance(path, list) else path
    kind = str(setting_of(settings, "task._target_") or "").rpartition(".")[2].removesuffix("Task")
    return _path_name(first) or _cut(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind).lower())


def model_name(settings: Mapping[str, object]) -> str | None:
    """Return a short name of a run's model from its settings: of its folder or on the hub, else its family; None: not
    known. Characters as in `task_name`.
    """
    return given_model_name(settings) or _cut(str(setting_of(settings, "model.architecture.model_type") or ""))


def given_model_name(settings: Mapping[str, object]) -> str | None:
    """Return the same of a model that was given by its path or its sizes; None: it is made by the run."""
    return _path_name(setting_of(settings, "model.path")) or _path_name(setting_of(settings, "model.shapes"))


def run_name(settings: Mapping[str, object]) -> str:
    """Return the name of a run that was given none: its task, and its model unless that is made by the run."""
    return "-".join(filter(None, (task_name(settings), given_model_name(settings)))) or "run"


def setting_of(settings: object, key: str) -> object:
    """Return the value of a dotted key; None without one."""
    value: object = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _path_name(path: object) -> str | None:
    """Return the last part of a path that says something about its content."""
    if not isinstance(path, str) or "${" in path:
        return None
    *folders, last = path.replace("\\", "/").rstrip("/").split("/")
    parts = [_cut(part) for part in (_ENDING.sub("", last), *reversed(folders))]
    return next((part for part in parts if part and not _TELLS_NOTHING.fullmatch(part)), parts[0])


def _cut(text: str) -> str | None:
    """Return a text as a part of a run's name."""
    text = text.rpartition("--")[2] if text.startswith("models--") else text  # a folder of the hub's cache
    return re.sub(r"[^\w.-]+", "-", text).strip(".-")[:_LONGEST_NAME].strip(".-") or None
