"""Tasks and their verdicts on responses. Rollout engines call them through `tasks.rewards.judge`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from trinity_sync.errors import RunError
from trinity_sync.host.interrupts import signals_left
from trinity_sync.host.origin import Origin, end_text, error_text, give_origin, keep_origin
from trinity_sync.samples.position import Numbering
from trinity_sync.samples.record import Prompt

_SHOWN = 200
"""Longest quotation of a wrong result, in characters."""
_MOST_CALLS = 5
"""Calls of a reward for one response; each repetition follows a signal."""


class RewardResult(NamedTuple):
    """The value of a response.

    Attributes:
        reward: any finite number; GRPO compares it within the prompt's group only.
        exact: 1.0 if the whole response is right, 0.0 if not, None if the task does not tell.
    """

    reward: float
    exact: float | None = None


class SummedResult(RewardResult):
    """The value of a response that is a sum of parts. `parts`: their values by name; each one's mean is a metric."""

    parts: Mapping[str, float]

    @classmethod
    def of(cls, reward: float, parts: Mapping[str, float]) -> SummedResult:
        result = cls(reward)
        result.parts = parts
        return result


class Task(Protocol):
    """Prompts of every step, and the rewards of responses to them.

    Both methods are pure: the same arguments give the same result in every process and after a resume. The driver asks
    for prompts; each explorer has an instance of its own and asks for rewards. The constructor gets the keys of the
    `task` node of the configuration, and `seed`.

    Optional attributes: `reward_name`, the name of the reward function in errors; `reward_judge`, a `Judge` that is
    called in place of `reward`, such as `tasks.reward_processes.RewardProcesses`, which judges in separate processes.

    Optional methods: ``prompts_from(first, count)`` returns so many prompts from number `first` on (from 0, without
    end), so that a run resumed with another number of prompts per step misses and repeats none; ``prompts(step,
    count)`` are then those from ``(step - 1) * count`` on. ``all_rows()`` returns place and prompt of each row of a
    file, which `trainer.total_epochs` counts, and ``leave_out(rows)`` removes the rows of these numbers; with both,
    prompts are checked before a run starts.
    """

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """Return the prompts of a trainer step (from 1), numbered from 0 by `Prompt.index`. For
        `algorithm.filter_groups` a task without ``prompts_from`` gets larger counts, too, and must return the same
        first prompts then.
        """

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        """Judge a response.

        Args:
            prompt: the prompt.
            text: the response, decoded without the end-of-sequence token.
            finished: the model ended the response itself, not the length limit.
        """


def prompts_of(task: Task, numbering: Numbering, step: int, at: int = 0) -> list[Prompt]:
    """Return the prompts of a step.

    Args:
        task: of the run.
        numbering: the prompts of each step, also after a change of their number.
        step: a step.
        at: number of the first prompt within the step; above 0 to get more than `numbering.per_step`.

    Raises:
        RunError: for a larger count the task returns other first prompts.
    """
    count = numbering.per_step
    prompts_from: Callable[[int, int], list[Prompt]] | None = getattr(task, "prompts_from", None)
    if prompts_from is not None:
        following = prompts_from(numbering.first_of(step) + at, count)
        return [replace(prompt, index=at + prompt.index) for prompt in following]
    prompts = task.prompts(step, at + count)
    if at and [*map(_asked, task.prompts(step, at))] != [*map(_asked, prompts[:at])]:
        raise RunError(
            f"step {step} needs more than {at} prompts, but the first ones of {type(task).__name__}.prompts({step}, "
            f"{at + count}) are others than those of prompts({step}, {at}); have it begin with the same, or give it a "
            "method prompts_from(), or set algorithm.filter_groups.enable=false"
        )
    return prompts[at:]


def _asked(prompt: Prompt) -> tuple[object, ...]:
    return prompt.index, prompt.text, prompt.messages


@runtime_checkable
class ValidatingTask(Task, Protocol):
    """A task with prompts for validation; others refuse `task.validation`.

    A task that reads a file is built a second time with `task.validation.path` as its `path`, for the validation. Its
    constructor does not get the node `validation`.
    """

    def validation_prompts(self, count: int | None) -> list[Prompt]:
        """Return the same prompts for every validation, numbered from 0: at most `count`, all for None."""


class Response(NamedTuple):
    """A response to judge; see `Task.reward`."""

    prompt: Prompt
    text: str
    finished: bool


class Verdict(NamedTuple):
    """The result of judging a response. `reward`: plain float; NaN: none, so the response is not trained on. `exact`:
    as in `RewardResult`. `error`: why it could not be judged, with function, prompt and step; empty: it was judged.
    `parts`: as in `SummedResult`; None: it has none.
    """

    reward: float
    exact: float | None
    error: str = ""
    parts: Mapping[str, float] | None = None

    @classmethod
    def of(cls, result: RewardResult) -> Verdict:
        return cls(*result, parts=result.parts if isinstance(result, SummedResult) else None)


class Judge(Protocol):
    """Judges responses in place of `Task.reward`, such as `tasks.reward_processes.RewardProcesses`."""

    def warm_up(self) -> None:
        """Start slow preparations in the background. `judge` waits for them."""

    def judge(self, responses: Sequence[Response], *, step: int) -> list[Verdict]:
        """Judge responses to prompts of a step, in their order. Raises RunError if one could not be judged, and the
        settings end the run then.
        """


class Failure(NamedTuple):
    """Why a response could not be judged. `what`: the predicate after the function's name, as in ``returned nan; it
    must return a finite number``. `origin`: place in the user's code, if known.
    """

    what: str
    origin: Origin | None = None


class FailedPartError(Exception):
    """A function that a reward calls has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what)
        self.failure = failure


class RewardFunction(Protocol):
    """The type of `Task.reward`."""

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult: ...


def judged_here(reward: RewardFunction, response: Response) -> RewardResult | Failure:
    """Call `judged` in a process that survives signals. Repeat the call after a signal, which may have ended a program
    that the reward had started.
    """
    for _ in range(_MOST_CALLS):
        before = signals_left()
        result = judged(reward, response)
        if signals_left() == before:
            break
    return result


def judged(reward: RewardFunction, response: Response) -> RewardResult | Failure:
    """Call a reward; return its result as plain floats."""
    try:
        return _checked(reward(*response))
    except FailedPartError as error:
        return error.failure
    except (Exception, SystemExit) as error:
        return Failure(
            end_text(error) if isinstance(error, SystemExit) else f"failed: {error_text(error)}", keep_origin(error)
        )


def _checked(result: object) -> RewardResult | Failure:
    if not isinstance(result, RewardResult):
        return Failure(f"returned {_shown(result)}; it must return a RewardResult")
    reward, exact = map(_scalar, result)
    if _is_finite(reward) and (exact is None or _is_finite(exact)):
        plain = RewardResult(float(reward), None if exact is None else float(exact))
        return SummedResult.of(plain.reward, result.parts) if isinstance(result, SummedResult) else plain
    wrong = exact if _is_finite(reward) else reward
    return Failure(f"returned {_shown(wrong)}; it must return a finite number")


def error_of(failure: Failure, name: str, prompt: Prompt, step: int) -> RunError:
    """Make the error by which a failure ends the run; it names the function, the prompt and the step (0: a trial)."""
    of = f"prompt {prompt.index} of step {step}" if step else "the first row, with its answer or prompt as the response"
    error = RunError(f"the reward function {name}, called for {of}, {failure.what}")
    if failure.origin is not None:
        give_origin(error, failure.origin)
    return error


def _scalar(value: object) -> Any:
    """Return a numpy scalar or a tensor of one value as a Python number."""
    item = getattr(value, "item", None)
    return item() if getattr(value, "shape", None) == () and callable(item) else value


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a user's class may fail to print
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
