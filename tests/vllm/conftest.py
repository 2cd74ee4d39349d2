"""What is to be loaded, by whom it is published, and a model; made once for all tests of a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.explorer.helpers import ARCHITECTURE
from tests.sync.conftest import cluster, make_agent, make_synchronizer, synchronizer
from tests.sync.helpers import PretendTrainer, node_id
from tests.vllm.helpers import Weights
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.models.architecture import make_model
from trinity_sync.sync import Synchronizer

__all__ = ["cluster", "make_agent", "make_synchronizer", "synchronizer"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [make_model(ARCHITECTURE, seed, folder / str(seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def weights(models: list[Path]) -> list[Weights]:
    return [{name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()} for path in models]


@pytest.fixture(scope="module")
def agent(synchronizer: Synchronizer, make_agent: Callable[..., AgentClient]) -> AgentClient:
    return make_agent(synchronizer.client)


@pytest.fixture(scope="module")
def trainer(synchronizer: Synchronizer, agent: AgentClient, weights: list[Weights]) -> PretendTrainer:
    return PretendTrainer(synchronizer.client, {node_id(): agent}, weights=weights[0], bucket_bytes=1 << 16)
