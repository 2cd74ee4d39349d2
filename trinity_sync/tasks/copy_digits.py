"""The default task: copy a random number. A model learns it in seconds on one CPU core, and rewards are exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import ConfigError
from trinity_sync.samples.keys import child, path
from trinity_sync.samples.record import Prompt, Purpose
from trinity_sync.tasks.base import RewardResult


class CopyDigits:
    """Prompts such as ``61=``; the right response is ``61`` and then the end of the text.

    The reward is the share of correct positions, the end of the text included: ``60`` and the end earns 2/3.

    Args:
        digits: digits of the number, leading zeros included; at least 1.
        seed: the run's seed; the numbers are a pure function of seed, step and the prompt's index.
        response_length: longest response in tokens; None: unknown.

    Raises:
        ConfigError: no digits, or responses too short for the answer.
    """

    def __init__(self, digits: int, seed: int, *, response_length: int | None = None) -> None:
        if digits < 1:
            raise ConfigError(f"task.digits is {digits}; must be at least 1")
        if response_length is not None and response_length < digits + 1:
            raise ConfigError(
                f"task.response_length is {response_length}; "
                f"{digits} digits and the end of the text take {digits + 1} tokens"
            )
        self.digits = digits
        self.seed = seed

    def prompts(self, step: int, count: int) -> list[Prompt]:
        return self._prompts(path(self.seed, Purpose.PROMPTS, step, np.arange(count)))

    def validation_prompts(self, count: int | None) -> list[Prompt]:
        """Return prompts from separate random numbers; with few digits, training may have the same prompts."""
        assert count is not None, "the task has infinitely many prompts"
        return self._prompts(path(self.seed, Purpose.VALIDATION_PROMPTS, np.arange(count)))

    def _prompts(self, keys: NDArray[np.uint64]) -> list[Prompt]:
        digits = child(keys[:, None], np.arange(self.digits)) % np.uint64(10)
        numbers = ["".join(map(str, row)) for row in digits.tolist()]
        return [Prompt(index=index, text=f"{number}=", answer=number) for index, number in enumerate(numbers)]

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        assert isinstance(prompt.answer, str), "prompts of this task have a text"
        right = sum(map(str.__eq__, text, prompt.answer))
        right += finished and len(text) == self.digits
        return RewardResult(right / (self.digits + 1), float(right == self.digits + 1))
