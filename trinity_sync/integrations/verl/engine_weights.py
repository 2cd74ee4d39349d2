"""Whole tensors from an engine of verl's to explorers: the functions over either kind of engine. All ranks call them.

Each tensor is gathered from all ranks and let go on all but rank 0, which uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from trinity_sync.backends.engine_types import Engine
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.stream import BUCKET_BYTES, broadcast, describe

T = TypeVar("T")

Pairs = Iterable[tuple[str, torch.Tensor]]


def upload_state_dict(
    engine: Engine,
    synchronizer: Synchronizer,
    global_step: int,
    logger: logging.Logger,
    *,
    attempt: int = 0,
    wire_dtype: str | None = None,
) -> None:
    """Hand the full weights to the Synchronizer under this version; a barrier at the end. Step 0 uploads nothing.

    Args:
        engine: verl's FSDP or Megatron engine.
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

    def publish(pairs: Pairs) -> None:
        synchronizer.set_model_state_dict(pairs, global_step, attempt=attempt, wire_dtype=wire_dtype)

    _use(f"upload version {global_step}", engine, publish)
    logger.info("version %d was uploaded", global_step)


def state_dict_meta(engine: Engine, *, wire_dtype: str | None = None) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype as torch prints it, shape) of what `sync_weight_nccl` sends, in order: for
    `Synchronizer.setup_weight_sync_group`. On rank 0; empty elsewhere.
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
    """Broadcast all parameters from rank 0 to the explorers in the group, in the engine's own order, a tied one once.

    Args:
        engine: verl's FSDP or Megatron engine; all ranks gather, rank 0 sends.
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
    # A rank that cannot even begin would leave its peers in the first gather.
    together(what, lambda: opened.append(_parameters(engine)))
    return use_on_first_rank(what, opened[0], use)


def _parameters(engine: Engine) -> Pairs:
    """Return (name, full tensor) of all that explorers get, in the engine's order. All ranks go through them.

    Raises:
        ConfigError: on every rank, where what is trained is not among them.
    """
    tensors, adapters = engine.get_per_tensor_param()
    if adapters is not None:
        raise ConfigError(
            "the model is trained with LoRA adapters, and the engine hands out the frozen weights without them, so "
            "explorers would have the first version for ever: set verl's model.lora.merge=true to send merged weights"
        )
    return each_once(tensors)


def each_once(tensors: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name. From Megatron tied ones come from the first and the last pipeline stage both."""
    seen = set()
    for name, tensor in tensors:
        if name not in seen:
            seen.add(name)
            yield name, tensor
