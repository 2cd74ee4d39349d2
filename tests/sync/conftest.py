"""For each module a synchronizer, agents and a trainer that only stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests import local_ray
from tests.sync.helpers import LIMIT, PretendTrainer, node_id, remote_agent
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.sync import Synchronizer, SynchronizerConfig


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with local_ray.joined():
        yield


@pytest.fixture(scope="module")
def make_synchronizer(cluster: None) -> Iterator[Callable[..., Synchronizer]]:
    """Make the synchronizer of a run of its own: ``make_synchronizer(slots=..., lease_s=...)``."""
    made = []

    def make(**config: Any) -> Synchronizer:
        settings = SynchronizerConfig(**{"slots": 2, "lease_s": 600.0, "timeout_s": LIMIT, **config})
        made.append(Synchronizer.get_actor(settings, namespace=local_ray.new_name()))
        return made[-1]

    yield make
    for synchronizer in made:
        ray.kill(synchronizer.actor)


@pytest.fixture(scope="module")
def make_agent(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., AgentClient]]:
    """Start a node agent whose slots lie in a folder of the test: ``make_agent(synchronizer, verify=...)``."""
    made = []
    root = tmp_path_factory.mktemp("shm")

    def make(
        synchronizer: SynchronizerClient, *, lead: AgentClient | None = None, node: str | None = None, **config: Any
    ) -> AgentClient:
        settings = {"run_key": local_ray.new_name(), "root": str(root), "fallback": str(root / "fallback"), **config}
        made.append(remote_agent(synchronizer, lead, node, settings))
        return made[-1]

    yield make
    for agent in made:
        ray.kill(agent.handle)


@pytest.fixture(scope="module")
def synchronizer(make_synchronizer: Callable[..., Synchronizer]) -> Synchronizer:
    return make_synchronizer()


@pytest.fixture(scope="module")
def trainer(synchronizer: Synchronizer, make_agent: Callable[..., AgentClient]) -> PretendTrainer:
    """A trainer of two ranks on this node."""
    return PretendTrainer(synchronizer.client, {node_id(): make_agent(synchronizer.client)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a version may be written."""
    return tmp_path / "version"
