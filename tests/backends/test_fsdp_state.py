"""What may be copied beside the next forward pass is what only the optimizer changes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from trinity_sync.backends.base import Format
from trinity_sync.backends.fsdp import FsdpBackend
from trinity_sync.backends.fsdp_state import FsdpState
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.tensors import from_torch


@pytest.fixture
def engine() -> Iterator[Any]:
    """A model whose forward pass changes persistent buffers, as FSDP2 shards it over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(module.parameters())
    yield SimpleNamespace(
        module=module,
        model_config=None,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        checkpoint_manager=SimpleNamespace(get_rng_state=dict),
        is_param_offload_enabled=False,
        is_optimizer_offload_enabled=False,
    )
    dist.destroy_process_group()


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
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine.module.state_dict()
    saved = {name: Saved.as_held(from_torch(tensor.dtype), tensor.shape, name) for name, tensor in held.items()}
    monkeypatch.setattr("trinity_sync.backends.fsdp.saved_by", lambda *_: saved)
    backend = FsdpBackend(engine, "F32")
    sources = backend.sources()
    engine.module(torch.randn(5, 4))
    assert sources["1.running_mean"].eq(0).all()
    assert not backend.sources()["1.running_mean"].eq(0).all()
