"""The process group of the trainer's ranks.

In verl's way the driver chooses a free port, which rank 0 opens up to a minute later, after its imports; if another
program takes the port meanwhile, the run fails. Here rank 0 opens any free port, and the others read its address from
Ray's key-value store.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import ray
import torch.distributed as dist
from ray.experimental import internal_kv

from trinity_sync.errors import WaitTimeout

_POLL_S = 0.05


def join_group(backend: str, timeout_s: float) -> None:
    """Make the default process group, and set its address in the environment, where verl reads it. All ranks call it,
    in actors of a `TrainerGroup`. `timeout_s`: limit of the wait for rank 0, and of the group's collectives, seconds.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout_s)
    key = f"trinity-sync/{os.environ['WG_PREFIX']}"  # of this group only
    if rank == 0:
        host = ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, ranks, is_master=True, timeout=limit, wait_for_workers=False)
        internal_kv._internal_kv_put(key, f"{host} {store.port}")
    else:
        host, port = _wait_for_address(key, timeout_s)
        store = dist.TCPStore(host, port, ranks, is_master=False, timeout=limit, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(store.port))
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    finally:
        if rank == 0:
            internal_kv._internal_kv_del(key)


def _wait_for_address(key: str, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while (found := internal_kv._internal_kv_get(key)) is None:
        if time.monotonic() > deadline:
            raise WaitTimeout("trainer rank 0", "open a port for the other ranks (backend.timeout_s)", timeout_s)
        time.sleep(_POLL_S)
    host, port = found.decode().split()
    return host, int(port)
