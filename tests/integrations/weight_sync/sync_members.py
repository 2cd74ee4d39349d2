"""A weight sync's members, all in this process, each in a thread of its own, driven as verl's manager does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trinity_sync.integrations.verl.weight_sync.checkpoint_engine import WeightSync

LIMIT = 20.0
MODES = ("memory", "nccl", "checkpoint")
BUCKET = 1024  # bytes: several buckets, and a tensor that is larger than one
Named = tuple[str, torch.Tensor]


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 16), "a.weight": (16, 8), "a.bias": (7,), "empty": (0, 4), "scale": (), "head": (5, 3, 2)}
    found = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    return found | {"steps": torch.arange(9), "half": found["a.weight"].bfloat16()}


class Members:
    """Two ranks of the trainer, and receivers."""

    def __init__(self, mode: str, folder: Path, *, receivers: int = 2, timeout_s: float = LIMIT, **more: object):
        self.folder = folder
        given = {"mode": mode, "timeout_s": timeout_s, **({"dir": str(folder)} if mode == "checkpoint" else {}), **more}
        self.ranks = [WeightSync(BUCKET, is_master=rank == 0, **given) for rank in range(2)]
        self.rollout = [WeightSync(BUCKET, **given) for _ in range(receivers)]
        self.pool = ThreadPoolExecutor(8)

    def meet(self) -> None:
        everybody = [*self.ranks, *self.rollout]
        ready = list(self.pool.map(lambda member: member.prepare(), everybody))
        of_ranks, of_rollout = WeightSync.build_topology(len(self.ranks), len(self.rollout), ready)
        places = [*of_ranks["place"], *of_rollout["place"]]
        list(self.pool.map(lambda member, its: member.init_process_group(place=its), everybody, places))

    def move(self, state: dict[str, torch.Tensor], step: int, given: Iterable[Named] | None = None) -> list[Any]:
        """What became of each member: what was returned, received or raised."""
        futures = [
            *(
                self.pool.submit(send, rank, given if given is not None else iter(state.items()), step)
                for rank in self.ranks[:1]
            ),
            *(self.pool.submit(send, rank, iter(state.items()), step) for rank in self.ranks[1:]),
            *(self.pool.submit(receive, one, step) for one in self.rollout),
        ]
        return [future.exception(3 * LIMIT) or future.result() for future in futures]

    def finalize(self) -> None:
        for member in (*self.ranks, *self.rollout):
            member.finalize()


def send(engine: WeightSync, given: Iterable[Named], step: int) -> Any:
    return asyncio.run(engine.send_weights(given, step))  # type: ignore[arg-type]


def receive(engine: WeightSync, step: int, use: Callable[[str], None] = lambda name: None) -> dict[str, torch.Tensor]:
    async def all_of_them() -> dict[str, torch.Tensor]:
        found = {}
        async for name, tensor in engine.receive_weights(step):
            found[name] = tensor
            use(name)
        return found

    return asyncio.run(all_of_them())


def shared_memory() -> list[str]:
    """What this process holds of shared memory without a name, and what is in /dev/shm."""
    held = [entry for entry in Path("/proc/self/fd").iterdir() if _is_full(entry)]
    return [str(entry) for entry in (*held, *Path("/dev/shm").glob("*trinity-sync-weights*"))]


def _is_full(entry: Path) -> bool:
    try:
        return "trinity-sync-weights" in str(entry.readlink()) and entry.stat().st_blocks > 0
    except FileNotFoundError:  # it was closed meanwhile
        return False


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.name != ".lock") if folder.exists() else []
