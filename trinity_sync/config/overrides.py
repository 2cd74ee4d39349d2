"""Overrides in Hydra's grammar. Hydra reads ``2024_11_25`` and ``1e3`` as numbers, since it does not know the types of
settings; these functions quote text that it would change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import cache

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, StringNode

_OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")
_TOKEN = re.compile(r"(?:(\w+)\s*:\s*)?([^,\[\]{}():\s](?:[^,\[\]{}():]*[^,\[\]{}():\s])?)")
_QUOTED = re.compile(r"['\"\\$]")


def parse(override: str) -> Override:
    """Parse an override as Hydra does. Raises OverrideParseException."""
    return OverridesParser.create().parse_overrides([override])[0]


def quote(text: str) -> str:
    """Quote a value for Hydra's override grammar."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", text)
    escaped = re.sub(r"(\\+)$", lambda match: match[1] * 2, escaped)
    return f"'{escaped}'"


def as_typed(override: str, text: Callable[[str], str] = str) -> str:
    """Quote the values of an override whose setting is text and which Hydra would change."""
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if override.startswith(("-", "~")) or _QUOTED.search(value) or not re.search(r"[\da-z]", value, re.IGNORECASE):
        return override

    def typed(found: re.Match[str]) -> str:
        inner, token = found[1], found[2]
        if not _is_changed(token) or not _is_text(f"{name}.{inner}" if inner else name):
            return found[0]
        return found[0].removesuffix(token) + quote(text(token))

    return f"{key}={_TOKEN.sub(typed, value)}" if value else override


def as_numbers(overrides: Sequence[str]) -> list[str]:
    """Return overrides saved by an earlier release, with values as that release read them."""
    return [as_typed(override, lambda token: str(parse(f"key={token}").value())) for override in overrides]


def _is_changed(token: str) -> bool:
    if not re.fullmatch(r"[+-]?[\d.][\w.+-]*|true|false|[+-]?(inf|nan)", token, re.IGNORECASE):
        return False
    value = parse(f"key={token}").value()
    return isinstance(value, int | float) and str(value) != token


@cache
def _is_text(key: str) -> bool:
    """Return whether a setting is text or a list of texts by the schema in Hydra's ConfigStore."""
    schemas = {name.removesuffix(".yaml"): found.node for name, found in ConfigStore.instance().repo["schema"].items()}
    owners, node = [schemas["root"]], None
    for part in key.split("."):
        nodes = [owner._get_node(part, validate_access=False) for owner in owners]
        node = next((found for found in nodes if found is not None), None)
        kind = node._metadata.ref_type if isinstance(node, DictConfig) else None
        if node is None and part in schemas:
            owners = [schemas[part]]
        elif isinstance(node, AnyNode):
            owners = list(schemas.values())
        elif isinstance(kind, type) and is_dataclass(kind):
            owners = [OmegaConf.structured(kind)]
            owners += [one for one in schemas.values() if issubclass(OmegaConf.get_type(one) or dict, kind)]
        else:
            owners = []
    return (
        key in _OF_HYDRA
        or isinstance(node, StringNode)
        or (isinstance(node, ListConfig) and node._metadata.element_type is str)
    )
