"""What may be copied beside the next forward pass is what only the optimizer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.backends.engines import write_state
from trinity_sync.backends.base import Format
from trinity_sync.backends.fsdp import FsdpBackend
from trinity_sync.backends.fsdp_state import FsdpState
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.tensors import from_torch


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(group: None) -> Any:
    """A model whose forward pass changes persistent buffers, as FSDP2 shards it over one rank."""
    return engine_with(lr=1e-3)


def engine_with(scaler: ShardedGradScaler | None = None, **settings: Any) -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(module.parameters(), **settings)
    return SimpleNamespace(
        module=module,
        model_config=None,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        scaler=scaler,
        checkpoint_manager=SimpleNamespace(get_rng_state=dict, load_rng_state=lambda _: None),
        is_param_offload_enabled=False,
        is_optimizer_offload_enabled=False,
    )


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.module(torch.randn(5, 4)).square().sum().backward()
        engine.optimizer.step()
        engine.lr_scheduler.step()


@pytest.mark.parametrize(("form", "name"), [("verl", "model_world_size_1_rank_0.pt"), ("dcp", "dcp")])
def test_a_buffer_is_saved_as_it_was_before_the_next_forward_pass(engine: Any, form: Format, name: str) -> None:
    state = FsdpState(engine).files(form)[name]
    saved = state if form == "verl" else state["model"]
    weight = engine.module[0].weight.to_local().untyped_storage()._cdata
    engine.module(torch.randn(5, 4))
    assert saved["1.running_mean"].eq(0).all()
    assert int(saved["1.num_batches_tracked"]) == 0
    assert saved["0.weight"].to_local().untyped_storage()._cdata == weight, "copied in vain"


def test_a_buffer_is_published_as_it_was_before_the_next_forward_pass(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.model_config = SimpleNamespace(local_path=str(tmp_path))
    held = engine.module.state_dict()
    saved = {name: SavedTensor.as_held(from_torch(tensor.dtype), tensor.shape, name) for name, tensor in held.items()}
    monkeypatch.setattr("trinity_sync.backends.fsdp.on_the_wire", lambda *_: saved)
    monkeypatch.setattr("trinity_sync.backends.fsdp.meta_model", lambda _: torch.nn.Module())
    backend = FsdpBackend(engine, "F32")
    sources = backend.sources()
    engine.module(torch.randn(5, 4))
    assert sources["1.running_mean"].eq(0).all()
    assert not backend.sources()["1.running_mean"].eq(0).all()


@pytest.mark.parametrize("form", ["verl", "dcp"])
def test_a_load_leaves_the_settings_of_the_optimizer_as_they_are(group: None, form: Format, tmp_path: Path) -> None:
    saved, other = engine_with(lr=0.5), engine_with(lr=0.25, betas=(0.8, 0.9), weight_decay=0.3)
    train(saved, 3)
    write_state(FsdpState(saved), form, tmp_path)
    FsdpState(other).load(tmp_path)
    (of_saved,), (of_other,) = saved.optimizer.param_groups, other.optimizer.param_groups
    assert of_saved["lr"] == 0.5 / 4
    assert {name: of_other[name] for name in ("lr", "initial_lr", "betas", "weight_decay")} == {
        **{"lr": 0.25 / 4, "initial_lr": 0.25, "betas": (0.8, 0.9), "weight_decay": 0.3}
    }
    assert other.lr_scheduler.get_last_lr() == [0.25 / 4]
    other.lr_scheduler.step()
    assert of_other["lr"] == 0.25 / 5
    moments = [[state["exp_avg"].to_local() for state in one.optimizer.state.values()] for one in (saved, other)]
    assert all(torch.equal(*pair) for pair in zip(*moments, strict=True))


@pytest.mark.parametrize("form", ["verl", "dcp"])
def test_with_the_same_settings_the_learning_rate_goes_on_bit_for_bit(
    group: None, form: Format, tmp_path: Path
) -> None:
    saved, other = engine_with(lr=0.3), engine_with(lr=0.3)
    train(saved, 2)
    write_state(FsdpState(saved), form, tmp_path)
    FsdpState(other).load(tmp_path)
    for _ in range(3):
        assert other.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]
        for one in (saved, other):
            one.lr_scheduler.step()


def scaler(start: float) -> ShardedGradScaler:
    made = ShardedGradScaler(device="cpu", init_scale=start, growth_interval=4)
    made.scale(torch.ones(1))
    return made


@pytest.mark.parametrize("form", ["verl", "dcp"])
def test_gradients_in_fp16_are_scaled_as_before(group: None, form: Format, tmp_path: Path) -> None:
    saved, other = engine_with(scaler(16.0)), engine_with(scaler(1.0))
    for _ in range(5):  # the scale doubles after four, and one more counts to the next
        saved.scaler.scale(saved.module(torch.randn(5, 4)).square().sum()).backward()
        saved.scaler.step(saved.optimizer)
        saved.scaler.update()
    write_state(FsdpState(saved), form, tmp_path)
    FsdpState(other).load(tmp_path)
    assert other.scaler.state_dict() == saved.scaler.state_dict()
    assert other.scaler.state_dict()["scale"] == 32.0
    assert other.scaler.state_dict()["_growth_tracker"] == 1
    assert other.scaler.scale(torch.ones(())) == 32.0


def test_a_checkpoint_without_a_scaler_leaves_that_of_fp16_as_it_is(group: None, tmp_path: Path) -> None:
    saved, other = engine_with(), engine_with(scaler(8.0))
    train(saved, 1)
    write_state(FsdpState(saved), "verl", tmp_path)
    FsdpState(other).load(tmp_path)
    assert other.scaler.get_scale() == 8.0
