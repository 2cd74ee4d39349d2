"""Checkpoints: the coordinator in every rank, the monitor actor, and the folder on disk.

Importing this package loads neither torch nor Ray; its two public classes are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_sync.checkpoint.coordinator import CheckpointCoordinator
    from trinity_sync.checkpoint.monitor import CheckpointMonitor

__all__ = ["CheckpointCoordinator", "CheckpointMonitor"]


def __getattr__(name: str) -> object:
    if name == "CheckpointCoordinator":
        from trinity_sync.checkpoint.coordinator import CheckpointCoordinator

        return CheckpointCoordinator
    if name == "CheckpointMonitor":
        from trinity_sync.checkpoint.monitor import CheckpointMonitor

        return CheckpointMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
