"""The functions over verl's engines, for trainers with a loop of their own: `fsdp_*` and `megatron_*`. All ranks call
them.

Uploads and broadcasts gather one full tensor at a time; rank 0 uses it, and the other ranks drop it. This module is
imported without verl and megatron: an engine has imported its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from trinity_sync.backends.base import Engine, FsdpEngine, MegatronEngineProtocol
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl.ranks import Pairs, together, together_inside, use_on_first_rank
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.parts import rank_file
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.stream import BUCKET_BYTES, broadcast, describe

if TYPE_CHECKING:
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

T = TypeVar("T")


def upload_state_dict(
    engine: Engine,
    synchronizer: Synchronizer,
    global_step: int,
    logger: Logger,
    *,
    attempt: int = 0,
    wire_dtype: str | None = None,
) -> None:
    """Hand the full weights to the Synchronizer as this version; a barrier at the end. Step 0 uploads nothing.

    Args:
        engine: verl's FSDP or Megatron engine.
        synchronizer: used by rank 0.
        global_step: the version.
        logger: gets a line after the upload.
        attempt: the run's attempt.
        wire_dtype: dtype in which floating tensors travel, such as ``"BF16"``; None: unchanged.

    Raises:
        RunError: on every rank, when one rank failed.
    """
    if global_step == 0:
        return

    def publish(pairs: Pairs) -> None:
        synchronizer.set_model_state_dict(pairs, global_step, attempt=attempt, wire_dtype=wire_dtype)

    _use(f"upload version {global_step}", engine, publish)
    logger.info("version %d was uploaded", global_step)


def state_dict_meta(engine: Engine, *, wire_dtype: str | None = None) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype as torch prints it, shape) of the tensors that `sync_weight_nccl` sends, in order, for
    `Synchronizer.setup_weight_sync_group`. Empty on other ranks than 0.
    """
    return _use("describe the weights", engine, lambda pairs: describe(pairs, wire_dtype)) or []


def sync_weight_nccl(
    engine: Engine,
    model_update_group: dist.ProcessGroup | None,
    *,
    packed: bool = False,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = True,
    timeout_s: float = 600.0,
) -> None:
    """Broadcast all parameters from rank 0 to the explorers in the group, in the engine's order, tied ones once.

    Args:
        engine: verl's FSDP or Megatron engine; all ranks gather, rank 0 sends.
        model_update_group: process group of rank 0 (its rank 0) and the explorers; None on the other ranks.
        packed: send buckets, each followed by its digest, for our receiver; else one broadcast per parameter, for
            receivers of other programs. `trinity_sync.sync.stream.receive` takes both.
        wire_dtype: dtype in which floating parameters travel, such as ``"BF16"``; None: unchanged.
        bucket_bytes: length of a bucket.
        verify: send the digests of buckets (packed only).
        timeout_s: limit of every broadcast, seconds.

    Raises:
        RunError: on every rank, when one rank failed; the group cannot be used any more.
    """

    def send(pairs: Pairs) -> None:
        assert model_update_group is not None, "rank 0 sends, so it is in the group"
        broadcast(
            model_update_group,
            pairs,
            packed=packed,
            wire_dtype=wire_dtype,
            bucket_bytes=bucket_bytes,
            verify=verify,
            timeout_s=timeout_s,
        )

    _use("broadcast the weights", engine, send)


fsdp_upload_state_dict = megatron_upload_state_dict = upload_state_dict
fsdp_state_dict_meta = megatron_state_dict_meta = state_dict_meta
fsdp_sync_weight_nccl = megatron_sync_weight_nccl = sync_weight_nccl


def _use(what: str, engine: Engine, use: Callable[[Pairs], T]) -> T | None:
    opened: list[Pairs] = []
    # A rank that failed here alone would leave its peers in the first gather.
    together(what, lambda: opened.append(_parameters(engine)))
    return use_on_first_rank(what, opened[0], use)


def _parameters(engine: Engine) -> Pairs:
    """Return (name, full tensor) of all that explorers get, in the engine's order. Collective. Raises ConfigError: on
    every rank, when the trained adapters are not among them.
    """
    tensors, adapters = engine.get_per_tensor_param()
    if adapters is not None:
        raise ConfigError(
            "the model is trained with LoRA adapters, and the engine hands out the frozen weights without them, so "
            "explorers would have the first version for ever: set verl's model.lora.merge=true to send merged weights"
        )
    return each_once(tensors)


def each_once(tensors: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name once: Megatron yields tied tensors for the first and the last pipeline stage."""
    names = set()
    for name, tensor in tensors:
        if name not in names:
            names.add(name)
            yield name, tensor


# Saves of the weights alone, for trainers with verl's own checkpoint manager.


def fsdp_save_state_dict(
    engine: FsdpEngine, local_path: str | None, global_step: int, coordinator: CheckpointCoordinator, logger: Logger
) -> None:
    """Save the sharded weights in the background, one part per rank; rank 0 adds the files for verl's merger.

    The trainer registers ``state_dict_thread_count`` for the step (`CheckpointCoordinator.register_and_monitor`): the
    number of ranks, or 1. The step waits for the parts of all ranks.

    Args:
        engine: verl's FSDP engine.
        local_path: a place in the step's folder, such as ``ROOT/global_step_20/actor``. None: nothing is done.
        global_step: the trainer's step.
        coordinator: this rank's.
        logger: gets a line when the save has begun.

    Raises:
        RunError: on every rank; also when the save before failed.
    """
    if local_path is None:
        return
    from trinity_sync.backends.fsdp_state import sharded
    from trinity_sync.integrations.verl.manager import StateCopy
    from trinity_sync.integrations.verl.model_files import metadata

    rank, ranks = dist.get_rank(), dist.get_world_size()
    name = rank_file("model", ranks, rank)
    parts: list[str] = []

    def announce() -> None:
        parts.extend(coordinator.part(local_path, global_step, f"model-rank-{of:05d}") for of in range(ranks))
        if rank == 0:
            coordinator.announce(global_step, parts, is_state_dict=True)

    def collect() -> None:
        copied = StateCopy()
        with sharded(engine.module, offload=torch.cuda.is_available()):
            copied.take({name: engine.module.state_dict()}, f"the weights of step {global_step}")
        small = ModelFiles(metadata(engine.checkpoint_manager) if rank == 0 else {})
        folder = coordinator.staged(local_path, global_step)
        # The coordinator digests and fsyncs files that are reported as paths.
        write_weights = copied.writer(name, folder, folder, durable=False, timeout_s=0.0)

        def write() -> list[Path]:
            write_weights()
            return [folder / name, *small.write(folder)]

        # Named by part: two roles in one process save at the same time.
        coordinator.save_async(parts[rank], write, global_step, True, part=parts[rank])

    what = f"save the weights of step {global_step}"
    together(f"begin to {what}", announce)
    try:
        together(what, collect)
    except RunError as error:
        coordinator.fail(global_step, None, error)  # the part of a rank that died never comes
        raise
    logger.info("the weights of step %d are on their way to %s", global_step, local_path)


def megatron_save_state_dict(
    engine: MegatronEngineProtocol,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
) -> None:
    """Save the model alone through the engine's own distributed checkpoint, one part per rank. It has barriers, so it
    runs on the calling thread. The files are visible at `local_path` after the commit. Weights that this run has saved
    already are not written again.

    The trainer registers ``state_dict_thread_count`` for the step (`CheckpointCoordinator.register_and_monitor`): the
    number of ranks, or 1. The step waits for the parts of all ranks.

    Args:
        engine: verl's Megatron engine. Its save contents are the model, and a Hugging Face export if that was asked
            for, during this save, and are restored afterwards, also after an error.
        local_path: a place in the step's folder, such as ``ROOT/global_step_20/actor``. None: nothing is done.
        global_step: the trainer's step.
        coordinator: this rank's.
        logger: gets a line after the save.

    Raises:
        ConfigError: the engine has our checkpoint manager; call its `save_state_dict`.
        RunError: on every rank, when one rank failed; the monitor has the error.
    """
    if local_path is None:
        return
    from trinity_sync.integrations.verl.committed_saves import CommittedSaves

    if isinstance(engine.checkpoint_mananager, CommittedSaves):
        raise ConfigError(
            "megatron_save_state_dict is for an engine with verl's own checkpoint manager; this one has ours"
        )
    rank = dist.get_rank()
    what = f"save the weights of step {global_step}"

    def look() -> tuple[Path, str, bool]:
        part = coordinator.part(local_path, global_step, f"model-rank-{rank:05d}")
        return coordinator.staged(local_path, global_step), part, coordinator.is_saved(part, global_step)

    # If one rank skipped what another wrote, the other would wait in its barrier.
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
        return _written(staged) if rank == 0 else []  # for all ranks, as verl ends with a barrier

    def save() -> list[Path]:
        written, *_ = together(f"write the weights of step {global_step}", write)
        return written[rank :: dist.get_world_size()]  # each rank digests a share

    together_inside(
        what,
        lambda enter: coordinator.save_sync(enter, global_step, True, part=part),
        save,
    )
    logger.info("the weights of step %d were written for %s", global_step, local_path)


def _written(place: Path) -> list[Path]:
    """List verl's files of the model alone. Other parts of the step may be written next to them."""
    return [*sorted(path for path in (place / "model").rglob("*") if path.is_file()), place / "ckpt_contents.json"]


@contextmanager
def _model_only(manager: MegatronCheckpointManager) -> Iterator[None]:
    contents, later = manager.checkpoint_save_contents, manager.checkpoint_config.async_save
    paths = list(manager.previous_saved_paths)
    manager.checkpoint_save_contents = ["model", *(name for name in contents if name == "hf_model")]
    # A write that verl finished later would not be finalised: this save is over when it returns.
    _set(manager.checkpoint_config, "async_save", False)
    try:
        yield
    finally:
        manager.checkpoint_save_contents = contents
        manager.previous_saved_paths = paths  # the monitor deletes these checkpoints, not verl
        _set(manager.checkpoint_config, "async_save", later)


def _set(config: object, name: str, value: bool) -> None:
    """Set a field of a frozen config of verl's."""
    object.__setattr__(config, name, value)
