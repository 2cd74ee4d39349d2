"""Settings as a program of Trinity-RFT has them, by the names of their fields, without Trinity-RFT."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any


class RunningStatus(Enum):
    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


class SyncMethod(Enum):
    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SaveStrategy(Enum):
    SINGLE_NODE = "single_node"
    UNRESTRICTED = "unrestricted"


def config(namespace: str, folder: str, method: SyncMethod = SyncMethod.MEMORY, timeout_s: Any = 30) -> Any:
    """As `trinity.common.config.Config`, filled in."""
    return SimpleNamespace(
        mode="both",
        ray_namespace=namespace,
        checkpoint_job_dir=folder,
        synchronizer=SimpleNamespace(
            sync_method=method, sync_timeout=timeout_s, explorer_world_size=1, group_name="rollout_weight_sync"
        ),
        trainer=SimpleNamespace(name="trainer", save_strategy=SaveStrategy.UNRESTRICTED),
        explorer=SimpleNamespace(name="explorer"),
    )
