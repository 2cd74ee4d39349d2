"""Ranks find each other: rank 0 opens a port, the others learn where."""

from __future__ import annotations

import os

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

    def __init__(self, rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "WG_PREFIX": "group"}
        self._rank = rank

    def meet(self, timeout_s: float) -> tuple[int, str, str]:
        """The sum of what the ranks bring, and where verl is told that they met."""
        import torch
        import torch.distributed as dist

        from trinity_sync.trainer.member import join_group

        join_group("gloo", timeout_s)
        brought = torch.tensor([10 + self._rank])
        dist.all_reduce(brought)
        dist.destroy_process_group()
        return int(brought), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def test_ranks_meet_at_a_port_of_rank_0_and_say_for_whom_they_wait(cluster: None) -> None:
    first, second = (Rank.remote(rank) for rank in range(2))
    with pytest.raises(WaitTimeout, match=r"trainer rank 0 did not open a port .*within 0.1 s"):
        ray.get(second.meet.remote(0.1), timeout=2 * LIMIT)
    met = ray.get([rank.meet.remote(LIMIT) for rank in (first, second)], timeout=2 * LIMIT)
    assert met[0] == met[1]
    brought, host, port = met[0]
    assert brought == 21
    assert host == ray.util.get_node_ip_address()
    assert int(port) > 0
    assert internal_kv._internal_kv_list("trinity-sync/") == []
