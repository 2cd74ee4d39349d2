"""The values of a configuration, with references that this process cannot resolve or must not show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

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
        return {str(name): _part(node, name, text) for name, text in written.items()}
    return [_part(node, index, text) for index, text in enumerate(written if isinstance(written, list) else ())]


def _part(node: DictConfig | ListConfig, part: object, written: Value) -> Value:
    try:
        value = _resolved(node[part])  # type: ignore[index]
    except OmegaConfBaseException:
        return written
    return written if isinstance(value, str) and _FROM_ENVIRONMENT in value else value
