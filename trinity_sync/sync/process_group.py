"""Process groups of our own, beside torch's default one, and broadcasts over them from their rank 0.

torch is imported where it is needed: the driver knows the sync modes, and takes part in no group.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch
    from torch.distributed import BroadcastOptions, Store
    from torch.distributed.distributed_c10d import Work

_WATCHDOG_S = 60.0


class Group(Protocol):
    """What is used of torch's groups, gloo between CPUs and NCCL between GPUs. Their stubs leave out `broadcast`."""

    def name(self) -> str:
        """Return ``gloo`` or ``nccl``."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Begin an operation of all members."""
        ...

    def abort(self) -> None:
        """Break off what is under way."""
        ...

    def shutdown(self) -> None:
        """Wait for what is under way, and end."""
        ...


def make_group(store: Store, rank: int, size: int, transport: str, timeout_s: float) -> Group:
    """Enter a group; returns when its members have met.

    Args:
        store: where they meet; the keys in it are the group's alone.
        rank, size: this process's place among its members, and their number.
        transport: ``gloo`` or ``nccl``.
        timeout_s: limit of each operation, seconds.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    if transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # By its own limit NCCL's watchdog ends the whole process; who waits for an operation is to be first, and told.
        options._timeout = limit + timedelta(seconds=_WATCHDOG_S)
        return cast(Group, dist.ProcessGroupNCCL(store, rank, size, options))
    return cast(Group, dist.ProcessGroupGloo(store, rank, size, limit))


def begin_broadcast(group: Group, tensor: torch.Tensor, timeout_s: float) -> Work:
    """Begin to send a tensor from rank 0 to all others, into theirs; what is returned is waited for."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)


def wait(work: Work, timeout_s: float, *, nccl: bool) -> None:
    """Wait until the operation has ended. Without a limit of its own NCCL's would only make the device's stream wait;
    gloo keeps the group's limit, and closes its connections when a wait with another one ends.
    """
    if nccl:
        work.wait(timedelta(seconds=timeout_s))
    else:
        work.wait()


def close(groups: list[Group], transport: str) -> None:
    """Let go of a group, which the list refers to and, after an error, its traceback. gloo takes 20 ms to close its
    connections (two turns of its loop): nobody has to wait for that. NCCL's would break off what is under way without a
    shutdown before.
    """
    if transport == "gloo":
        threading.Thread(target=groups.clear, name="close group", daemon=True).start()
        return
    with contextlib.suppress(RuntimeError):
        groups[0].shutdown()
    groups.clear()
