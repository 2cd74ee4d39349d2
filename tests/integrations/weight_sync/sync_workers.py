"""verl's own manager, trainer's and checkpoint-engine workers, with a rollout that holds a transformers model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout import BaseRollout

from tests.backends import engines
from tests.integrations.weight_sync.sync_members import shared_memory

BUCKET_BYTES = 4 << 10
"""The sender decides: many buckets, between which members die."""
MODULE = "trinity_sync.integrations.verl.plugin"


def config(backend: str, keys: dict[str, Any]) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(
        backend=backend,
        update_weights_bucket_megabytes=1,
        engine_kwargs={backend: keys},
        custom_backend_module=MODULE,
    )


class _Failing:
    """A member that remembers what its sync failed of, and dies where it is told to."""

    def __init__(self) -> None:
        self._failed = asyncio.Event()
        self._why = ""
        self._dies_at: int | None = None

    def die(self, at: int) -> None:
        """Be killed in the next sync, when this tensor comes."""
        self._dies_at = at

    def fail(self, error: BaseException) -> None:
        self._why = f"{type(error).__name__}: {error}"
        self._failed.set()

    async def failure(self) -> str:
        """What the sync failed of, once it has."""
        await self._failed.wait()
        self._failed.clear()
        return self._why

    def memory(self) -> list[str]:
        """Shared memory that this process holds."""
        return shared_memory()

    def reached(self, number: int) -> None:
        if number == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Trainer(TrainingWorker, _Failing):
    """A trainer's rank, of which verl's own methods move the weights."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, port: int, model: str, backend: str, keys: dict[str, Any]) -> None:
        import torch.distributed as dist
        from verl.trainer.config import CheckpointConfig
        from verl.utils.import_utils import import_external_libs
        from verl.workers.config import (
            FSDPEngineConfig,
            FSDPOptimizerConfig,
            HFModelConfig,
            TrainingWorkerConfig,
        )

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
        _Failing.__init__(self)
        super().__init__(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=model,
                    use_remove_padding=False,
                    enable_gradient_checkpointing=False,
                    override_config={"attn_implementation": "sdpa"},
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2", fsdp_size=-1, model_dtype="fp32", use_torch_compile=False
                ),
                optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=20),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.reset()
        self.actor = self
        import_external_libs(MODULE)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            backend, is_master=rank == 0, bucket_size=BUCKET_BYTES, **keys
        )
        self._watch()

    def _watch(self) -> None:
        send, export = self.checkpoint_engine.send_weights, self.engine.get_per_tensor_param
        shards = self.engine.get_per_tensor_param_shard

        async def sending(*args: Any, **kwargs: Any) -> Any:
            try:
                return await send(*args, **kwargs)
            except BaseException as error:
                self.fail(error)
                raise

        def counted(items: Iterator[Any]) -> Iterator[Any]:
            for number, item in enumerate(items):
                self.reached(number)
                yield item

        self.checkpoint_engine.send_weights = sending
        self.engine.get_per_tensor_param = lambda **more: (counted(export(**more)[0]), None)
        self.engine.get_per_tensor_param_shard = lambda **more: (counted(shards(**more)[0]), None)

    async def change(self, seed: int) -> str:
        """Give the model other weights; the digest of all of them."""
        import torch

        from trinity_sync.backends.fsdp import FsdpBackend

        made = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                local = parameter.to_local()
                local.copy_(torch.randn(local.shape, generator=made))
        return engines._digest(FsdpBackend(self.engine, "BF16"), 2)


class Rollout(BaseRollout):
    """A transformers model that takes named tensors."""

    def __init__(self, model: str, worker: RolloutWorker) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.worker = worker

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **more: Any) -> None:
        assert wire_format == "named_tensors"
        state, seen = self.model.state_dict(), set()
        try:
            async for name, tensor in weights:
                self.worker.reached(len(seen))
                state[name].copy_(tensor)
                seen.add(name)
        except BaseException as error:
            self.worker.fail(error)
            raise
        assert seen == set(state)

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class RolloutWorker(CheckpointEngineWorker, _Failing):
    """verl's worker beside a rollout engine."""

    def __init__(self, model: str, backend: str, keys: dict[str, Any]) -> None:
        from verl.workers.config import RolloutConfig

        _Failing.__init__(self)
        rollout = RolloutConfig(name="vllm", checkpoint_engine=config(backend, keys))
        super().__init__(rollout, None, Rollout(model, self))

    def digest(self) -> str:
        from trinity_sync.weights.tensors import saved_tensors, state_digest

        return state_digest(saved_tensors(self.server_adapter.model), "BF16")


class Replica:
    """What verl's manager asks of a replica."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def nothing(self, **more: Any) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


class Program:
    """A verl program on CPUs: two FSDP2 ranks, and one rollout worker or more."""

    def __init__(self, models: Path, keys: dict[str, Any], *, backend: str = "trinity", workers: int = 1) -> None:
        self.backend, self.keys, self.model = backend, keys, str(models / "untied")
        self.rollout = [self._actor(RolloutWorker, 0, 1, self.model, backend, keys) for _ in range(workers)]
        self.start_trainer()

    def start_trainer(self) -> None:
        port = _free_port()
        self.ranks = [self._actor(Trainer, rank, 2, port, self.model, self.backend, self.keys) for rank in range(2)]

    def restart(self, role: str) -> None:
        """After a death: all ranks of the trainer, as none goes on without the others; or the rollout's workers."""
        if role == "rollout":
            self.end(self.rollout)
            self.rollout = [self._actor(RolloutWorker, 0, 1, self.model, self.backend, self.keys) for _ in self.rollout]
        else:
            self.end(self.ranks)
            self.start_trainer()

    def move(self, step: int) -> dict[str, float]:
        group = RayWorkerGroup(
            worker_handles=self.ranks, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Trainer))
        )
        manager = CheckpointEngineManager(config(self.backend, self.keys), group, [Replica(self.rollout)])
        return manager.update_weights(global_steps=step)

    def end(self, actors: list[Any]) -> None:
        for actor in actors:
            ray.kill(actor)

    def _actor(self, cls: type, rank: int, world: int, *args: Any) -> Any:
        variables = {
            **engines.PLATFORM,
            "PYTHONPATH": str(Path.cwd()),
            "TRINITY_SYNC_NO_GATHER": "1" if self.backend == "delta_sharded" else "0",
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        return ray.remote(cls).options(num_cpus=0, runtime_env={"env_vars": variables}).remote(*args)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
