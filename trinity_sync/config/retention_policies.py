"""The retention policies of a configuration: what types their options, and how they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf

from trinity_sync.config.lookup import TARGET, load_class
from trinity_sync.protocol.retention import QUANTITY, Policy, make_policy, policy_named


def retention_policies(cfg: DictConfig) -> tuple[Policy, ...]:
    """Build the chosen retention policies. Those of the user's own are imported.

    Raises:
        ConfigError: a policy is unknown, or refuses its fields; the message names the key.
    """
    return tuple(build_policy(str(name), node) for name, node in cfg.retention.policies.items())


def build_policy(name: str, node: DictConfig | Mapping[str, Any] | None) -> Policy:
    """Build one policy.

    Args:
        name: under which the configuration has it.
        node: the class that it names, without which it is ours of that name, and the fields of that.

    Raises:
        ConfigError: see `retention_policies`.
    """
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node or {})
    assert isinstance(values, dict)
    given = {str(key): value for key, value in values.items()}
    target = given.pop(TARGET, None)
    if target is None:
        return make_policy(name, policy_named(name), given)
    found: type[Policy] = load_class(f"retention.policies.{name}.{TARGET}", str(target), Policy)  # type: ignore[type-abstract]
    return make_policy(name, found, given)


def policy_schema(policy: type[Policy]) -> type:
    """Make what types the options of a retention policy: the class that is named, and the fields that it declares."""
    types = get_type_hints(policy)
    typed: list[tuple[str, Any, Any]] = [(TARGET, str, field(default=MISSING))]
    for declared in fields(policy):  # type: ignore[arg-type]
        kind = int | float | str if QUANTITY in declared.metadata else types[declared.name]
        typed.append((declared.name, kind, field(default=MISSING)))
    made = make_dataclass(policy.__name__, typed, kw_only=True, namespace={"__module__": __name__})
    globals()[made.__name__] = made  # where a composed configuration that was pickled looks for it
    return made
