"""The rollout coordinator and the buffer of the program in one; its process imports nothing heavy."""

from __future__ import annotations

import asyncio
from typing import Any

import ray


class Experiences:
    """The rollout coordinator and the buffer in one: what is submitted can be taken."""

    def __init__(self) -> None:
        self._batches: asyncio.Queue[int] = asyncio.Queue()

    @classmethod
    def get_actor(cls, config: Any) -> Any:
        namespace = config if isinstance(config, str) else config.ray_namespace
        return ray.remote(cls).options(name="experiences", namespace=namespace, get_if_exists=True, num_cpus=0).remote()

    async def prepare(self) -> None:
        pass

    async def submit_batch(self, *, batch_id: int, **batch: Any) -> None:
        self._batches.put_nowait(batch_id)

    async def take(self) -> int:
        return await self._batches.get()

    async def finalize_train_batch(self, step: int) -> dict[str, Any]:
        return {"metrics": {}, "finished_task_count": 0}

    async def shutdown(self) -> None:
        pass
