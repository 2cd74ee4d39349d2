"""What a task is, and the one place where a task's reward is called and checked. Called by the rollout engines."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import NamedTuple, Protocol

from trinity_sync.errors import RunError
from trinity_sync.host.origin import told
from trinity_sync.samples.position import Numbering
from trinity_sync.samples.record import Prompt


class RewardResult(NamedTuple):
    """What a response is worth.

    Attributes:
        reward: any finite number; GRPO compares it within the prompt's group only.
        exact: 1.0 where the response is right as a whole, 0.0 where it is not, None where the task does not say.
    """

    reward: float
    exact: float | None = None


class Task(Protocol):
    """Prompts of every step, and the rewards of responses to them.

    Both methods are pure: the same arguments give the same result in every process and after a resume. The driver asks
    for prompts; each explorer has an instance of its own and asks for rewards. The constructor gets the keys of the
    `task` node of the configuration, and `seed`. A task that judges by a function given to it may say so in an
    attribute `reward_name`, which errors then quote.

    One whose prompts have an order may have more methods. With ``prompts_from(first, count)``, which returns so many
    from number `first` on (from 0, without end), a run that goes on with another number of prompts per step neither
    misses any nor repeats them; ``prompts(step, count)`` are those from ``(step - 1) * count`` on. With ``all_rows()``,
    each place and prompt of the file, and ``leave_out(rows)``, which has it go on without the rows of these numbers,
    prompts are looked through before a run starts.
    """

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """Return the prompts of a trainer step (from 1), numbered from 0 by `Prompt.index`."""
        ...

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        """Judge a response.

        Args:
            prompt: what was asked.
            text: the response, decoded without the end-of-sequence token.
            finished: whether the model ended the response itself, rather than running into the length limit.
        """
        ...


def prompts_of(task: Task, numbering: Numbering, step: int) -> list[Prompt]:
    """The prompts of a step, of a run that may have had other numbers of them per step before."""
    prompts_from: Callable[[int, int], list[Prompt]] | None = getattr(task, "prompts_from", None)
    if prompts_from is None:
        return task.prompts(step, numbering.per_step)
    return prompts_from(numbering.first_of(step), numbering.per_step)


def score(task: Task, prompt: Prompt, text: str, finished: bool, *, step: int) -> RewardResult:
    """Have a task judge a response, as two plain floats (or one and None).

    Raises:
        RunError: the task raised, or gave something other than a `RewardResult` of finite numbers. The message names
            the function, the prompt and the step.
    """
    try:
        result = task.reward(prompt, text, finished)
    except Exception as error:
        raise RunError(f"{_where(task, prompt, step)} failed: {told(error)}") from error
    if not isinstance(result, RewardResult):
        raise RunError(f"{_where(task, prompt, step)} returned {result!r}; it must return a RewardResult")
    reward, exact = result
    if _is_finite(reward) and (exact is None or _is_finite(exact)):
        return RewardResult(float(reward), None if exact is None else float(exact))
    wrong = exact if _is_finite(reward) else reward
    raise RunError(f"{_where(task, prompt, step)} returned {wrong!r}; it must return a finite number")


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _where(task: Task, prompt: Prompt, step: int) -> str:
    name = getattr(task, "reward_name", None) or f"{type(task).__module__}.{type(task).__qualname__}.reward"
    return f"the reward function {name}, called for prompt {prompt.index} of step {step},"
