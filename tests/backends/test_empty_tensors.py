"""A tensor without elements is part of a version, though no rank holds a shard of it. One rank, and a bare module."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trinity_sync.backends.fsdp import FsdpBackend
from trinity_sync.weights.shards import check_complete
from trinity_sync.weights.tensors import Saved


def test_a_tensor_without_elements_is_published() -> None:
    saved = {"a": Saved("BF16", (4, 3), True), "e": Saved("BF16", (0, 8), True)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.ParameterDict({name: torch.ones(tensor.shape) for name, tensor in saved.items()})
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        backend = FsdpBackend.__new__(FsdpBackend)
        backend._engine, backend._rank, backend._wire_dtype = SimpleNamespace(module=module), 0, "BF16"
        backend._saved = saved
        backend._pieces = backend._find_pieces()
        check_complete([backend.shards()], {name: (tensor.dtype, tensor.shape) for name, tensor in saved.items()})
        assert backend.sources()["e"].shape == (0, 8)
    finally:
        dist.destroy_process_group()
