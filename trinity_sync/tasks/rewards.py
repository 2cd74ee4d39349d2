"""Reward functions for tasks with a known answer. Named by `task.reward._target_`; a user's own have the same form.

Each takes the prompt and the response and returns 1.0 (right) or 0.0 (wrong). Keyword arguments are set by keys beside
`_target_`. The answer is `Prompt.answer`: a text, or a number, which then counts as the text that JSON writes for it.
"""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Context, Decimal
from functools import partial
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Failure, Judge, Response, RewardResult, Task, Verdict, error_of, judged_here

# A sign belongs to the number unless it follows a digit, a letter or a closing bracket: there it is an operator or a
# hyphen. Exponents are bounded, so that no response can ask for arithmetic that never ends.
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]])[-+])?
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)
        (?:[eE][-+]?\d{1,4}(?!\d))?""",
    re.VERBOSE | re.ASCII,
)
_EXACT = Context(prec=1000)


def exact_match(prompt: Prompt, response: str, *, ignore_case: bool = False) -> float:
    """Return 1 where the response is the answer, blanks at both ends aside, else 0.

    Raises:
        TypeError: the answer is neither a text nor a number.
    """
    said, right = response.strip(), _answer_text(prompt).strip()
    return float(said.casefold() == right.casefold() if ignore_case else said == right)


def contains_answer(prompt: Prompt, response: str, *, ignore_case: bool = False) -> float:
    """Return 1 where the answer stands in the response as words of its own: ``7`` in ``it is 7.``, not in ``17``; else
    0.

    Raises:
        TypeError: the answer is neither a text nor a number.
        ValueError: the answer is blank, so every response would contain it.
    """
    right = _answer_text(prompt).strip()
    if not right:
        raise ValueError("the answer is blank")
    return float(
        re.search(rf"(?<!\w){re.escape(right)}(?!\w)", response, re.IGNORECASE if ignore_case else 0) is not None
    )


def numeric_match(prompt: Prompt, response: str, *, tolerance: float = 0.0) -> float:
    """Return 1 where the last number in the response is the last number in the answer, else 0.

    So an answer may be written out to its end, as ``... so 3 + 4 = 7. #### 7``. Numbers are decimal, with an optional
    sign, commas between thousands, and an exponent; they are compared exactly (``7``, ``7.0`` and ``0.7e1`` are equal).

    Args:
        prompt: the last number of its answer is the right one.
        response: what the model wrote.
        tolerance: largest difference that still counts as right.

    Raises:
        TypeError: the answer is neither a text nor a number.
        ValueError: there is no number in the answer.
    """
    right, margin = _last_number(_answer_text(prompt)), Decimal(repr(tolerance))
    if right is None:
        raise ValueError(f"there is no number in the answer {prompt.answer!r}")
    said = _last_number(response)
    return float(said is not None and _EXACT.subtract(right, margin) <= said <= _EXACT.add(right, margin))


def _answer_text(prompt: Prompt) -> str:
    answer = prompt.answer
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return repr(answer)
    raise TypeError(f"the answer is {answer!r}; it must be a text or a number")


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


# A function in a Python file of the user's: what can be told of it without running the file.


def check_function_file(path: Path, name: str, arguments: Collection[str]) -> None:
    """See whether a file defines a function that can be called with certain keyword arguments. Of one that comes to its
    name in another way, as by an import, nothing more is said.

    Args:
        path: of the file.
        name: of the function.
        arguments: the keyword arguments.

    Raises:
        ConfigError: the file cannot be read or has no such name, or the function is asynchronous or takes others.
    """
    try:
        module = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"task.reward.function_path is {path}, which cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"task.reward.function_path is {path}, which is no Python: {error}") from error
    defined = [node for node in module.body if _defines(node, name)]
    if not defined:
        if any(_may_bind(node, name) for node in ast.walk(module)):
            return
        raise ConfigError(f"task.reward.function_name is {name}, which {path} does not have")
    function = defined[-1]
    if isinstance(function, ast.AsyncFunctionDef):
        raise ConfigError(f"{path}:{function.lineno}: {name} is asynchronous; make it a plain function")
    if isinstance(function, ast.FunctionDef) and not function.decorator_list:
        _check_arguments(f"{path}:{function.lineno}: {name}", function.args, arguments)


def _check_arguments(where: str, taken: ast.arguments, given: Collection[str]) -> None:
    by_place, by_name = [*taken.posonlyargs, *taken.args], taken.kwonlyargs
    named = {argument.arg for argument in [*taken.args, *by_name]}
    if taken.kwarg is None and (refused := sorted(set(given) - named)):
        raise ConfigError(f"{where} has no parameter {refused[0]}, which it is called with")
    required = [argument.arg for argument in by_place[: len(by_place) - len(taken.defaults)]]
    required += [argument.arg for argument, default in zip(by_name, taken.kw_defaults, strict=True) if default is None]
    if lacking := [argument for argument in required if argument not in set(given) & named]:
        raise ConfigError(
            f"{where} has a parameter {lacking[0]}, which it is not called with; give task.reward.reward_kwargs."
            f"{lacking[0]}, or it a default"
        )


def _defines(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name


def _may_bind(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return name == (node.asname or node.name) or node.name == "*"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name in (name, "__getattr__")
    return isinstance(node, ast.Name) and node.id == name


# Reward functions of the user's: what they have to be, told before a run, and how they are called.


RewardNumber = Callable[..., float]
"""``f(prompt, response) -> number``; one that has a parameter ``finished`` is told it by that name."""


class FunctionReward:
    """Judges by a function.

    Args:
        function: see `RewardNumber`.

    Attributes:
        name: dotted, of the function.

    Raises:
        ConfigError: the function is asynchronous, cannot be called so, or has a parameter that is a key of ours.
    """

    def __init__(self, function: RewardNumber) -> None:
        self.name = name_of(function)
        self._function = function
        self._tells_finished = False
        signature = _signature(function, self.name)
        if signature is None:
            return
        self._tells_finished = _takes_finished(function, signature)
        self._check(signature)

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        told = {"finished": finished} if self._tells_finished else {}
        return RewardResult(self._function(prompt, text, **told))

    def _check(self, signature: inspect.Signature) -> None:
        check_plain(self._function, self.name)
        if ours := sorted(set(KEYS) & signature.parameters.keys()):
            raise ConfigError(
                f"task.reward._target_ is {self.name}, which has a parameter {ours[0]}; task.reward.{ours[0]} says how "
                "rewards are judged and does not reach it, so call the parameter something else"
            )
        try:
            signature.bind(None, "", **({"finished": True} if self._tells_finished else {}))
        except TypeError as error:
            raise ConfigError(
                f"task.reward._target_ is {self.name}{signature}, which cannot be called with a prompt and a response: "
                f"{error}"
            ) from error


def check_plain(function: Callable[..., object], name: str) -> None:
    """See that calling a function gives its result.

    Raises:
        ConfigError: it is asynchronous, or a generator.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    for called in (inner, getattr(inner, "__call__", None)):  # noqa: B004 - of an object that can be called
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigError(f"task.reward._target_ is {name}, which is asynchronous; make it a plain function")
        if inspect.isgeneratorfunction(called):
            raise ConfigError(f"task.reward._target_ is {name}, which is a generator; have it return a number")


def name_of(function: Callable[..., object]) -> str:
    """Return the dotted name of a function, below what has filled in its arguments."""
    while isinstance(function, partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _signature(function: RewardNumber, name: str) -> inspect.Signature | None:
    """Return what is left to be given; None: nobody knows, as of functions that are not written in Python."""
    inner: Callable[..., object] = function
    while isinstance(inner, partial):
        inner = inner.func
    try:
        own = inspect.signature(inner)
    except (TypeError, ValueError):
        return None
    try:
        return inspect.signature(function)
    except ValueError as error:
        given = ", ".join(function.keywords) if isinstance(function, partial) else ""
        raise ConfigError(
            f"task.reward._target_ is {name}{own}, which does not take the keys given: {given}"
        ) from error


def _takes_finished(function: Callable[..., object], signature: inspect.Signature) -> bool:
    found = signature.parameters.get("finished")
    # A value that the settings give stays: `partial` makes it a default.
    given = isinstance(function, partial) and "finished" in function.keywords
    return found is not None and found.kind is not found.POSITIONAL_ONLY and not given


# The one place where responses are judged, and what becomes of those that cannot be. Called by the rollout engines.


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
