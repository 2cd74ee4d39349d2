"""Builds the retention policies that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from trinity_sync.config.composition import plain
from trinity_sync.config.lookup import TARGET, load_class
from trinity_sync.config.schema import Config
from trinity_sync.protocol.retention import Policy, make_policy, policy_named


def retention_policies(cfg: DictConfig | Config) -> tuple[Policy, ...]:
    """Build the chosen retention policies. Users' own policies are imported."""
    return tuple(build_policy(str(name), node) for name, node in cfg.retention.policies.items())


def build_policy(name: str, node: DictConfig | Mapping[str, Any] | None) -> Policy:
    """Build one policy from its fields: the class under `_target_`, else our policy of that name. Errors as of
    `retention_policies`.
    """
    given = plain(node) if isinstance(node, DictConfig) else {str(key): value for key, value in (node or {}).items()}
    target = given.pop(TARGET, None)
    if target is None:
        return make_policy(name, policy_named(name), given)
    found: type[Policy] = load_class(f"retention.policies.{name}.{TARGET}", str(target), Policy)  # type: ignore[type-abstract]
    return make_policy(name, found, given)
