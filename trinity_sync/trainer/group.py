"""The trainer group: the ranks of verl's `RayWorkerGroup`, called together, with a name for each and a limit on every
wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import ray

from trinity_sync.actors.calls import Call, results
from trinity_sync.actors.rank import RankClient, RankInfo
from trinity_sync.trainer.spec import WorkerSpec

T = TypeVar("T")


class TrainerGroup:
    """All ranks of the trainer.

    Args:
        spec: what each rank is built from.
        process_on_nodes: ranks per node, such as ``[8, 8]``.
        use_gpu: reserve one GPU per rank.
        on_this_node: all ranks run where the driver does, so the driver picks their meeting point; else verl asks a
            process on the first rank's node, which takes that process's start.
        start_timeout_s: limit until the engines are up, seconds.
        worker: class of the ranks; None: `TrinityWorker`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        process_on_nodes: list[int],
        use_gpu: bool,
        on_this_node: bool,
        start_timeout_s: float,
        worker: type | None = None,
    ) -> None:
        # Heavy: verl and transformers. The launcher imports it in the background while Ray starts.
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from trinity_sync.trainer.worker import TrinityWorker

        pool = RayResourcePool(process_on_nodes=process_on_nodes, use_gpu=use_gpu, max_colocate_count=1)
        ranks = RayClassWithInitArgs(ray.remote(worker or TrinityWorker), spec)
        meeting_point = _meeting_point() if on_this_node else {}
        self._group = RayWorkerGroup(
            resource_pool=pool, ray_cls_with_init=ranks, device_name="cuda" if use_gpu else "cpu", **meeting_point
        )
        self.ranks = [RankClient(handle, rank) for rank, handle in enumerate(self._group.workers)]
        self._start_timeout_s = start_timeout_s

    def initialise(self) -> list[RankInfo]:
        """Build the engines; what each rank holds, in rank order."""
        return self.all(RankClient.initialise, self._start_timeout_s)

    def all(self, ask: Callable[[RankClient], Call[T]], timeout_s: float) -> list[T]:
        """Ask all ranks; answers in rank order.

        Args:
            ask: begins the call to one.
            timeout_s: limit for all together, seconds.
        """
        return results([ask(rank) for rank in self.ranks], timeout_s)


def _meeting_point() -> dict[str, str]:
    """Address and a free port for the ranks' process group."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"master_addr": ray.util.get_node_ip_address(), "master_port": str(probe.getsockname()[1])}
