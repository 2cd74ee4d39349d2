"""A vLLM with experts, which a processor computes with in a form of its own: versions are put into it, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.explorer.helpers import ARCHITECTURE
from tests.sync.helpers import PretendTrainer
from tests.vllm.helpers import Weights, log_probs_of_transformers
from tests.vllm.test_engine import engine, generated, make_loader
from trinity_sync.explorer.vllm import VLLMEngine
from trinity_sync.models.architecture import make_model
from trinity_sync.sync.weight_loader import WeightLoader

__all__ = ["engine", "make_loader"]

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    architecture = ARCHITECTURE | experts | {"model_type": "qwen3_moe", "initializer_range": 0.1}
    return [make_model(architecture, seed, tmp_path_factory.mktemp("models") / str(seed)) for seed in range(3)]


def test_experts_compute_with_the_weights_of_the_version(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    loader = make_loader()
    for turn in (1, 2, 1):
        sealed = trainer.publish(weights[turn])
        assert loader.load(None).digest == sealed.digest
        batch = generated(engine)
        apart = np.abs(batch.log_probs - log_probs_of_transformers(models[turn], batch))
        assert apart.mean() < 0.05
