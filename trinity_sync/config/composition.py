"""Composes a configuration outside a Hydra entry: for resume, for tools and for tests. Also resolves relative paths."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.overrides import as_typed, as_value, parse
from trinity_sync.errors import ConfigError
from trinity_sync.host.process import replaced
from trinity_sync.host.references import Settings, Value, matched_files, path_list, resolved_part, run_name

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

    Raises:
        HydraException, OmegaConfBaseException: an override has an unknown name or a wrong type.
    """
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        if config_dir:
            _look_in(config_dir)
        return hydra_compose(config_name, overrides=list(map(as_typed, overrides)), return_hydra_config=hydra)


def completions(words: Sequence[str]) -> list[str]:
    """Return the completions of the last word of a Hydra command line: groups, their options, keys and values; none
    where an earlier word is wrong, which the run will report.
    """
    try:
        options, _ = get_args_parser().parse_known_args(list(words[:-1]))
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            if options.config_dir:
                _look_in(Path(options.config_dir))
            loader = GlobalHydra.instance().config_loader()
            return DefaultCompletionPlugin(loader)._query(options.config_name or "config", " ".join(words))
    except (HydraException, OmegaConfBaseException, SystemExit, AssertionError, ValueError):
        return []


def _look_in(folder: Path) -> None:
    """Add a folder of option files, as `hydra.main` does for `--config-dir`."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    loader.get_search_path().prepend("command-line", f"file://{folder.resolve()}", anchor="schema")
    loader.repository.initialize_sources(loader.get_search_path())


@contextmanager
def inspected(
    *,
    place: Callable[[str], object] = lambda path: None,
    composed: Callable[[DictConfig], object] = lambda cfg: None,
) -> Iterator[None]:
    """Within the block, inspect each composition of Hydra (by `compose` or `hydra.main`) before it is used. Inspecting
    one composition beforehand would not be enough: options can depend on the time of day.
    """
    initialize_sources, load_configuration = ConfigRepository.initialize_sources, ConfigLoaderImpl.load_configuration

    def looking(self: ConfigRepository, config_search_path: ConfigSearchPath) -> None:
        for element in config_search_path.get_path():
            if element.provider.startswith(_SEARCH_PATH):
                place(element.path)
        initialize_sources(self, config_search_path)

    def loading(self: ConfigLoaderImpl, *args: object, **kwargs: object) -> DictConfig:
        cfg = load_configuration(self, *args, **kwargs)  # type: ignore[arg-type]
        composed(cfg)
        return cfg

    with (
        replaced(ConfigRepository, initialize_sources=looking),
        replaced(ConfigLoaderImpl, load_configuration=loading),
    ):
        yield


def plain(node: DictConfig) -> Settings:
    """Return a node of the config as plain values, interpolations resolved."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def as_written(node: DictConfig | ListConfig) -> Value:
    """Return a node of the config as plain values, interpolations as they are written."""
    return cast("Value", OmegaConf.to_container(node, resolve=False))


def override_texts(hydra: DictConfig, kind: str = "task") -> list[str]:
    """Return the overrides of a command line from Hydra's own settings, as they are written; `kind`: task or hydra."""
    return texts_of(hydra.overrides[kind])


def texts_of(node: DictConfig | ListConfig | None) -> list[str]:
    """Return the overrides of a list of Hydra's, as they are written; of an empty file none."""
    texts = as_written(node) if node is not None else ()
    return [str(text) for text in texts] if isinstance(texts, list | dict) else []


def section(values: Mapping[str, Value], *keys: str) -> Settings:
    """Return the part of plain values at a path of keys; empty if there is none."""
    found: object = values
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def dtype_name(short: str) -> str:
    """Return the safetensors name (``BF16``) of a dtype of the config (``bf16``)."""
    return {"bf16": "BF16", "fp32": "F32", "fp16": "F16"}[short]


# -- defaults that depend on other settings


FITTED = ("name", "trainer.lr", "trainer.micro_batch_size")
"""Keys of these defaults."""
_FITTING = "${fitting_"
_TELLING = ("_target_", "kind", "lora", "path", "shapes")


def register_resolvers() -> None:
    """Give the resolvers of our option files to OmegaConf."""
    OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)
    OmegaConf.register_new_resolver("once", str, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("fitting_name", _fitting_name, replace=True)
    OmegaConf.register_new_resolver("fitting_number", _fitting_number, replace=True)


def _fitting_name(_parent_: DictConfig) -> str:
    return run_name(_groups(_parent_, "workload", "task", "model"))


def _fitting_number(numbers: Mapping[str, float], _parent_: DictConfig) -> float:
    return numbers.get(rate_kind(_groups(_parent_._get_parent(), "model", "algorithm")), numbers["given"])


def _groups(cfg: object, *groups: str) -> Settings:
    """Return the settings of groups on which these defaults depend; others may refer to the defaults."""
    nodes = {group: cfg.get(group) for group in groups} if isinstance(cfg, DictConfig) else {}
    written = {group: cast("Settings", as_written(node)) for group, node in nodes.items() if OmegaConf.is_dict(node)}
    return {
        group: {key: resolved_part(nodes[group], key, texts[key]) for key in _TELLING if key in texts}
        for group, texts in written.items()
    }


def rate_kind(settings: Settings) -> str:
    """Return the kind of training by which the default rate is chosen: ``new`` (a model that the run makes), ``lora``,
    else the algorithm's.
    """
    model, adapter = section(settings, "model"), section(settings, "model", "lora")
    if model.get("path") is None:
        return "new"
    return "lora" if adapter.get("rank") or adapter.get("path") else str(section(settings, "algorithm").get("kind"))


def fitted(cfg: DictConfig) -> list[str]:
    """Return the keys of `FITTED` with the value of their default, in a composition that is not settled."""
    values = cast("Settings", as_written(cfg))
    split = {key: key.split(".") for key in FITTED}
    return [key for key, (*above, last) in split.items() if str(section(values, *above).get(last)).startswith(_FITTING)]


def settle(cfg: DictConfig) -> list[str]:
    """Write the values of these defaults into a composition, so that saved files have them; return the changed keys."""
    keys = fitted(cfg)
    for key in keys:
        OmegaConf.update(cfg, key, OmegaConf.select(cfg, key))
    return keys


# -- paths. Relative ones count from the folder of the run's first start, also in a resume


RESUME_FROM = "checkpoint.resume_from"
"""Not in `PATHS`: the digest has it as given, so it is resolved where it is read."""
_OF_ROWS = ("task.path", "task.validation.path")
NAMED_BY_PATH = (
    "model.path",
    "model.shapes",
    "model.lora.path",
    "algorithm.kl.reference",
    *_OF_ROWS,
    "task.reward.function_path",
)
"""Keys with a path whose last component alone counts in `config_digest`."""
PATHS = (
    "checkpoint.dir",
    "checkpoint.mirror",
    "sync.store",
    *NAMED_BY_PATH,
    "cluster.temp_dir",
)
_OR_NAMES = {"model.path": Path.exists, "model.shapes": Path.is_file, "algorithm.kl.reference": Path.exists}
"""Keys of `PATHS` that may also be a name, with the test that a path exists: a model on the hub, or one with known
shapes.
"""


def anchored(cfg: DictConfig, folder: Path) -> DictConfig:
    """Return a copy with absolute paths: relative ones if the run was started in another folder, and those with
    ``~/``.
    """
    found = copy.deepcopy(cfg)
    elsewhere = folder.absolute() != Path.cwd()
    for key in PATHS:
        with suppress(OmegaConfBaseException):  # the checks report it
            value = OmegaConf.select(found, key)
            if not isinstance(value, str | ListConfig) or not _is_of_files(found, value, folder):
                continue
            if elsewhere or any(one[:1] == "~" for one in path_list(value)):
                OmegaConf.update(found, key, each_path(value, partial(_absolute, key, folder=folder)))
    return found


def each_path(value: object, change: Callable[[str], str]) -> Value:
    """Return the value of a key in `PATHS` with its path, or each path of its list, changed; other values stay."""
    if isinstance(value, list | ListConfig):
        return [each_path(one, change) for one in value]
    return change(value) if isinstance(value, str) else cast("Value", value)


def pattern_files(cfg: DictConfig) -> dict[str, list[str]]:
    """Return the files that match now, by the key of each setting with a pattern."""
    found = {}
    for key in _OF_ROWS:
        with suppress(ConfigError, OmegaConfBaseException):  # the checks report it
            value = OmegaConf.select(cfg, key)
            if _is_of_files(cfg, value, Path()) and (files := matched_files(value)) != path_list(value):
                found[key] = files
    return found


def _is_of_files(cfg: DictConfig, path: object, folder: Path) -> bool:
    """Return whether the path of a task is of files; a list of a user's class may be of anything."""
    ours = str(OmegaConf.select(cfg, "task._target_")).startswith("trinity_sync.")
    return ours or isinstance(path, str) or all((folder / one).exists() for one in path_list(path))


def from_here(overrides: Sequence[str], folder: Path) -> list[str]:
    """Return overrides for a run of another folder, with relative paths resolved here.

    Raises:
        HydraException: one cannot be parsed.
    """
    here = Path.cwd()
    return list(overrides) if folder.absolute() == here else [_from(here, text) for text in overrides]


def _from(here: Path, text: str) -> str:
    override = parse(text)
    name, value = override.get_key_element(), override.value()
    key = re.sub(r"\.\d+$", "", name.lstrip("+"))  # of one path in a list
    if key not in (*PATHS, RESUME_FROM) or not isinstance(value, str | list) or "${" in str(value):
        return text
    place = each_path(value, partial(_absolute, key, folder=here))
    return text if place == value else f"{name}={as_value(place)}"


def _absolute(key: str, value: str, folder: Path) -> str:
    """Resolve a path. URLs, values that a check refuses, and names without a file in that folder stay."""
    if not value.strip() or "://" in value:
        return value
    if value.startswith("~"):
        return os.path.expanduser(value)  # noqa: PTH111 - the name of an unknown user stays
    place = folder / value
    return value if is_name(key, place) else str(place)


def is_name(key: str, place: Path) -> bool:
    """Return whether the value of a key that takes a path or a name is a name: no file is at the path."""
    is_there = _OR_NAMES.get(key, lambda place: True)
    with suppress(OSError):
        return not is_there(place)
    return False
