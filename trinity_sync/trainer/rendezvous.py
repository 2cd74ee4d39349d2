"""How the ranks of a trainer find each other.

verl looks for a free port before it starts the ranks, and rank 0 would open it when it has imported its libraries, up
to a minute later: whoever takes the port meanwhile fails the run. Here rank 0 opens any port that is free then, and the
others learn its number from Ray's key-value store.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist
from ray.experimental import internal_kv

from trinity_sync.errors import WaitTimeout

_POLL_S = 0.05


def meet(rank: int, ranks: int, timeout_s: float) -> dist.TCPStore:
    """The store through which the ranks of a group make their process groups. All ranks call it, in actors that verl
    started.

    Args:
        rank: this one.
        ranks: how many.
        timeout_s: of the wait for rank 0, and of the store's own waits, seconds.

    Raises:
        WaitTimeout: rank 0 has opened no port.
    """
    host = os.environ["MASTER_ADDR"]
    key = (
        f"trinity-sync/meet/{os.environ['WG_PREFIX']}/{host}:{os.environ['MASTER_PORT']}"  # the same for the group only
    )
    limit = timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore(host, 0, ranks, is_master=True, timeout=limit, wait_for_workers=False)
        internal_kv._internal_kv_put(key, str(store.port))
        return store
    deadline = time.monotonic() + timeout_s
    while (port := internal_kv._internal_kv_get(key)) is None:
        if time.monotonic() > deadline:
            raise WaitTimeout("trainer rank 0", "open a port for the other ranks (backend.timeout_s)", timeout_s)
        time.sleep(_POLL_S)
    return dist.TCPStore(host, int(port), ranks, is_master=False, timeout=limit, wait_for_workers=False)
