"""What the saved configuration of a run may have this program run: a resume reads it from a folder that somebody else
may have made.

It may name the classes that our option files name, the tasks, rewards and trackers that come with this program, and
what stands in its own Hydra settings. All else the user names again: the value itself on the command line of the
resume, or the package with `--allow-target`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.composition import compose, inspected
from trinity_sync.config.options import own_targets_of
from trinity_sync.errors import ConfigError

OWN = (
    "trinity_sync.tasks",
    *(f"trinity_sync.tracking.{name}" for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")),
)
"""Packages of this program whose classes and functions any configuration may name."""

_RUN = ("_target_", "class", "()")
"""Keys by which Hydra, and Python's logging that it sets up, are told what to call."""
_IMPORTED = ("pkg://", "ext://")
_LETS_RUN = {
    "trust_remote_code": "that comes with a model",
    # of verl's engine config for Megatron, and of megatron-core's TransformerConfig below it
    "use_dist_checkpointing": "that is pickled beside weights",
    "fp8_quantizer_factory": "of that name",
    "fp4_quantizer_factory": "of that name",
    # of a task with verl's rewards
    "function_path": "of that file",
}
"""Keys by which others are told so, wherever they stand, and which code that is."""
_HARMLESS = re.compile(r"\$\{(?:(?:oc\.env|now|sum):[^${}]*|[^:${}\0]*)\}")
"""Interpolations that come to text or a number, or to what stands in the configuration itself. Others, such as those of
`oc.create`, may come to a `_target_` that stands nowhere. Arguments may be such interpolations, NUL for each; names may
not.
"""
_UNKNOWN = object()
_OF_SWEEPS = {
    ("hydra.launcher._target_", "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"),
    ("hydra.launcher._target_", "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"),
    ("hydra.sweeper._target_", "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"),
    ("hydra.sweeper.sampler._target_", "optuna.samplers.TPESampler"),
}
"""What the options name that we have for sweeps, by key. One run makes use of none."""
_RECORD = "hydra.job.override_dirname"
"""Written by Hydra itself from the overrides, as is `hydra.overrides`."""


@contextmanager
def only_trusted_places(new: Sequence[str], *, allowed: Sequence[str], where: Path) -> Iterator[None]:
    """Inside, Hydra looks for option files in folders alone, or in packages that are allowed or given anew: it imports
    them for that. Arguments and errors as for `only_trusted`.
    """
    with inspected(place=_place_check(new, allowed, where)):
        yield


@contextmanager
def only_trusted(
    overrides: Sequence[str], new: Sequence[str], *, allowed: Sequence[str], where: Path
) -> Iterator[None]:
    """Inside, what Hydra composes of a run's settings names nothing to be run but what is ours, allowed, or given anew;
    and so do the places where it looks for option files.

    Args:
        overrides: all of them, the saved ones and then the new ones.
        new: those that the user has just given.
        allowed: packages or dotted names that may be run, too.
        where: the run's folder, for the error.

    Raises:
        ConfigError: one does, with its key.
    """
    ours = _shipped()
    given = set(_given(new))

    def check(cfg: DictConfig) -> None:
        _check_settings(cfg, ours, overrides, given, allowed, where)

    with inspected(place=_place_check(new, allowed, where), composed=check):
        yield


@dataclass(frozen=True, kw_only=True)
class _Shipped:
    """What our option files come to by themselves: (key, text) of interpolations, and of Hydra's own settings what they
    write, by key, and the names of what they call.
    """

    interpolated: frozenset[tuple[str, str]]
    written: Mapping[str, Any]
    named: frozenset[str]


@cache
def _shipped() -> _Shipped:
    ours = compose(hydra=True)
    hydra = _values(ours.hydra)
    return _Shipped(
        interpolated=frozenset((key, text) for key, text, _ in _interpolated(ours)),
        written=dict(_written(hydra)),
        named=frozenset(name for _, name in _named(hydra, "")),
    )


def _place_check(new: Sequence[str], allowed: Sequence[str], where: Path) -> Callable[[str], None]:
    given = {value for key, value in _given(new) if key.startswith("hydra.searchpath.")}

    def check(place: str) -> None:
        scheme, _, name = place.rpartition("://")
        if scheme not in ("", "file") and place not in given:
            _check("hydra.searchpath", name.replace("/", ".").strip("."), allowed, where)

    return check


def _check_settings(
    cfg: DictConfig,
    ours: _Shipped,
    overrides: Sequence[str],
    given: Collection[tuple[str, Any]],
    allowed: Sequence[str],
    where: Path,
) -> None:
    known = ours.interpolated | set(given)
    for key, text, value in _interpolated(cfg):
        if not ((key, text) in known or key == _RECORD or (key.startswith("hydra.overrides.") and text in overrides)):
            _check_interpolation(key, text, value, where)
    values = _values(cfg)
    hydra = values.pop("hydra")
    hydra.pop("searchpath", None)  # see `only_trusted_places`
    for key, value in _leaves(hydra["job"].get("env_set", {}), "hydra.job.env_set"):
        if (key, value) not in given:
            raise ConfigError(
                f"{key} is {value} in the saved settings of {where}, which programs that are started would heed; where "
                f"you trust it, give {key}=... again"
            )
    for key, value in _written(hydra):
        if ours.written.get(key) != value and (key, value) not in given:
            raise ConfigError(
                f"{key} is {value} in the saved settings of {where}, which says what is written, and where; where you "
                f"trust it, give {key}=... again"
            )
    if hydra["job"].get("chdir") and ("hydra.job.chdir", True) not in given:
        raise ConfigError(
            f"hydra.job.chdir is true in the saved settings of {where}, so that the run's processes would look for "
            "modules in that folder; where you trust it, give hydra.job.chdir=true again"
        )
    for key, name in _named(hydra, "hydra"):
        if name not in ours.named and (key, name) not in given and (key, name) not in _OF_SWEEPS:
            _check(key, name, allowed, where)
    for key, name in _named(values, ""):
        if (key, name) not in given:
            check_saved_target(key, name, allowed, where)
    for key, value in _leaves(values, ""):
        code = _LETS_RUN.get(key.rpartition(".")[2])
        if code is not None and value and (key, value) not in given:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{key}={text} in the saved settings of {where} lets code run {code}; "
                f"where you trust it, give {key}={text} again"
            )


def check_saved_target(key: str, name: str, allowed: Sequence[str], where: Path) -> None:
    """That a class which a run's settings name is one of ours for that place, or allowed.

    Args:
        key: that names it, not one of Hydra's own.
        allowed, where: see `only_trusted`.

    Raises:
        ConfigError: it is not.
    """
    # elsewhere than in its own group a class may be given what it must not be: a model's code to be run
    if name not in own_targets_of(key.partition(".")[0]):
        _check(key, name, (*OWN, *allowed), where)


def _check(key: str, name: str, allowed: Collection[str], where: Path) -> None:
    real = name if _below(name, allowed) else None
    if real is not None:
        # What a module of ours imports is not ours: trinity_sync.tasks.rows.json.loads
        real = _home(name)
    if real is None or not _below(real, allowed):
        raise ConfigError(
            f"{key} is {name} in the saved settings of {where}, which would be imported and run; where you trust it, "
            f"add --allow-target {name.partition('.')[0] if real is None else real}"
        )


def _check_interpolation(key: str, text: str, value: Any, where: Path) -> None:
    left, before = text, ""
    while left != before:
        left, before = _HARMLESS.sub("\0", left), left
    # In the run Hydra's own settings come to more than here; what of the others cannot be resolved is refused as wrong.
    unknown = value is _UNKNOWN and key.startswith("hydra.")
    # Text that looks like one when it is resolved would be resolved again, as Hydra does before it calls anything.
    if "${" in left or unknown or (isinstance(value, str) and "${" in value):
        raise ConfigError(
            f"{key} is {text} in the saved settings of {where}, and what that comes to might be run; where you trust "
            f"it, give {key}=... again"
        )


def _below(name: str, packages: Collection[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _home(name: str) -> str:
    """The module that an object was made in; its name where that cannot be found out: then nothing can be run."""
    try:
        found = get_object(name)
    except Exception:
        return name
    while isinstance(found, partial):
        found = found.func
    return str(getattr(found, "__module__", None) or getattr(found, "__name__", None) or type(found).__module__)


def _values(node: DictConfig) -> Any:
    return OmegaConf.to_container(node, resolve=False)


def _named(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, dotted name) of all that is to be imported, at any depth."""
    if isinstance(value, dict):
        for part, inner in value.items():
            place = f"{key}.{part}" if key else str(part)
            if part in _RUN and isinstance(inner, str):
                yield place, inner
            else:
                yield from _named(inner, place)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _named(inner, f"{key}.{index}")
    elif isinstance(value, str) and value.startswith(_IMPORTED):
        yield key, value.partition("://")[2].replace("/", ".")


def _interpolated(cfg: DictConfig) -> Iterator[tuple[str, str, Any]]:
    """(key, text, value) of all interpolations, at any depth; the value is `_UNKNOWN` where it cannot be known now."""

    def below(node: Any, texts: Any, key: str) -> Iterator[tuple[str, str, Any]]:
        for part, text in texts.items() if isinstance(texts, dict) else enumerate(texts):
            place = f"{key}.{part}" if key else str(part)
            if isinstance(text, dict | list):
                yield from below(node[part], text, place)
            elif isinstance(text, str) and "${" in text:
                try:
                    yield place, text, node[part]
                except OmegaConfBaseException:
                    yield place, text, _UNKNOWN

    yield from below(cfg, _values(cfg), "")


def _written(hydra: Any) -> Iterator[tuple[str, Any]]:
    """(key, value) of what Hydra and Python's logging are told of the files that they write."""
    for part in ("job_logging", "hydra_logging", "output_subdir"):
        yield from _leaves(hydra.get(part), f"hydra.{part}")


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{key}.{part}" if key else str(part))
    else:
        yield key, value


def _given(new: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(key, value) of what stands on the command line itself; choices of options are none: those are files."""
    for override in OverridesParser.create().parse_overrides(list(new)):
        key, value = override.get_key_element().lstrip("+~"), override.value()
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line} is a sweep; give one value here")
        yield from _named(value, key)
        yield from _leaves(value, key)
