"""Retention that thins out: the best checkpoint of each stretch of training stays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.retention import CheckpointFacts, Policy


@dataclass(frozen=True)
class KeepBestOfEach(Policy):
    """Of each `window` steps of training the checkpoint with the largest value of `metric` stays; of equals the newer.

    Args:
        window: steps; the first window has steps 1 to `window`.
        metric: a key of metrics.jsonl; a checkpoint without a number under it comes last in its window.
    """

    window: int
    metric: str

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"window is {self.window}; must be at least 1")

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        best = {(c.step - 1) // self.window: c.step for c in sorted(checkpoints, key=self._rank)}
        return {step: f"best {self.metric} of its {self.window} steps" for step in best.values()}

    def _rank(self, checkpoint: CheckpointFacts) -> tuple[float, int]:
        value = checkpoint.metrics.get(self.metric)
        return (-math.inf if value is None or math.isnan(value) else value), checkpoint.step
