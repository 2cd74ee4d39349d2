"""Composing a configuration outside of a Hydra entry: for resume, for tools and for tests."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.overrides import as_typed, parse, quote

_SEARCH_PATH = "hydra.searchpath"


def conf_dir() -> Path:
    """Return the folder of the option files: inside an installed package, else `conf/` beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def compose(
    overrides: Sequence[str] = (), *, config_name: str = "config", config_dir: Path | None = None, hydra: bool = False
) -> DictConfig:
    """Compose a configuration as the command line would, without running anything.

    Args:
        overrides: as on the command line, such as ``["sync=nccl", "trainer.steps=10"]``.
        config_name: the primary config.
        config_dir: one more folder of option files, and maybe of the primary config, as `--config-dir` gives.
        hydra: with Hydra's own settings, below the key `hydra`.

    Raises:
        HydraException, OmegaConfBaseException: an override names what is not there, or has the wrong type.
    """
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        if config_dir:
            _look_in(config_dir)
        return hydra_compose(config_name, overrides=list(map(as_typed, overrides)), return_hydra_config=hydra)


def completions(words: Sequence[str]) -> list[str]:
    """What the last word of a command line of Hydra's may become: groups, their options, keys and values.

    Args:
        words: the arguments so far; the last one is not complete yet.

    Raises:
        HydraException, OmegaConfBaseException, SystemExit: those before it are wrong.
    """
    options, _ = get_args_parser().parse_known_args(list(words[:-1]))
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        if options.config_dir:
            _look_in(Path(options.config_dir))
        loader = GlobalHydra.instance().config_loader()
        return DefaultCompletionPlugin(loader)._query(options.config_name or "config", " ".join(words))


def _look_in(folder: Path) -> None:
    """What `hydra.main` does with `--config-dir`."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    loader.get_search_path().prepend("command-line", f"file://{folder.resolve()}", anchor="schema")
    loader.repository.initialize_sources(loader.get_search_path())


@contextmanager
def inspected(
    *, place: Callable[[str], object], composed: Callable[[DictConfig], object] = lambda cfg: None
) -> Iterator[None]:
    """Inside, what Hydra composes is inspected before it makes any use of it, by `compose` as by `hydra.main`. What is
    looked at by one composition may not be what another comes to: options can depend on the time of day.

    Args:
        place: is given each place where `hydra.searchpath` has Hydra look for option files, before it looks there.
        composed: is given each configuration, with Hydra's own settings. What they raise ends the composing.
    """
    initialize_sources, load_configuration = ConfigRepository.initialize_sources, ConfigLoaderImpl.load_configuration

    def looking(self: ConfigRepository, config_search_path: ConfigSearchPath) -> None:
        for element in config_search_path.get_path():
            if element.provider.startswith(_SEARCH_PATH):
                place(element.path)
        initialize_sources(self, config_search_path)

    def loading(self: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> DictConfig:
        cfg = load_configuration(self, *args, **kwargs)
        composed(cfg)
        return cfg

    ConfigRepository.initialize_sources = looking  # type: ignore[method-assign]
    ConfigLoaderImpl.load_configuration = loading  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigRepository.initialize_sources = initialize_sources  # type: ignore[method-assign]
        ConfigLoaderImpl.load_configuration = load_configuration  # type: ignore[method-assign]


def plain(node: DictConfig) -> dict[str, Any]:
    """A node of the config as plain values, interpolations resolved: what is sent to other processes."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def dtype_name(short: str) -> str:
    """The config's dtype names (``bf16``) as safetensors names them (``BF16``)."""
    return {"bf16": "BF16", "fp32": "F32", "fp16": "F16"}[short]


# Paths in a configuration. Relative ones count from the folder in which the run was started, also when it goes on.


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
