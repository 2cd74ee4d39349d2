"""The workers of a verl program that trains with Megatron: Ray actors with real engines, one layout at a time."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any

import ray

from tests.backends import engines, megatron_ranks
from tests.integrations.real_engines.ranks import LIMIT, Rank

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "pp": 1},
    "pp2": {"tp": 1, "pp": 2},
    "dp2": {"tp": 1, "pp": 1},
    "dp2-late": {"tp": 1, "pp": 1, "overlap_param_gather": True},
    "tp2-same": {"tp": 2, "pp": 1, "format": "dp_reshardable"},
    "dp2-same": {"tp": 1, "pp": 1, "format": "dp_reshardable"},
    "one": {"tp": 1, "pp": 1},
}


class MegatronRank(Rank):
    """One worker. An engine is made anew when another layout is asked for, as a process has one set of groups."""

    def __init__(self, rank: int, port: int, models: str, world: int) -> None:
        import torch.distributed as dist

        super().__init__(rank, port, models, world)
        import trinity_sync.backends.lean_verl  # noqa: F401
        from trinity_sync.backends.megatron import megatron_engine

        megatron_engine.prepare()
        dist.barrier()

    def engine(self, layout: str) -> Any:
        if layout not in self._engines:
            case = {"model": "qwen3", "schedule_of_checkpoint": True, **LAYOUTS[layout]}
            self._engines = {layout: megatron_ranks.build(case, self._models)}
            self._theirs = self._engines[layout].checkpoint_mananager
        return self._engines[layout]

    def use(  # type: ignore[override]
        self,
        layout: str,
        namespace: str,
        save: list[str] | None = None,
        load: list[str] | None = None,
        *,
        trees: bool = True,
        bridge: str | None = None,
        timeout_s: float = LIMIT,
        **replaced: Any,
    ) -> None:
        """Put our manager into the engine.

        Args:
            trees: ``use_dist_checkpointing``.
            bridge: who exports: None: mbridge; ``"itself"``: mbridge, as if it were Megatron-Bridge.
            replaced: attributes of verl's manager.
        """
        from trinity_sync.integrations.verl import use_in_megatron

        engine, theirs = self.engine(layout), self._theirs
        self._set_contents(theirs, save, load or save)
        theirs.use_dist_checkpointing = trees
        theirs.provider = None if bridge is None else "a provider"
        before = {name: getattr(theirs, name) for name in replaced}
        for name, value in replaced.items():
            setattr(theirs, name, value)
        engine.checkpoint_mananager = theirs
        try:
            manager = use_in_megatron(engine, namespace, timeout_s=timeout_s)
        finally:
            for name, value in before.items():
                setattr(theirs, name, value)
        if bridge is not None:
            theirs.bridge.save_hf_weights = lambda models, path, strict: theirs.bridge.save_weights(models, path)
            theirs.bridge.load_hf_weights = theirs.bridge.load_weights
            assert not manager.vanilla_bridge

    def _set_contents(self, theirs: Any, save: list[str] | None, load: list[str] | None) -> None:
        from verl.trainer.config import CheckpointConfig

        default = ["model", "optimizer", "extra"]
        theirs.checkpoint_config = CheckpointConfig(save_contents=save or default, load_contents=load or default)
        theirs.checkpoint_save_contents, theirs.checkpoint_load_contents = save or default, load or default

    def by_verl(self, layout: str, method: str, contents: list[str] | None, *args: Any, **kwargs: Any) -> None:
        """Call a method of verl's own manager."""
        from trinity_sync.backends.megatron.cpu import CudaMeansCpu

        self.engine(layout)
        self._set_contents(self._theirs, contents, contents)
        with CudaMeansCpu():
            getattr(self._theirs, method)(*args, **kwargs)

    def load_as_verl(self, layout: str, contents: list[str], path: str) -> None:
        """Load with verl's own manager, which torch's Adam is unknown to: its step counts are loaded by us."""
        from trinity_sync.backends.megatron import optimizer_state

        optimizer = self.engine(layout).optimizer
        load = optimizer.load_state_dict

        def with_steps(state: Any) -> None:
            optimizer.load_state_dict = load
            optimizer_state.load(optimizer, state)

        optimizer.load_state_dict = with_steps
        try:
            self.by_verl(layout, "load_checkpoint", contents, path)
        finally:
            optimizer.load_state_dict = load

    def manager(self, layout: str, method: str, *args: Any, **kwargs: Any) -> Any:
        from trinity_sync.backends.megatron.cpu import CudaMeansCpu

        with CudaMeansCpu():
            return getattr(self.engine(layout).checkpoint_mananager, method)(*args, **kwargs)

    def finish_writing(self, layout: str) -> None:
        self.engine(layout).checkpoint_mananager._coordinator.wait_all()

    def train(self, layout: str, number: int) -> None:
        engine = self.engine(layout)
        engines._step(engine, engine.get_data_parallel_rank(), number)

    def draw(self, seed: int) -> None:
        """Set the random generators, each rank's apart."""
        import torch

        torch.manual_seed(seed + self.rank)

    def draw_alike(self, seed: int) -> None:
        """Set the random generators, as verl has them: one for all replicas."""
        import torch

        torch.manual_seed(seed)

    def narrow(self, layout: str, contents: list[str]) -> None:
        """Let the manager save other contents from now on."""
        self.engine(layout).checkpoint_mananager.checkpoint_save_contents = contents

    def weights(self, layout: str) -> str:
        """This rank's parameters, with what the optimizer wrote last."""
        from trinity_sync.backends.megatron import writer
        from trinity_sync.backends.megatron.cpu import CudaMeansCpu

        engine = self.engine(layout)
        if writer.gathers_late(engine.module):
            with CudaMeansCpu():
                writer.gather_parameters(engine.module)
        return engines._hash({"model": [dict(chunk.named_parameters()) for chunk in engine.module]})

    def state(self, layout: str) -> tuple[str, ...]:
        """Of this rank: parameters, optimizer, schedule and random generators."""
        engine = self.engine(layout)
        schedule = repr(sorted(engine.lr_scheduler.state_dict().items()))
        return (self.weights(layout), megatron_ranks._optimizer_hash(engine), schedule, megatron_ranks._rng())

    def weights_after_a_step(self, layout: str) -> str:
        """What a step of learning rate 0 makes of the parameters: what the optimizer holds of them."""
        engine = self.engine(layout)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        engine.lr_scheduler.num_steps = 0  # the schedule warms up from 0
        self.train(layout, 0)
        return self.weights(layout)

    def patch(self, where: str, name: str, how: str) -> None:
        """Let something of this rank fail or hang until `heal`."""
        from trinity_sync.backends.megatron import writer

        (engine,) = self._engines.values()
        coordinator = engine.checkpoint_mananager._coordinator
        owner = {"share": writer._ShareWriter, "copies": writer.Trees, "coordinator": coordinator}[where]
        before = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if how == "fail":
                raise OSError(28, "No space left on device")
            self._held.wait(LIMIT)
            return before(*args, **kwargs)

        setattr(owner, name, broken)
        self._patched.append(lambda: setattr(owner, name, before))


def start(models: Path, world: int) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    actor = ray.remote(MegatronRank).options(
        num_cpus=0, max_concurrency=4, runtime_env={"env_vars": {**engines.PLATFORM, "PYTHONPATH": str(Path.cwd())}}
    )
    return [actor.remote(rank, port, str(models), world) for rank in range(world)]


def file_hashes(folder: Path) -> dict[str, str]:
    """Of all files, by path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
