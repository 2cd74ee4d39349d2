"""Composing a configuration outside of a Hydra entry: for resume, for tools and for tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

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
        config_dir: one more folder of option files, as `--config-dir` gives.
        hydra: with Hydra's own settings, below the key `hydra`.

    Raises:
        HydraException, OmegaConfBaseException: an override names what is not there, or has the wrong type.
    """
    overrides = list(overrides)
    if config_dir:
        search = [f"file://{config_dir.resolve()}", *search_path(overrides, config_name, config_dir)]
        overrides = [text for text in overrides if parse(text).get_key_element() != _SEARCH_PATH]
        overrides.append(f"{_SEARCH_PATH}=[{','.join(map(quote, search))}]")
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return hydra_compose(config_name, overrides=overrides, return_hydra_config=hydra)


def search_path(overrides: Sequence[str], config_name: str, config_dir: Path | None) -> list[str]:
    """Where settings have Hydra look for option files, beside our folder and `config_dir`: in folders, and in packages,
    which it imports. Said by an override, else by the primary config. Nothing is imported.

    Args:
        overrides, config_name, config_dir: as for `compose`.
    """
    given = [override.value() for override in map(parse, overrides) if override.get_key_element() == _SEARCH_PATH]
    found: Any = given[0] if given else None
    if found is None:
        name = config_name if config_name.endswith(".yaml") else f"{config_name}.yaml"
        files = [folder / name for folder in (conf_dir(), config_dir) if folder is not None]
        primary = next((OmegaConf.load(file) for file in files if file.is_file()), None)
        found = OmegaConf.select(primary, _SEARCH_PATH) if isinstance(primary, DictConfig) else None
    return [str(place) for place in found] if isinstance(found, list | ListConfig) else []


def parse(override: str) -> Override:
    """Read an override as Hydra does.

    Raises:
        HydraException: it cannot be parsed.
    """
    return OverridesParser.create().parse_override(override)


def quote(text: str) -> str:
    """Quote a value for Hydra's override grammar, so that blanks, commas and brackets stand for themselves."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", text)
    escaped = re.sub(r"(\\+)$", lambda match: match[1] * 2, escaped)
    return f"'{escaped}'"


def plain(node: DictConfig) -> dict[str, Any]:
    """A node of the config as plain values, interpolations resolved: what is sent to other processes."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def dtype_name(short: str) -> str:
    """The config's dtype names (``bf16``) as safetensors names them (``BF16``)."""
    return {"bf16": "BF16", "fp32": "F32", "fp16": "F16"}[short]
