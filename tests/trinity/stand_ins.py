"""What stands in for the engines of a Trinity-RFT program: a model of two tensors, trained without data, and a rollout
model that makes nothing. `Trainer` and `Explorer`, with all their loops, are Trinity-RFT's own.

This module is imported in every process of the program. The one line that a user changes is here: where `Synchronizer`,
`CheckpointMonitor` and `CheckpointCoordinator` come from.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import trinity.explorer.explorer as explorer_module
import trinity.trainer.trainer as trainer_module
from safetensors.torch import load_file, save_file
from trinity.common.constants import SyncMethod

from tests.trinity.experiences import Experiences

OURS = os.environ["TRINITY_TEST_CLASSES"] == "ours"
if OURS:
    from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor
    from trinity_sync.sync import Synchronizer
else:
    from trinity.manager.synchronizer import Synchronizer
    from trinity.trainer.verl.checkpoint import CheckpointCoordinator

BATCH_S = 0.3
"""A batch is sampled for so long, so that the explorer is waiting again when the trainer has trained on it."""
GROUP_LIMIT = timedelta(seconds=60)


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Recorder:
    """A handle of the synchronizer that notes which calls are made of it, and what they answer."""

    def __init__(self, handle: Any, calls: list[list[Any]]) -> None:
        self._handle, self._calls = handle, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)

        class Method:
            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> Awaitable[Any]:
                reference = method.remote(*args, **kwargs)

                async def answer() -> Any:
                    found = await reference
                    given = [arg.value if isinstance(arg, Enum) else arg for arg in (*args, *kwargs.values())]
                    self._calls.append([name, given, found])
                    return found

                return answer()

        return Method


# ---- the trainer's side


class Engine(trainer_module.TrainEngineWrapper):
    """Trains, saves and publishes as Trinity-RFT's engine for verl does."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._step = 0
        self._weights = {"embed": torch.zeros(33, 7), "head": torch.ones(5, dtype=torch.bfloat16)}
        self._synchronizer = Synchronizer.get_actor(namespace=config.ray_namespace)
        self.published: list[tuple[int, str]] = []
        if config.synchronizer.sync_method == SyncMethod.CHECKPOINT:
            monitor = _monitor_class().get_actor(
                namespace=config.synchronizer.ray_namespace,
                save_strategy=config.trainer.save_strategy,
                default_local_dir=config.checkpoint_job_dir,
                default_hdfs_dir=None,
            )
            self._coordinator = CheckpointCoordinator(monitor)

    async def prepare(self) -> None:
        pass

    @property
    def train_step_num(self) -> int:
        return self._step

    async def train_step(self, batch_exps: list[Any]) -> dict[str, float]:
        self._step += 1
        self._weights = {name: tensor + self._step for name, tensor in self._weights.items()}
        return {}

    def _publish(self) -> None:
        self.published.append((self._step, digest(self._weights.items())))

    async def upload_state_dict(self) -> None:
        self._publish()
        ray.get(self._synchronizer.set_model_state_dict.remote(self._weights, self._step))

    async def save_state_dict(self) -> None:
        self._publish()
        folder, weights = self._folder(), self._weights
        self._coordinator.save_async(
            "model_state_dict",
            lambda: _write(weights, folder / "actor" / "model.safetensors"),
            self._step,
            is_state_dict=True,
        )
        await self._coordinator.register_and_monitor(self._step, is_state_dict=True, state_dict_thread_count=1)

    async def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        if self._config.synchronizer.sync_method != SyncMethod.CHECKPOINT:
            return
        if self._step not in dict(self.published):
            self._publish()
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".full_checkpoint").touch()

        def write() -> None:
            _write(self._weights, folder / "actor" / "model.safetensors")
            torch.save({"step": self._step}, folder / "actor" / "optim.pt")

        self._coordinator.save_sync(write, self._step, is_state_dict=True)
        await self._coordinator.register_and_monitor(self._step, state_dict_thread_count=1)
        if block_until_saved:
            self._coordinator.wait_all()

    def _folder(self) -> Path:
        return Path(self._config.checkpoint_job_dir) / f"global_step_{self._step}"

    # -- nccl, over gloo

    async def get_weight_sync_info(self) -> tuple[str, int, list[Any]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meta = [(name, str(tensor.dtype).split(".")[-1], tuple(tensor.shape)) for name, tensor in self._weights.items()]
        return "127.0.0.1", port, meta

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: int
    ) -> None:
        await asyncio.to_thread(_enter_group, 0, master_address, master_port, world_size)

    async def teardown_weight_sync_group(self) -> None:
        dist.destroy_process_group()

    def sync_weight_nccl(self) -> None:
        self._publish()
        for tensor in self._weights.values():
            dist.broadcast(tensor, src=0)


def _monitor_class() -> Any:
    if OURS:
        return CheckpointMonitor
    from trinity.trainer.verl.trainer import CheckpointMonitor as Theirs  # imports verl

    return Theirs


def _enter_group(rank: int, address: str, port: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size, timeout=GROUP_LIMIT
    )


def _write(weights: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)


class Sampler:
    """Gives the trainer what the explorer has made."""

    namespace = ""

    def __init__(self, buffer_config: Any, **kwargs: Any) -> None:
        self._experiences = Experiences.get_actor(self.namespace)

    async def sample(self, step: int) -> tuple[list[Any], dict[str, float], list[Any]]:
        await self._experiences.take.remote()
        await asyncio.sleep(BATCH_S)
        return [], {}, []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class LoopTrainer(trainer_module.Trainer):
    def __init__(self, config: Any) -> None:
        Sampler.namespace = config.ray_namespace
        super().__init__(config)
        self._calls: list[list[Any]] = []
        self.synchronizer = Recorder(self.synchronizer, self._calls)

    async def told(self) -> dict[str, Any]:
        return {"calls": self._calls, "published": self.engine.published}


# ---- the explorer's side


class Model:
    """A rollout model that only takes weights."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._meta: list[Any] = []
        self.loads: list[tuple[int, str]] = []

    async def get_available_address_async(self, random_port: bool) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def init_process_group(self, **group: Any) -> None:
        if self._config.synchronizer.sync_method == SyncMethod.NCCL:
            place = group["master_address"], group["master_port"], group["world_size"]
            await asyncio.to_thread(_enter_group, group["rank_offset"], *place)

    async def teardown_process_group(self) -> None:
        dist.destroy_process_group()

    async def set_state_dict_meta(self, state_dict_meta: list[Any]) -> None:
        self._meta = state_dict_meta

    async def sync_model_weights(self, model_version: int, method: SyncMethod, timeout: float) -> int:
        receive: Callable[[int], dict[str, torch.Tensor]] = {
            SyncMethod.MEMORY: self._from_memory,
            SyncMethod.CHECKPOINT: self._from_disk,
            SyncMethod.NCCL: self._from_group,
        }[method]
        weights = await asyncio.to_thread(receive, model_version)
        self.loads.append((model_version, digest(weights.items())))
        return model_version

    def _from_memory(self, version: int) -> dict[str, torch.Tensor]:
        synchronizer = Synchronizer.get_actor(namespace=self._config.ray_namespace)
        return dict(ray.get(reference) for reference in synchronizer.get_model_state_dict_iterator.remote())

    def _from_disk(self, version: int) -> dict[str, torch.Tensor]:
        folder = Path(self._config.checkpoint_job_dir) / f"global_step_{version}" / "actor"
        found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        return found

    def _from_group(self, version: int) -> dict[str, torch.Tensor]:
        weights = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in self._meta}
        for tensor in weights.values():
            dist.broadcast(tensor, src=0)
        return weights

    async def shutdown(self) -> None:
        pass


class Models:
    """Makes the rollout models, in the explorer's process."""

    def __init__(self, config: Any) -> None:
        self.made: list[Model] = []
        self.config: Any = None

    async def create_all_models(self) -> tuple[list[Model], list[Any]]:
        self.made = [Model(self.config)]
        return list(self.made), []


class Tasks:
    """So many batches of tasks."""

    def __init__(self, count: int) -> None:
        self._left = count

    async def read(self) -> list[Any]:
        if not self._left:
            raise StopAsyncIteration
        self._left -= 1
        return []

    def feedback(self, metrics: dict[str, Any]) -> None:
        pass

    def state_dict(self) -> list[Any]:
        return []


class LoopExplorer(explorer_module.Explorer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model_allocator.config = config
        self._calls: list[list[Any]] = []
        self.synchronizer = Recorder(self.synchronizer, self._calls)

    async def told(self) -> dict[str, Any]:
        return {"calls": self._calls, "loads": self.model_allocator.made[0].loads}


trainer_module.Synchronizer = explorer_module.Synchronizer = Synchronizer
trainer_module.get_trainer_wrapper = Engine
explorer_module.Allocator = Models
explorer_module.RolloutCoordinator = Experiences
explorer_module.get_taskset_scheduler = lambda explorer_state, config: Tasks(config.buffer.total_steps)
