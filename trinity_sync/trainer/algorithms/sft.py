"""`algorithm=sft`: supervised fine-tuning, by verl's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from trinity_sync.config import Get
from trinity_sync.config.schema import SftConfig
from trinity_sync.trainer.algorithms.base import Algorithm


@dataclass(kw_only=True)
class Sft(SftConfig, Algorithm):
    """Trains on the responses of the task's pairs."""

    explores: ClassVar[bool] = False
    task_methods: ClassVar[tuple[str, ...]] = ("pairs",)
    tasks: ClassVar[str] = "task=pairs or task=conversations"

    @classmethod
    def sequences(cls, get: Get) -> tuple[int, str, str]:
        number = get("algorithm.batch_size")
        return number, "algorithm.batch_size", f"is {number}"

    def loss(self, strategy: str) -> Callable[..., object]:
        from verl.workers.utils.losses import sft_loss

        return partial(sft_loss, None)
