"""Sharded tensors written from their copies in the CPU's memory, whatever device they themselves are on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trinity_sync.backends import fsdp_state
from trinity_sync.backends.meetings import Meetings


@pytest.fixture
def group() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_copies_are_written_where_they_are_and_not_moved_to_the_device_of_the_mesh(group: None, tmp_path: Path) -> None:
    """The device "meta" stands in for a GPU: what is moved there has no bytes any more."""
    mesh = DeviceMesh("meta", [0])
    live = DTensor.from_local(torch.empty(6, 4, device="meta"), mesh, [Shard(0)])
    plain = torch.empty(3, device="meta")
    copies = {
        live.to_local().untyped_storage()._cdata: torch.arange(24.0).view(6, 4),
        plain.untyped_storage()._cdata: torch.ones(3),
    }

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return copies[tensor.untyped_storage()._cdata]

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    meeting = Meetings(store, 0, 1, 60.0).begin("step 1")
    state = {"model": {"weight": live}, "optim": {"step": plain, "lr": 0.5}}
    files = fsdp_state.write(state, copied, tmp_path / "dcp", meeting)

    assert [path.name for path in files] == ["__0_0.distcp", ".metadata"]
    found = {"model": {"weight": torch.zeros(6, 4)}, "optim": {"step": torch.zeros(3), "lr": 0.0}}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(found["model"]["weight"], torch.arange(24.0).view(6, 4))
    assert torch.equal(found["optim"]["step"], torch.ones(3))
    assert found["optim"]["lr"] == 0.5
