"""The workers of a plain verl program: Ray actors with real FSDP engines, and a test that tells them what to do."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from tests.backends import engines

LIMIT = 60.0
START_LIMIT = 240.0
WORLD = 2


class Rank:
    """One worker. Engines are made once per strategy and go through all tests."""

    def __init__(self, rank: int, port: int, models: str, world: int = WORLD) -> None:
        import warnings

        warnings.simplefilter("ignore")
        import torch.distributed as dist
        import verl  # noqa: F401 - loads the platform

        self.rank = rank
        self._models = Path(models)
        self._engines: dict[str, Any] = {}
        self._held = threading.Event()
        self._patched: list[Callable[[], None]] = []
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")

    def pid(self) -> int:
        return os.getpid()

    def program(self) -> Any:
        from trinity_sync.integrations.verl.local_run import this_program

        return this_program()

    def join_run(self, root: str, resume_step: int) -> Any:
        """Return pid and attempt of the run's monitor, which this process is connected to until `leave_run`."""
        from trinity_sync.integrations.verl.local_run import join_run

        self._monitor = join_run(root, resume_step=resume_step, timeout_s=LIMIT)
        return self._monitor.client.describe().result(LIMIT)["pid"], self._monitor.attempt

    def leave_run(self) -> None:
        self._monitor.handle.close()

    def engine(self, strategy: str) -> Any:
        if strategy not in self._engines:
            model = {"fsdp": "tied", "fsdp2": "untied"}[strategy]
            self._engines[strategy] = engines._engine(str(self._models / model), strategy, -1)
        return self._engines[strategy]

    def with_adapters(self, strategy: str) -> str:
        """Another engine, whose model is trained with LoRA; its name."""
        name = f"{strategy} with adapters"
        lora = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
        self._engines[name] = engines._engine(str(self._models / "untied"), strategy, -1, **lora)
        return name

    def use(self, strategy: str, namespace: str, contents: list[str] | None = None) -> None:
        """Put our manager into the engine."""
        from verl.trainer.config import CheckpointConfig

        from trinity_sync.integrations.verl import use_in

        engine = self.engine(strategy)
        if contents is not None:
            engine.checkpoint_config = CheckpointConfig(save_contents=contents)
        else:
            engine.checkpoint_config = CheckpointConfig()
        use_in(engine, namespace, timeout_s=LIMIT)

    def save_as_verl(self, strategy: str, path: str, step: int) -> None:
        """Save with the checkpoint manager that verl's engine comes with."""
        from verl.trainer.config import CheckpointConfig
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        engine = self.engine(strategy)
        FSDPCheckpointManager(
            model=engine.module,
            optimizer=engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
            processing_class=engine.model_config.get_processor(),
            checkpoint_config=CheckpointConfig(),
        ).save_checkpoint(path, global_step=step)

    def without(self, strategy: str, part: str) -> None:
        """Let the manager be one that was made without a part."""
        setattr(self.engine(strategy).checkpoint_manager, part, None)

    def train(self, strategy: str, number: int) -> None:
        engines._step(self.engine(strategy), self.rank, number)

    def digest(self, strategy: str) -> str:
        """Version digest of the weights, of all ranks together."""
        from trinity_sync.backends.fsdp import FsdpBackend

        return engines._digest(FsdpBackend(self.engine(strategy), "BF16"), WORLD)

    def state(self, strategy: str) -> str:
        """Of this rank's model and optimizer."""
        from trinity_sync.backends.fsdp import FsdpBackend

        return engines._hash(FsdpBackend(self.engine(strategy), "BF16").state("verl"))

    def manager(self, strategy: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's checkpoint manager; seconds that it took."""
        started = time.monotonic()
        getattr(self.engine(strategy).checkpoint_manager, method)(*args, **kwargs)
        return time.monotonic() - started

    def finish_writing(self, strategy: str) -> None:
        """What the manager writes is written, whether or not it is committed."""
        self.engine(strategy).checkpoint_manager._coordinator.wait_all()

    def by_engine(self, strategy: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Call the engine itself, as verl's workers do."""
        getattr(self.engine(strategy), method)(*args, **kwargs)

    def run(self, source: str, strategy: str, **names: Any) -> None:
        """Run a piece of a program, which has `engine`, `train` and these names."""
        own = {"engine": self.engine(strategy), "train": lambda step: self.train(strategy, step), **names}
        exec(compile(source, "<example>", "exec"), own)

    def function(self, name: str, strategy: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the functions over engines."""
        import logging

        from trinity_sync.integrations import verl

        logged = () if name in ("fsdp_state_dict_meta", "fsdp_sync_weight_nccl") else (logging.getLogger("test"),)
        return getattr(verl, name)(self.engine(strategy), *args, *logged, **kwargs)

    def save_weights(self, strategy: str, path: str, step: int, monitor: Any) -> None:
        from trinity_sync.checkpoint import CheckpointCoordinator

        coordinator = CheckpointCoordinator(monitor, timeout_s=LIMIT)
        self.function("fsdp_save_state_dict", strategy, path, step, coordinator)
        coordinator.wait_all()

    def broadcast(self, strategy: str, synchronizer: Any, explorers: int, step: int, **kwargs: Any) -> None:
        """A round of `fsdp_sync_weight_nccl`, as the trainer's side goes through it."""
        from trinity_sync.integrations.verl import fsdp_state_dict_meta, fsdp_sync_weight_nccl
        from trinity_sync.sync.stream import open_group

        engine = self.engine(strategy)
        meta = fsdp_state_dict_meta(engine, wire_dtype="BF16")
        group = None
        if self.rank == 0:
            group = open_group(synchronizer, "127.0.0.1", meta, explorers=explorers, timeout_s=LIMIT)
            assert synchronizer.ready_to_nccl_sync("trainer", step) == step
        fsdp_sync_weight_nccl(engine, group, wire_dtype="BF16", timeout_s=LIMIT, **kwargs)
        if self.rank == 0:
            synchronizer.notify_nccl_sync_done(step)

    # ---- faults

    def patch(self, where: str, name: str, how: str) -> None:
        """Let something of this rank fail or hang until `heal`."""
        from trinity_sync.integrations.verl import manager

        owner = {"state": manager}.get(where) or self.engine(where).optimizer
        before = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if how == "fail":
                raise OSError(28, "No space left on device")
            self._held.wait(LIMIT)
            return before(*args, **kwargs)

        setattr(owner, name, broken)
        self._patched.append(lambda: setattr(owner, name, before))

    def heal(self) -> None:
        self._held.set()
        self._held = threading.Event()
        for undo in self._patched:
            undo()
        self._patched.clear()


def start(models: Path) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    actor = ray.remote(Rank).options(
        num_cpus=0, max_concurrency=4, runtime_env={"env_vars": {**engines.PLATFORM, "PYTHONPATH": str(Path.cwd())}}
    )
    return [actor.remote(rank, port, str(models)) for rank in range(WORLD)]


def every(ranks: list[Any], method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a method on all ranks; their results."""
    return ray.get([getattr(rank, method).remote(*args, **kwargs) for rank in ranks], timeout=LIMIT)


def outcomes(ranks: list[Any], method: str, *args: Any, **kwargs: Any) -> list[Exception | None]:
    """Call a method on all ranks; what each of them raised."""
    calls = [getattr(rank, method).remote(*args, **kwargs) for rank in ranks]
    raised: list[Exception | None] = []
    for call in calls:
        try:
            ray.get(call, timeout=LIMIT)
            raised.append(None)
        except Exception as error:
            raised.append(error)
    return raised


def merged(folder: Path, prefix: str = "model") -> dict[str, torch.Tensor]:
    """Full tensors of the shard files of a FSDP2 checkpoint."""
    shards = [
        torch.load(folder / f"{prefix}_world_size_{WORLD}_rank_{rank}.pt", weights_only=False) for rank in range(WORLD)
    ]
    return {name: torch.cat([shard[name].to_local() for shard in shards]) for name in shards[0]}
