"""The retention policies of a configuration, with durations and sizes that were given as text turned into numbers."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_sync.errors import ConfigError

_UNITS: dict[tuple[str, str], tuple[dict[str, float], str]] = {
    ("keep_for", "seconds"): (
        {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800},
        "a number of seconds, or a text such as 90s, 30m, 12h or 7d",
    ),
    ("keep_within_budget", "bytes"): (
        {"": 1, "b": 1}
        | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
        | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
        "a number of bytes, or a text such as 500MB, 100GB or 2TiB",
    ),
}
"""Fields of retention policies that may be given as text: the units, and what to tell the user."""


def retention_policies(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the chosen retention policies, name to fields, as `protocol.retention.make_policies` takes them.

    Durations come as seconds and sizes as whole bytes, also where the user gave a text such as ``12h`` or ``100GB``.

    Raises:
        ConfigError: a text is no such quantity.
    """
    return {str(name): policy_fields(str(name), node) for name, node in cfg.retention.policies.items()}


def policy_fields(name: str, node: DictConfig) -> dict[str, Any]:
    """Return the fields of one policy; see `retention_policies`."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    plain = {str(key): value for key, value in values.items()}
    for (policy, key), (units, right) in _UNITS.items():
        if policy != name or not isinstance(plain.get(key), str):
            continue
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", plain[key].lower())
        if not match or match[2] not in units:
            raise ConfigError(f"retention.policies.{name}.{key} is {plain[key]}; must be {right}")
        amount = float(match[1]) * units[match[2]]
        plain[key] = int(amount) if key == "bytes" else amount
    return plain
