"""The trainer group: the ranks of verl's `RayWorkerGroup`, called together, with a name for each and a limit on every
wait.
"""

from __future__ import annotations

import socket
from typing import Any

import ray

from trinity_sync.sync.remote import resolve
from trinity_sync.trainer.spec import RankInfo, WorkerSpec


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
        self.ranks: dict[str, Any] = {
            f"trainer rank {index}": handle for index, handle in enumerate(self._group.workers)
        }
        self._start_timeout_s = start_timeout_s

    def initialise(self) -> list[RankInfo]:
        """Build the engines; what each rank holds, in rank order."""
        return self.call("initialise", what="build its engine", timeout_s=self._start_timeout_s)

    def call(self, method: str, *args: Any, what: str, timeout_s: float) -> list[Any]:
        """Call a method on all ranks with the same arguments; results in rank order.

        Args:
            method: of `TrinityWorker`.
            args: passed to every rank; large ones as an object reference.
            what: for the error, such as ``"train step 12"``.
            timeout_s: limit for all together, seconds.
        """
        calls = {name: getattr(rank, method).remote(*args) for name, rank in self.ranks.items()}
        return list(resolve(calls, what, timeout_s).values())

    def call_each(self, method: str, arguments: list[tuple[Any, ...]], what: str, timeout_s: float) -> list[Any]:
        """Call a method with arguments of each rank's own, in rank order."""
        calls = {
            name: getattr(rank, method).remote(*args)
            for (name, rank), args in zip(self.ranks.items(), arguments, strict=True)
        }
        return list(resolve(calls, what, timeout_s).values())


def _meeting_point() -> dict[str, str]:
    """Address and a free port for the ranks' process group."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"master_addr": ray.util.get_node_ip_address(), "master_port": str(probe.getsockname()[1])}
