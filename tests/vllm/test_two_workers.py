"""A vLLM of two workers, each of which maps a version, looks at its share of it and takes its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sync.helpers import LIMIT, PretendTrainer
from tests.vllm.helpers import Weights, log_probs_of_transformers
from tests.vllm.test_engine import generated, make_loader
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.errors import RunError
from trinity_sync.explorer.vllm import VLLMEngine
from trinity_sync.sync.checkpoint import CheckpointMode
from trinity_sync.sync.weight_loader import WeightLoader

__all__ = ["make_loader"]

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[VLLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # so that workers can be asked
        made = VLLMEngine(
            str(models[0]), dtype="bf16", temperature=1.0, batch_size=64, response_length=6, seed=0, eager=True, tp=2
        )
        yield made
        made.close()


def assert_generates_as(engine: VLLMEngine, model: Path) -> None:
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(model, batch), atol=0.02)


@pytest.mark.parametrize("verify", ["full", "bucket"])
def test_a_version_is_taken_from_slots_and_from_files(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    agent: AgentClient,
    models: list[Path],
    weights: list[Weights],
    tmp_path: Path,
    verify: str,
) -> None:
    trainer.publish(weights[1])
    report = make_loader(verify=verify).load(None)
    assert report.digest == (reference_digest(weights[1], "BF16") if verify == "full" else None)
    assert_generates_as(engine, models[1])
    sealed = trainer.seal(weights[2])
    agent.write(sealed.slot, str(tmp_path), {}, fsync=False).result(LIMIT)
    trainer.synchronizer.commit(sealed.version, str(tmp_path)).result(LIMIT)
    report = make_loader(CheckpointMode(durable=False), verify, durable=False).load(None)
    assert report.digest == (reference_digest(weights[2], "BF16") if verify == "full" else None)
    assert_generates_as(engine, models[2])


def put_together(worker: Any) -> dict[str, int]:
    """In a worker: the bytes of the tensors that it puts together, by name."""
    plan = worker.weight_transfer_engine._arrivals._plan
    return {name: tensor.nbytes for name, tensor in plan._receiver._destinations.items()}


def test_each_worker_puts_about_half_together_in_a_segment_that_both_map(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    trainer.publish(weights[3])
    make_loader().load(None)
    first, second = engine._control.wait(engine._llm.collective_rpc(put_together), "say what it put together")
    assert first.keys().isdisjoint(second)
    both = first | second
    assert both
    assert abs(sum(first.values()) - sum(second.values())) <= max(both.values())
    assert engine._target is not None
    assert engine._target._place is not None
    for pid in engine.workers:
        assert f" {engine._target._place}\n" in Path(f"/proc/{pid}/maps").read_text()
    assert sum(both.values()) <= Path(engine._target._place).stat().st_size < sum(both.values()) + 64 * len(both)
    assert_generates_as(engine, models[3])
    place = Path(engine._target._place)
    trainer.publish(weights[1])
    loader = make_loader()
    loader.load(None)
    assert Path(engine._target._place) != place
    again = engine._target._place
    trainer.publish(weights[2])
    loader.load(None)
    assert engine._target._place == again
    assert_generates_as(engine, models[2])


def test_damage_is_found_whoever_looks_at_it(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    trainer.publish(weights[1])
    loader = make_loader()
    loader.load(None)
    sealed = trainer.publish(weights[2])
    part = min(trainer.layouts)
    for shard, offset in trainer.layouts[part].entries:
        if not shard.rects:
            continue
        trainer.damage(sealed, part, offset)
        with pytest.raises(RunError, match=rf"it holds .* damaged: {shard.name}$"):
            loader.load(None)
        trainer.damage(sealed, part, offset)
    assert_generates_as(engine, models[1])
    assert loader.load(None).digest == sealed.digest
    assert_generates_as(engine, models[2])
