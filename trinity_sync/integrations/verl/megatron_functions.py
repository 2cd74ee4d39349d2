"""Saving the weights of verl's Megatron engine, for trainers that keep verl's own loop. All ranks call it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from trinity_sync.backends.engine_types import MegatronEngineProtocol
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.ranks import together, together_inside

if TYPE_CHECKING:
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager


def megatron_save_state_dict(
    engine: MegatronEngineProtocol,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> None:
    """Save the model alone through the engine's own distributed checkpoint, one part per rank. It contains barriers, so
    it runs on the calling thread. The files are staged, and visible at `local_path` when the monitor has committed
    them; of weights that this run has saved already, nothing is written.

    The trainer registers ``state_dict_thread_count`` for the step (`CheckpointCoordinator.register_and_monitor`): the
    number of ranks, or 1. The step waits for the parts of all ranks.

    Args:
        engine: verl's Megatron engine. Its contents to save are narrowed to the model for this save (a Hugging Face
            export that was asked for stays in), and are what they were afterwards, also after an error.
        local_path: a place in the step's folder, such as ``ROOT/global_step_20/actor``. None: nothing is done.
        global_step: the trainer's step.
        coordinator: this rank's.
        logger: told what was saved.

    Raises:
        ConfigError: the engine has our checkpoint manager, whose saves go another way.
        RunError: on every rank, where one could not, after it was reported to the monitor.
    """
    if local_path is None:
        return
    from trinity_sync.integrations.verl.committed_saves import (
        CommittedSaves,  # brings verl, which an engine has brought already
    )

    if isinstance(engine.checkpoint_mananager, CommittedSaves):
        raise ConfigError(
            "megatron_save_state_dict is for an engine with verl's own checkpoint manager; this one has ours"
        )
    rank = dist.get_rank()
    what = f"save the weights of step {global_step}"

    def look() -> tuple[Path, str, bool]:
        part = coordinator.part(local_path, global_step, f"model-rank-{rank:05d}")
        return coordinator.staged(local_path, global_step), part, coordinator.is_saved(part, global_step)

    # What one rank skipped and another wrote would keep the other in its barrier.
    found = together(f"begin to {what}", look)
    staged, part, _ = found[rank]
    if all(saved for *_, saved in found):
        together(what, lambda: coordinator.save_sync(lambda: (), global_step, True, part=part))
        logger.info("the weights of step %d are saved already", global_step)
        return

    parts = [part for _, part, _ in found]
    together(f"begin to {what}", lambda: None if rank else coordinator.announce(global_step, parts, is_state_dict=True))

    def write() -> list[Path]:
        with _model_only(engine.checkpoint_mananager):  # verl spells it so
            engine.save_checkpoint(str(staged), global_step=global_step)
        return _written(staged) if rank == 0 else []  # of all ranks, as verl ends with a barrier

    def save() -> list[Path]:
        written, *_ = together(f"write the weights of step {global_step}", write)
        return written[rank :: dist.get_world_size()]  # to digest: a share each

    together_inside(
        what,
        lambda enter: coordinator.save_sync(enter, global_step, True, part=part),
        save,
    )
    logger.info("the weights of step %d were written for %s", global_step, local_path)


def _written(place: Path) -> list[Path]:
    """What verl saves of the model alone. Other parts of the step may be on their way to files beside it."""
    return [*sorted(path for path in (place / "model").rglob("*") if path.is_file()), place / "ckpt_contents.json"]


@contextmanager
def _model_only(manager: MegatronCheckpointManager) -> Iterator[None]:
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


def _set(config: object, name: str, value: bool) -> None:
    """Set a field of a config of verl's, which are frozen."""
    object.__setattr__(config, name, value)
