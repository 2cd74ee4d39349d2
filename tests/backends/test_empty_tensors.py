"""A tensor without elements is part of a version, though no rank holds a shard of it. One rank, and a bare module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trinity_sync.backends.fsdp import FsdpBackend
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.shards import check_complete


def test_a_tensor_without_elements_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {name: SavedTensor.as_held("BF16", shape, name) for name, shape in (("a", (4, 3)), ("e", (0, 8)))}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.ParameterDict({name: torch.ones(tensor.shape) for name, tensor in saved.items()})
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        engine: Any = SimpleNamespace(
            module=module,
            model_config=SimpleNamespace(local_path=str(tmp_path)),
            is_param_offload_enabled=False,
            is_optimizer_offload_enabled=False,
        )
        monkeypatch.setattr("trinity_sync.backends.fsdp.on_the_wire", lambda *_: saved)
        monkeypatch.setattr("trinity_sync.backends.fsdp.meta_model", lambda _: torch.nn.Module())
        backend = FsdpBackend(engine, "BF16")
        check_complete([backend.shards()], {name: (tensor.dtype, tensor.shape) for name, tensor in saved.items()})
        assert backend.sources()["e"].shape == (0, 8)
    finally:
        dist.destroy_process_group()
