"""Saving the weights of verl's FSDP engines, for trainers with verl's own checkpoint manager. All ranks call it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from trinity_sync.backends.engine_types import FsdpEngine
from trinity_sync.backends.fsdp_state import sharded
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl import manager
from trinity_sync.integrations.verl.manager import StateCopy
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.models.files import ModelFiles


def fsdp_save_state_dict(
    engine: FsdpEngine,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> None:
    """Save the sharded weights in the background, one part per rank; rank 0 adds what verl's merger needs.

    The trainer registers ``state_dict_thread_count`` for the step (`CheckpointCoordinator.register_and_monitor`): the
    number of ranks, or 1. The step waits for the parts of all ranks.

    Args:
        engine: verl's FSDP engine.
        local_path: a place in the step's folder, such as ``ROOT/global_step_20/actor``. None: nothing is done.
        global_step: the trainer's step.
        coordinator: this rank's.
        logger: told what is being saved.

    Raises:
        RunError: on every rank, also for what the save before failed of.
    """
    if local_path is None:
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    name = f"model_world_size_{ranks}_rank_{rank}.pt"
    parts: list[str] = []

    def announce() -> None:
        parts.extend(coordinator.part(local_path, global_step, f"model-rank-{of:05d}") for of in range(ranks))
        if rank == 0:
            coordinator.announce(global_step, parts, is_state_dict=True)

    def collect() -> None:
        copied = StateCopy()
        with sharded(engine.module, offload=torch.cuda.is_available()):
            copied.take({name: engine.module.state_dict()}, f"the weights of step {global_step}")
        metadata = manager.metadata(engine.checkpoint_manager) if rank == 0 else {}
        folder = coordinator.staged(local_path, global_step)
        # The coordinator digests what it is given as paths, and makes it durable.
        write_weights = copied.writer(name, folder, folder, durable=False, timeout_s=0.0)

        def write() -> list[Path]:
            write_weights()
            return [folder / name, *ModelFiles(metadata).write(folder)]

        # Two roles in one process write at the same time.
        coordinator.save_async(parts[rank], write, global_step, True, part=parts[rank])

    what = f"save the weights of step {global_step}"
    together(f"begin to {what}", announce)
    try:
        together(what, collect)
    except RunError as error:
        coordinator.fail(global_step, None, error)  # the part of a rank that is gone never comes
        raise
    logger.info("the weights of step %d are on their way to %s", global_step, local_path)
