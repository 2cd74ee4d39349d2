"""The two classes that `checkpoint.monitor` and `checkpoint.coordinator` name, ours or subclasses of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor
from trinity_sync.config import TARGET, load_class
from trinity_sync.config.schema import CheckpointConfig

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def monitor_option(cfg: CheckpointConfig) -> tuple[type[CheckpointMonitor], Mapping[str, object]]:
    """Return the class of the monitor, and what its constructor gets beside what all monitors get.

    Raises:
        ConfigError: the class cannot be used.
    """
    own = dict(cfg.monitor)
    return load_class(f"checkpoint.monitor.{TARGET}", own.pop(TARGET), CheckpointMonitor), own


def coordinator_option(cfg: CheckpointConfig, monitor: ActorHandle, attempt: int) -> partial[CheckpointCoordinator]:
    """Return what makes the coordinator in a rank or a node agent, given its `node_id` and `job_id` there.

    Args:
        cfg: the run's configuration.
        monitor: handle of the checkpoint monitor.
        attempt: the run's attempt.

    Raises:
        ConfigError: the class cannot be used.
    """
    own = dict(cfg.coordinator)
    found = load_class(f"checkpoint.coordinator.{TARGET}", own.pop(TARGET), CheckpointCoordinator)
    return partial(found, monitor, timeout_s=cfg.timeout_s, attempt=attempt, **own)
