"""Functions over verl's Megatron engine, for trainers that keep verl's own loop. All ranks call them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.integrations.verl.parameters import parameters
from trinity_sync.integrations.verl.ranks import together


class _Receiver(Protocol):
    """Where versions go: `trinity_sync.sync.Synchronizer`."""

    def set_model_state_dict(self, model_state_dict: dict[str, torch.Tensor], trainer_step: int) -> Any:
        """Take the weights of a step."""
        ...


def megatron_save_state_dict(
    engine: Any,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> None:
    """Save the model alone through the engine's own distributed checkpoint, one part per rank. It contains barriers, so
    it runs on the calling thread. The files are staged, and visible at `local_path` when the monitor has committed
    them; of weights that this run has committed already, nothing is written.

    The trainer registers ``state_dict_thread_count`` = number of ranks for the step
    (`CheckpointCoordinator.register_and_monitor`).

    Args:
        engine: verl's Megatron engine. Its contents to save are narrowed to the model for this save (a Hugging Face
            export that was asked for stays in), and are what they were afterwards, also after an error.
        local_path: a place in the step's folder, such as ``ROOT/global_step_20/actor``. None: nothing is done.
        global_step: the trainer's step.
        coordinator: this rank's.
        logger: told what was saved.

    Raises:
        what the engine raises, after it was reported to the monitor; RunError on every rank where one does not reach
        the monitor.
    """
    if local_path is None:
        return
    part = f"model-rank-{dist.get_rank():05d}"
    staged = coordinator.staged(local_path, global_step)
    # What one rank skipped and another wrote would keep the other in its barrier.
    what = f"begin to save the weights of step {global_step}"
    if all(together(what, lambda: coordinator.is_saved(part, global_step))):
        coordinator.save_sync(lambda: (), global_step, True, part=part)
        logger.info("the weights of step %d are committed already", global_step)
        return

    def save() -> None:
        with _model_only(engine.checkpoint_mananager):  # verl spells it so
            engine.save_checkpoint(str(staged), global_step=global_step)

    coordinator.save_sync(save, global_step, True, part=part)
    logger.info("the weights of step %d were written for %s", global_step, local_path)


@contextmanager
def _model_only(manager: Any) -> Iterator[None]:
    contents, later = manager.checkpoint_save_contents, manager.checkpoint_config.async_save
    paths = list(manager.previous_saved_paths)
    manager.checkpoint_save_contents = ["model", *(name for name in contents if name == "hf_model")]
    # Nobody finalises what verl writes later, and this save is over when it returns.
    _set(manager.checkpoint_config, "async_save", False)
    try:
        yield
    finally:
        manager.checkpoint_save_contents = contents
        manager.previous_saved_paths = paths  # verl neither counts nor deletes what the monitor commits
        _set(manager.checkpoint_config, "async_save", later)


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field of a config of verl's, which are frozen."""
    object.__setattr__(config, name, value)


def megatron_upload_state_dict(engine: Any, synchronizer: _Receiver, global_step: int, logger: logging.Logger) -> None:
    """Hand the full weights to the Synchronizer under this version; a barrier at the end. Step 0 uploads nothing.

    Args:
        engine: verl's Megatron engine; each tensor is gathered on all ranks, and kept on rank 0 only.
        synchronizer: used by rank 0.
        global_step: the version.
        logger: told what was uploaded.

    Raises:
        what the Synchronizer raises, on rank 0, after the barrier.
    """
    if global_step == 0:
        return
    first = dist.get_rank() == 0
    state = {name: tensor.detach().cpu().clone() for name, tensor in _each_once(engine) if first}
    try:
        if first:
            synchronizer.set_model_state_dict(state, global_step)
    finally:
        dist.barrier()
    logger.info("version %d was uploaded", global_step)


def megatron_sync_weight_nccl(engine: Any, model_update_group: Any) -> None:
    """Broadcast all parameters from rank 0 to the explorers in the group, one broadcast per parameter in the order of
    `get_per_tensor_param()`, a tied one once.

    Args:
        engine: verl's Megatron engine; all ranks gather, rank 0 sends.
        model_update_group: process group of rank 0 (its rank 0) and the explorers; None on the other ranks.
    """
    sends = dist.get_rank() == 0
    for _, tensor in _each_once(engine):
        if sends:
            dist.broadcast(tensor.detach().contiguous(), group_src=0, group=model_update_group)


def _each_once(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The engine's tensors by Hugging Face name. Tied ones come from the first and the last pipeline stage both."""
    seen = set()
    for name, tensor in parameters(engine):
        if name not in seen:
            seen.add(name)
            yield name, tensor
