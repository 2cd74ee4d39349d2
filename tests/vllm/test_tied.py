"""A vLLM whose output layer is its embedding, as of most small models: versions bring the one tensor once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.explorer.helpers import ARCHITECTURE
from tests.sync.helpers import LIMIT, PretendTrainer
from tests.vllm.helpers import Weights, log_probs_of_transformers
from tests.vllm.test_engine import engine, generated, make_loader
from trinity_sync.errors import RunError
from trinity_sync.explorer.vllm import VLLMEngine
from trinity_sync.integrations.vllm.own import EngineWeights
from trinity_sync.models.architecture import make_model
from trinity_sync.sync.weight_loader import WeightLoader

__all__ = ["engine", "make_loader"]

pytestmark = pytest.mark.all

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    architecture = ARCHITECTURE | {"tie_word_embeddings": True, "initializer_range": 0.05}
    made = [make_model(architecture, seed, folder / str(seed)) for seed in range(3)]
    assert all("lm_head.weight" not in load_file(path / "model.safetensors") for path in made)
    return made


def test_the_output_layer_is_that_of_the_version(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    """It computes with a copy of its own, in the processor's form, which has to follow."""
    for turn in (1, 2, 1):
        sealed = trainer.publish(weights[turn])
        assert make_loader().load(None).digest == sealed.digest
        batch = generated(engine)
        np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[turn], batch), atol=0.05)


def test_an_embedding_that_does_not_come_leaves_both_unfilled(
    engine: VLLMEngine, models: list[Path], weights: list[Weights]
) -> None:
    whole = {name: tensor.bfloat16() for name, tensor in weights[1].items()}
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    with pytest.raises(RunError, match=f"does not fill lm_head.weight, {EMBEDDING}"):
        own.take({name: tensor for name, tensor in whole.items() if name != EMBEDDING}, 1)
    own.close()
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    own.take(whole, 2)
    own.close()
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[1], batch), atol=0.05)
