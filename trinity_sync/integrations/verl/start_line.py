"""The line that a program of verl's prints at its start: where its checkpoints go, and which of them stay.

verl's trainers know the folder and the limit, its engines do not. The line comes before a checkpoint is looked for.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from trinity_sync.integrations.verl.engine_registry import RETENTION
from trinity_sync.integrations.verl.vendor import say

Method = Callable[..., Any]


def announce(folder: str, limits: Iterable[object]) -> None:
    """Print the line. Called by rank 0, or by the process of verl's driver under Ray, once for a trainer.

    Args:
        folder: verl's ``trainer.default_local_dir``.
        limits: how many checkpoints of each role verl keeps; the smallest positive one holds.
    """
    smallest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    kept = [] if smallest is None else [f"the newest {smallest}"]
    kept += os.environ.get(RETENTION, "").split()
    say(f"on: checkpoints are committed to {Path(folder).absolute()}; kept: {', '.join(kept) or 'all'}")


def register(module: ModuleType) -> None:
    """Have the trainers of one of verl's modules print the line."""
    for name, method, announced in (
        ("CheckpointHandler", "__init__", functools.partial(_of_handler, module)),
        ("PPOTrainer", "_load_checkpoint", _of_trainer),
        ("RayPPOTrainer", "_load_checkpoint", _of_trainer),
    ):
        owner = vars(module).get(name)
        if owner is not None and owner.__module__ == module.__name__:
            setattr(owner, method, announced(getattr(owner, method)))


def _of_handler(module: ModuleType, init: Method) -> Method:
    """SFT, with torchrun and under Ray. An engine that is left to verl has said so."""

    @functools.wraps(init)
    def announced(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        is_ours = self.mode != module.OrchestrationMode.SPMD or getattr(self.engine, "_saves", None) is not None
        if self.rank == 0 and is_ours:
            announce(self.default_local_dir, [self.max_ckpt_to_keep])

    return announced


def _of_trainer(load: Method) -> Method:
    """PPO."""

    @functools.wraps(load)
    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(AttributeError):  # of a trainer that was changed: the line is not worth its end
            trainer = self.config.trainer
            keys = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")[: 2 if self.use_critic else 1]
            only_newest = getattr(trainer, "remove_previous_ckpt_in_save", False)
            announce(trainer.default_local_dir, [1] if only_newest else [getattr(trainer, key, None) for key in keys])
        return load(self, *args, **kwargs)

    return announced
