"""What a task is, and what its verdicts are. Called by the rollout engines, through `tasks.judging`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from trinity_sync.errors import RunError
from trinity_sync.host.interrupts import signals_left
from trinity_sync.host.origin import Origin, end_text, error_text, give_origin, keep_origin
from trinity_sync.samples.position import Numbering
from trinity_sync.samples.record import Prompt

_SHOWN = 200
"""Characters of a wrong result that are quoted."""
_MOST_CALLS = 5
"""For one response; each follows a signal."""


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
    attribute `reward_name`, which errors then quote. One with an attribute `reward_judge`, a `Judge`, is judged by
    that, and `reward` is not called: a `tasks.reward_processes.RewardProcesses` judges in processes of its own.

    One whose prompts have an order may have more methods. With ``prompts_from(first, count)``, which returns so many
    from number `first` on (from 0, without end), a run that goes on with another number of prompts per step neither
    misses any nor repeats them; ``prompts(step, count)`` are those from ``(step - 1) * count`` on. With ``all_rows()``,
    each place and prompt of the file, and ``leave_out(rows)``, which has it go on without the rows of these numbers,
    prompts are looked through before a run starts.
    """

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """Return the prompts of a trainer step (from 1), numbered from 0 by `Prompt.index`. With
        `algorithm.filter_groups` a task without ``prompts_from`` is asked for more of a step, and has to give the same
        first ones then.
        """
        ...

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        """Judge a response.

        Args:
            prompt: what was asked.
            text: the response, decoded without the end-of-sequence token.
            finished: whether the model ended the response itself, rather than running into the length limit.
        """
        ...


def prompts_of(task: Task, numbering: Numbering, step: int, at: int = 0) -> list[Prompt]:
    """The prompts of a step, of a run that may have had other numbers of them per step before.

    Args:
        task: of the run.
        numbering: which prompts a step has, and how many.
        step: a step.
        at: the number within the step from which on they are; above 0 where a step has more than it is meant to have.

    Raises:
        RunError: more are asked for, and the task gives other first ones then.
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
    """A task that has prompts to validate on, without which `task.validation` is refused.

    Where it reads a file, it is built once more with `task.validation.path` as its `path`, and asked for that one's.
    Its constructor does not get the node `validation`.
    """

    def validation_prompts(self, count: int | None) -> list[Prompt]:
        """Return prompts that are the same at every validation, numbered from 0.

        Args:
            count: how many, at most; None: all that there are.
        """
        ...


class Response(NamedTuple):
    """What is to be judged; see `Task.reward`."""

    prompt: Prompt
    text: str
    finished: bool


class Verdict(NamedTuple):
    """What became of a response.

    Attributes:
        reward: plain float; NaN: it has none, and is left out of training.
        exact: as in `RewardResult`.
        error: why it could not be judged, as a sentence that names function, prompt and step; empty: it was.
    """

    reward: float
    exact: float | None
    error: str = ""


class Judge(Protocol):
    """Gives the verdicts on responses; `tasks.reward_processes.RewardProcesses` is one."""

    def warm_up(self) -> None:
        """Begin whatever takes time, and return. `judge` waits for it."""
        ...

    def judge(self, responses: Sequence[Response], *, step: int) -> list[Verdict]:
        """Judge responses to prompts of a step, in their order.

        Raises:
            RunError: one could not be judged, and that is to end the run.
        """
        ...


class Failure(NamedTuple):
    """Why a response could not be judged.

    Attributes:
        what: goes on after the name of the function, as in ``returned nan; it must return a finite number``.
        origin: where in the user's code, if it is known.
    """

    what: str
    origin: Origin | None = None


class RewardFunction(Protocol):
    """What `Task.reward` is when it is called."""

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult: ...


def judged_here(reward: RewardFunction, response: Response) -> RewardResult | Failure:
    """As `judged`, in a process that goes on after signals. A signal to all processes may have ended a program that the
    call had started, so the call is repeated.
    """
    for _ in range(_MOST_CALLS):
        before = signals_left()
        result = judged(reward, response)
        if signals_left() == before:
            break
    return result


def judged(reward: RewardFunction, response: Response) -> RewardResult | Failure:
    """Call what judges, and make two plain floats of its result, or one and None."""
    try:
        return _checked(reward(*response))
    except (Exception, SystemExit) as error:
        return Failure(
            end_text(error) if isinstance(error, SystemExit) else f"failed: {error_text(error)}", keep_origin(error)
        )


def _checked(result: object) -> RewardResult | Failure:
    if not isinstance(result, RewardResult):
        return Failure(f"returned {_shown(result)}; it must return a RewardResult")
    reward, exact = map(_scalar, result)
    if _is_finite(reward) and (exact is None or _is_finite(exact)):
        return RewardResult(float(reward), None if exact is None else float(exact))
    wrong = exact if _is_finite(reward) else reward
    return Failure(f"returned {_shown(wrong)}; it must return a finite number")


def error_of(failure: Failure, name: str, prompt: Prompt, step: int) -> RunError:
    """Make the error that a failure is where it ends the run. It names the function, the prompt and the step."""
    error = RunError(f"the reward function {name}, called for prompt {prompt.index} of step {step}, {failure.what}")
    if failure.origin is not None:
        give_origin(error, failure.origin)
    return error


def _scalar(value: Any) -> Any:
    """A scalar of numpy, or a tensor of one value, as Python's own."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # of a class of somebody's
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
