"""Whole tensors from an engine of verl's to explorers: what the functions over either kind of engine have in common.

Each tensor is gathered from all ranks and let go on all but rank 0, which uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.stream import broadcast, describe

T = TypeVar("T")

Pairs = Iterable[tuple[str, torch.Tensor]]

OpenTensors = Callable[[], Pairs]
"""Gives (name, whole tensor) one after another. All ranks go through them, whatever one of them fails of."""


def upload(
    tensors: OpenTensors, synchronizer: Synchronizer, step: int, *, attempt: int, wire_dtype: str | None
) -> None:
    """Hand them to the Synchronizer under this version. Collective; a barrier at the end."""

    def publish(pairs: Pairs) -> None:
        synchronizer.set_model_state_dict(pairs, step, attempt=attempt, wire_dtype=wire_dtype)

    _use(f"upload version {step}", tensors, publish)


def meta(tensors: OpenTensors, wire_dtype: str | None) -> list[tuple[str, str, tuple[int, ...]]]:
    """What a receiver has to be told, on rank 0. Collective."""
    return _use("describe the weights", tensors, lambda pairs: describe(pairs, wire_dtype)) or []


def send(
    tensors: OpenTensors,
    group: dist.ProcessGroup | None,
    *,
    packed: bool,
    wire_dtype: str | None,
    bucket_bytes: int,
    verify: bool,
    timeout_s: float,
) -> None:
    """Broadcast them from rank 0. Collective; a barrier at the end."""

    def send_all(pairs: Pairs) -> None:
        assert group is not None, "rank 0 sends, so it is in the group"
        broadcast(
            group,
            pairs,
            packed=packed,
            wire_dtype=wire_dtype,
            bucket_bytes=bucket_bytes,
            verify=verify,
            timeout_s=timeout_s,
        )

    _use("broadcast the weights", tensors, send_all)


def _use(what: str, tensors: OpenTensors, use: Callable[[Pairs], T]) -> T | None:
    opened: list[Pairs] = []
    # A rank that cannot even begin would leave its peers in the first gather.
    together(what, lambda: opened.append(tensors()))
    return use_on_first_rank(what, opened[0], use)
