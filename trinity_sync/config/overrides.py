"""Overrides in Hydra's grammar. Hydra reads ``2024_11_25`` and ``1e3`` as numbers, since it does not know the types of
settings; these functions quote text that it would change. And the short forms of `task.reward`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from typing import cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.plugins.config_source import ConfigResult
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, StringNode, open_dict

from trinity_sync.errors import ConfigError
from trinity_sync.host.references import Value

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


def as_value(value: object) -> str:
    """Return a value in Hydra's override grammar."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_value, value)) + "]"
    return json.dumps(value)


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
        or isinstance(node, StringNode | AnyNode)  # which types `config.schema.Texts`
        or (isinstance(node, ListConfig) and node._metadata.element_type is str)
    )


# -- the short forms of a reward: the name of a function, or a list of names with weights


REWARD = "task.reward"
_OURS = "schema/closed"
"""A configuration with this file is ours."""
_SUM = "trinity_sync.tasks.rewards.WeightedSum"
_TERM = re.compile(r"(?:(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) *\* *)?([^\s*]+)")


def accept_short_rewards() -> None:
    """Have Hydra compose the long form of a short `task.reward`, of command lines and of files: a function under
    `_target_`, or a `WeightedSum`. A task whose `reward` names no function gets the value as it is, and so does a
    `task` of another program.
    """
    apply, load = ConfigLoaderImpl._apply_overrides_to_config, ConfigLoaderImpl._load_single_config
    compose = ConfigLoaderImpl._compose_config_from_defaults_list

    def applying(overrides: list[Override], cfg: DictConfig) -> None:
        for override in overrides:
            apply([_inlong_form(override, cfg)], cfg)

    def composing(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        # our configuration may lie below a key of another program
        tasks = [f"{one.package or ''}.task".lstrip(".") for one in defaults if one.config_path == _OURS]

        def loading(default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
            found = load(self, default, repo)
            for task in tasks:
                node = OmegaConf.select(found.config, task, throw_on_resolution_failure=False)
                given = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else None
                if isinstance(given, dict) and str(given.get("_target_") or _SUM).startswith("trinity_sync."):
                    value = long_form(cast("Value", given.get("reward")))
                    if value != given.get("reward"):
                        found = copy.deepcopy(found)  # Hydra keeps the first
                        OmegaConf.update(found.config, f"{task}.reward", value, merge=False)
            return found

        self._load_single_config = loading  # type: ignore[method-assign]
        try:
            return compose(self, defaults, repo)
        finally:
            del self._load_single_config

    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(applying)  # type: ignore[method-assign]
    ConfigLoaderImpl._compose_config_from_defaults_list = composing  # type: ignore[method-assign]


def _inlong_form(override: Override, cfg: DictConfig) -> Override:
    key = override.key_or_group
    node = OmegaConf.select(cfg, key) if f".{key}".endswith(f".{REWARD}") and not override.is_delete() else None
    value = cast("Value", override.value())
    if not isinstance(node, DictConfig) or "_target_" not in node or not isinstance(value, str | list):
        return override
    if "functions" in node:  # a sum, which this replaces
        with open_dict(node):
            del node["functions"], node["weights"]
            node["_partial_"] = True
    return replace(override, type=OverrideType.FORCE_ADD, _value=long_form(value))


def long_form(reward: Value) -> Value:
    """Return the long form of a reward's names; other values and references stay."""
    if isinstance(reward, str) and reward.startswith(("${", "???")):
        return reward
    if isinstance(reward, str) and "*" not in reward:
        return {"_target_": reward}
    if not isinstance(reward, str | list):
        return reward
    functions, weights = list[Value](), list[Value]()
    for term in [reward] if isinstance(reward, str) else reward:
        found = _TERM.fullmatch(str(term).strip())
        if found is None:
            raise ConfigError(
                f"{REWARD} has {term!r}; each part is the dotted name of a function, or a weight and a name such as "
                "0.2*my_rewards.format"
            )
        functions.append({"_target_": found[2], "_partial_": True})
        weights.append(float(found[1] or 1))
    return {"_target_": _SUM, "_partial_": False, "functions": functions, "weights": weights}
