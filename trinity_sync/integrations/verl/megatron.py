"""Functions over verl's Megatron engine, for trainers that keep verl's own loop. All ranks call them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trinity_sync.backends.engines import Engine, MegatronEngine
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.integrations.verl import weights
from trinity_sync.integrations.verl.parameters import parameters
from trinity_sync.integrations.verl.ranks import together, together_inside
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.stream import BUCKET_BYTES

if TYPE_CHECKING:
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager


def megatron_save_state_dict(
    engine: MegatronEngine,
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
        RunError: on every rank, where one could not, after it was reported to the monitor.
    """
    if local_path is None:
        return
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
        logger.info("the weights of step %d are committed already", global_step)
        return

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


def megatron_upload_state_dict(
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
        engine: verl's Megatron engine.
        synchronizer: used by rank 0.
        global_step: the version.
        logger: told what was uploaded.
        attempt: the run's attempt.
        wire_dtype: the dtype of floating tensors on their way, such as ``"BF16"``; None: as they are.

    Raises:
        RunError: on every rank, where one could not.
    """
    if global_step == 0:
        return
    weights.upload(_tensors(engine), synchronizer, global_step, attempt=attempt, wire_dtype=wire_dtype)
    logger.info("version %d was uploaded", global_step)


def megatron_state_dict_meta(
    engine: Engine, *, wire_dtype: str | None = None
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype as torch prints it, shape) of what `megatron_sync_weight_nccl` sends, in order: for
    `Synchronizer.setup_weight_sync_group`. On rank 0; empty elsewhere.
    """
    return weights.meta(_tensors(engine), wire_dtype)


def megatron_sync_weight_nccl(
    engine: Engine,
    model_update_group: dist.ProcessGroup | None,
    *,
    packed: bool = False,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float = 600.0,
) -> None:
    """Broadcast all parameters from rank 0 to the explorers in the group, in the order of `get_per_tensor_param()`, a
    tied one once.

    Args:
        engine: verl's Megatron engine; all ranks gather, rank 0 sends.
        model_update_group: process group of rank 0 (its rank 0) and the explorers; None on the other ranks.
        packed: in buckets, each followed by its digest, for our receiver. Else one broadcast per parameter, as the
            receivers of others expect it. `trinity_sync.sync.stream.receive` takes both.
        wire_dtype: the dtype of floating parameters on their way, such as ``"BF16"``; None: as they are.
        bucket_bytes: length of a bucket.
        verify: send the digests of buckets (packed only).
        timeout_s: limit of every broadcast, seconds.

    Raises:
        RunError: on every rank, where one failed; the group is of no use any more then.
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
    return lambda: _each_once(parameters(engine))


def _each_once(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The engine's tensors by Hugging Face name. Tied ones come from the first and the last pipeline stage both."""
    seen = set()
    for name, tensor in tensors:
        if name not in seen:
            seen.add(name)
            yield name, tensor
