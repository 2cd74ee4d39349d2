"""Functions over verl's FSDP engines, for trainers that keep verl's own checkpoint manager. All ranks call them."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from trinity_sync.backends.engines import Engine, FsdpEngine
from trinity_sync.backends.sharded import sharded
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.integrations.verl import files, weights
from trinity_sync.integrations.verl.parameters import parameters
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.state import StateCopy
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.stream import BUCKET_BYTES


def fsdp_save_state_dict(
    engine: FsdpEngine,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> None:
    """Save the sharded weights in the background, one part per rank; rank 0 adds what verl's merger needs.

    The trainer registers ``state_dict_thread_count`` = number of ranks for the step
    (`CheckpointCoordinator.register_and_monitor`).

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
    rank = dist.get_rank()
    name = f"model_world_size_{dist.get_world_size()}_rank_{rank}.pt"

    def collect() -> None:
        copied = StateCopy()
        with sharded(engine.module, offload=torch.cuda.is_available()):
            copied.take({name: engine.module.state_dict()}, f"the weights of step {global_step}")
        metadata = files.metadata(engine.checkpoint_manager) if rank == 0 else {}
        folder = coordinator.staged(local_path, global_step)
        # The coordinator digests what it is given as paths, and makes it durable.
        write_weights = copied.writer(name, folder, folder, durable=False)

        def write() -> list[Path]:
            write_weights()
            return [folder / name, *files.write_files(metadata, folder)]

        part = coordinator.part(local_path, global_step, f"model-rank-{rank:05d}")
        # Two roles in one process write at the same time.
        coordinator.save_async(part, write, global_step, True, part=part)

    together(f"save the weights of step {global_step}", collect)
    logger.info("the weights of step %d are on their way to %s", global_step, local_path)


def fsdp_upload_state_dict(
    engine: Engine,
    synchronizer: Synchronizer,
    global_step: int,
    logger: logging.Logger,
    *,
    attempt: int = 0,
    wire_dtype: str | None = None,
) -> None:
    """Hand the full weights to the Synchronizer under this version; a barrier at the end. Step 0 uploads nothing.

    Each tensor is gathered from all ranks and let go on all but rank 0, which packs it.

    Args:
        engine: verl's FSDP engine.
        synchronizer: used by rank 0.
        global_step: the version.
        logger: told what was uploaded.
        attempt: the run's attempt.
        wire_dtype: the dtype of floating tensors on their way, such as ``"BF16"``; None: as they are.

    Raises:
        RunError: on every rank, where rank 0 could not.
    """
    if global_step == 0:
        return
    weights.upload(_tensors(engine), synchronizer, global_step, attempt=attempt, wire_dtype=wire_dtype)
    logger.info("version %d was uploaded", global_step)


def fsdp_state_dict_meta(engine: Engine, *, wire_dtype: str | None = None) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype as torch prints it, shape) of what `fsdp_sync_weight_nccl` sends, in order: for
    `Synchronizer.setup_weight_sync_group`. On rank 0; empty elsewhere.
    """
    return weights.meta(_tensors(engine), wire_dtype)


def fsdp_sync_weight_nccl(
    engine: Engine,
    model_update_group: dist.ProcessGroup | None,
    *,
    packed: bool = False,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float = 600.0,
) -> None:
    """Broadcast all parameters from rank 0 to the explorers in the group, in the engine's own order.

    Args:
        engine: verl's FSDP engine; all ranks gather, rank 0 sends.
        model_update_group: process group of rank 0 (its rank 0) and the explorers; None on the other ranks.
        packed: in buckets, each followed by its digest, for our receiver. Else one broadcast per parameter, as the
            receivers of others expect it. `trinity_sync.sync.stream.receive` takes both.
        wire_dtype: the dtype of floating parameters on their way, such as ``"BF16"``; None: as they are.
        bucket_bytes: length of a bucket.
        verify: send the digests of buckets (packed only).
        timeout_s: limit of every broadcast, seconds.

    Raises:
        RunError: on every rank, where a broadcast failed; the group is of no use any more then.
    """
    weights.send(
        _tensors(engine),
        model_update_group,
        packed=packed,
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
        verify=verify,
        timeout_s=timeout_s,
    )


def _tensors(engine: Engine) -> weights.OpenTensors:
    return lambda: parameters(engine)
