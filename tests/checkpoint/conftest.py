"""Monitors: in one process where no test kills it, as a process takes longer to start than a test of what it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests import local_ray
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.checkpoint.folder.lock import writer_of
from trinity_sync.checkpoint.monitor import MonitorConfig

START_LIMIT = 120.0


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with local_ray.joined():
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


class Host:
    """An actor that holds the bodies of monitors, and calls their methods."""

    def __init__(self) -> None:
        self._bodies: list[CheckpointMonitor] = []

    async def make(self, *args: Any) -> int:
        self._bodies.append(CheckpointMonitor(*args))
        return len(self._bodies) - 1

    async def call(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = getattr(self._bodies[number], method)(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer


class Hosted:
    """A monitor of a host, to be called as an actor's handle is."""

    def __init__(self, host: Any, number: int) -> None:
        self._host, self._number = host, number

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(
            remote=lambda *args, **kwargs: self._host.call.remote(self._number, method, args, kwargs)
        )


@pytest.fixture(scope="package")
def host(cluster: None) -> Iterator[Any]:
    host = ray.remote(Host).options(num_cpus=0, max_concurrency=1000).remote()
    yield host
    ray.kill(host)


@pytest.fixture
def make_monitor(host: Any, root: Path) -> Callable[..., Any]:
    """Make the monitor of a run of its own: ``make_monitor(save_strategy=..., attempt=..., policies=...)``."""

    def make(save_strategy: str = "unrestricted", folder: Path | None = root, **config: Any) -> Any:
        settings = MonitorConfig(**{"timeout_s": 60.0, **config})
        place = None
        if folder is not None:
            place, settings = str(folder), replace(settings, writer=writer_of(folder))
        number = ray.get(host.make.remote(save_strategy, place, None, settings), timeout=START_LIMIT)
        return Hosted(host, number)

    return make


@pytest.fixture
def monitor(make_monitor: Callable[..., Any]) -> Any:
    return make_monitor()


@pytest.fixture
def make_actor(cluster: None, root: Path) -> Iterator[Callable[..., Any]]:
    """As `make_monitor`, of one in a process of its own, which ends with the test."""
    made = []

    def make(
        save_strategy: str | None = None, default_hdfs_dir: str | None = None, folder: Path | None = root, **config: Any
    ) -> Any:
        settings = MonitorConfig(**{"timeout_s": 60.0, **config})
        namespace = local_ray.new_name()
        monitor = CheckpointMonitor.get_actor(namespace, save_strategy, folder, default_hdfs_dir, config=settings)
        made.append(monitor)
        ray.get(monitor.describe.remote(), timeout=START_LIMIT)  # Ray starts a process for it
        return monitor

    yield make
    for monitor in made:
        ray.kill(monitor)


@pytest.fixture
def actor(make_actor: Callable[..., Any]) -> Any:
    return make_actor()
