"""Ray, once per module, and monitors that end with their test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests import local_ray
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.checkpoint.monitor import MonitorConfig

_numbers = itertools.count()
START_LIMIT = 120.0


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with local_ray.running():
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def make_monitor(cluster: None, root: Path) -> Iterator[Callable[..., Any]]:
    """Make the monitor of a run of its own: ``make_monitor(save_strategy=..., attempt=..., policies=...)``."""
    made = []

    def make(
        save_strategy: str | None = None, default_hdfs_dir: str | None = None, folder: Path | None = root, **config: Any
    ) -> Any:
        namespace = f"run-{next(_numbers)}"
        settings = MonitorConfig(**{"timeout_s": 60.0, **config})
        monitor = CheckpointMonitor.get_actor(namespace, save_strategy, folder, default_hdfs_dir, config=settings)
        made.append(monitor)
        ray.get(monitor.describe.remote(), timeout=START_LIMIT)  # Ray starts a process for it
        return monitor

    yield make
    for monitor in made:
        ray.kill(monitor)


@pytest.fixture
def monitor(make_monitor: Callable[..., Any]) -> Any:
    return make_monitor()
