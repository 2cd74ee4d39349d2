"""The one place where responses are judged, and what becomes of those that cannot be. Called by the rollout engines."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Failure, Judge, Response, RewardResult, Task, Verdict, error_of, judged_here

ON_ERROR = ("stop", "zero", "skip")
"""What becomes of a response that cannot be judged: the run ends; its reward is 0; it has none, and nothing is learnt
from it.
"""


KEYS = ("on_error", "timeout_s", "processes")
"""Keys of `task.reward` that are ours and not the function's."""


class Judging:
    """How responses are judged in processes of their own.

    Args:
        on_error: see `ON_ERROR`.
        timeout_s: longest time for one response, seconds.
        processes: how many judge for each explorer.

    Raises:
        ConfigError: a value is none of those; names its key.
    """

    def __init__(self, on_error: str = "stop", timeout_s: float = 30.0, processes: int = 1) -> None:
        if on_error not in ON_ERROR:
            raise ConfigError(f"task.reward.on_error is {on_error!r}; must be one of {', '.join(ON_ERROR)}")
        if not _is_number(timeout_s) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"task.reward.timeout_s is {timeout_s!r}; must be a number of seconds, more than 0")
        if not isinstance(processes, int) or not _is_number(processes) or processes < 1:
            raise ConfigError(f"task.reward.processes is {processes!r}; must be at least 1")
        self.on_error = on_error
        self.timeout_s = timeout_s
        self.processes = processes

    @classmethod
    def taken_from(cls, reward: Mapping[str, Any]) -> tuple[Judging, dict[str, Any]]:
        """Read our keys of a node `task.reward`; return the others, too, which are the function's."""
        judging = cls(**{key: value for key, value in reward.items() if key in KEYS})
        return judging, {key: value for key, value in reward.items() if key not in KEYS}


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def judge(task: Task, responses: Sequence[Response], *, step: int) -> list[Verdict]:
    """Have a task judge responses: by its `reward_judge` where it has one, else here, where a failure ends the run.

    Args:
        task: see `Task`.
        responses: to prompts of one step.
        step: of the trainer, for errors.

    Returns:
        One for each, in their order.

    Raises:
        RunError: one cannot be judged. The message names the function, the prompt and the step.
    """
    apart: Judge | None = getattr(task, "reward_judge", None)
    if apart is not None:
        return apart.judge(responses, step=step)
    return [Verdict(*score(task, *response, step=step)) for response in responses]


def score(task: Task, prompt: Prompt, text: str, finished: bool, *, step: int) -> RewardResult:
    """Have a task judge one response in this process.

    Raises:
        RunError: the task raised, or gave something other than a `RewardResult` of finite numbers.
    """
    result = judged_here(task.reward, Response(prompt, text, finished))
    if isinstance(result, Failure):
        name = getattr(task, "reward_name", None) or f"{type(task).__module__}.{type(task).__qualname__}.reward"
        raise error_of(result, name, prompt, step)
    return result
