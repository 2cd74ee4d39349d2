"""The retention policies of `trinity-sync ckpt prune`: those of the command line, or those that a run has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.retention import Policy


def given_policies(keep: Sequence[str]) -> tuple[Policy, ...]:
    """Make the policies that ``--keep`` names, as ``POLICY`` or ``POLICY.FIELD=VALUE``.

    Raises:
        ConfigError: one is unknown or wrong.
    """
    from hydra.errors import HydraException

    from trinity_sync import config
    from trinity_sync.launch.messages import explain

    names = list(dict.fromkeys(item.partition(".")[0] for item in keep))
    fields = [f"retention.policies.{item}" for item in keep if "=" in item]
    try:
        cfg = config.compose([f"retention=[{','.join(names)}]", *fields])
    except HydraException as error:
        raise ConfigError(explain(error)) from error
    config.check(cfg)
    return config.retention_policies(cfg)


def saved_policies(nodes: Mapping[str, Any], allowed: Sequence[str], run: Path) -> tuple[Policy, ...]:
    """Make the policies that a run's saved settings name.

    Somebody else may have made that folder, so of what they name only what is ours or allowed is imported.

    Args:
        nodes: policy name to fields, resolved.
        allowed: packages or dotted names that may be run, too.
        run: the run's folder, for errors.

    Raises:
        ConfigError: one is not allowed, unknown or wrong.
    """
    from trinity_sync import config

    for name, node in nodes.items():
        if not isinstance(node, Mapping | None):
            raise ConfigError(f"retention.policies.{name} is {node} in the saved settings of {run}; give --keep ...")
        target = (node or {}).get(config.TARGET)
        if target is not None:
            config.check_saved_target(f"retention.policies.{name}.{config.TARGET}", str(target), allowed, run)
    return tuple(config.build_policy(name, node) for name, node in nodes.items())
