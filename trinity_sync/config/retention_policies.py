"""Builds the retention policies that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

from trinity_sync.config.composition import plain
from trinity_sync.config.lookup import TARGET, load_class
from trinity_sync.config.schema import Config
from trinity_sync.host.references import Value
from trinity_sync.protocol.retention import Policy, make_policy, policy_named


def retention_policies(cfg: DictConfig | Config) -> tuple[Policy, ...]:
    """Build the chosen retention policies. Users' own policies are imported."""
    policies = cfg.retention.policies
    nodes = plain(policies) if isinstance(policies, DictConfig) else policies
    return tuple(build_policy(name, node) for name, node in nodes.items())


def build_policy(name: str, node: Value) -> Policy:
    """Build one policy from its fields: the class under `_target_`, else our policy of that name. Errors as of
    `retention_policies`.
    """
    given = dict(node) if isinstance(node, Mapping) else {}
    target = given.pop(TARGET, None)
    if target is None:
        return make_policy(name, policy_named(name), given)
    found: type[Policy] = load_class(f"retention.policies.{name}.{TARGET}", str(target), Policy)  # type: ignore[type-abstract]
    return make_policy(name, found, given)
