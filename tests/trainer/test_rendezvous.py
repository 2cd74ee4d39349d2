"""Ranks find each other though the port that verl had looked for is taken by then."""

from __future__ import annotations

import os
import socket

import pytest
import ray
from ray.experimental import internal_kv

from tests import local_ray
from trinity_sync.errors import WaitTimeout

LIMIT = 60.0

cluster = local_ray.cluster


@ray.remote(num_cpus=0)
class Rank:
    """A rank of a group of two, without an engine."""

    def __init__(self, port: int, rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "WG_PREFIX": "group"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._rank = rank

    def meet(self, timeout_s: float) -> int:
        """The sum of what the ranks bring."""
        import torch
        import torch.distributed as dist

        from trinity_sync.trainer.rendezvous import join_group

        join_group("gloo", timeout_s)
        brought = torch.tensor([10 + self._rank])
        dist.all_reduce(brought)
        dist.destroy_process_group()
        return int(brought)


def test_ranks_meet_where_their_port_is_taken_and_say_for_whom_they_wait(cluster: None) -> None:
    with socket.create_server(("", 0)) as taken:
        first, second = (Rank.remote(taken.getsockname()[1], rank) for rank in range(2))
        with pytest.raises(WaitTimeout, match=r"trainer rank 0 did not open a port .*within 0.1 s"):
            ray.get(second.meet.remote(0.1), timeout=2 * LIMIT)
        assert ray.get([rank.meet.remote(LIMIT) for rank in (first, second)], timeout=2 * LIMIT) == [21, 21]
    assert internal_kv._internal_kv_list("trinity-sync/") == []
