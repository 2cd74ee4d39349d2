"""Reward functions for tasks with a known answer, checks of a user's function, and the call that judges responses.

Each function takes the prompt and the response and returns 1.0 (right) or 0.0 (wrong). The config names it in
`task.reward._target_`, with its keyword arguments in the same node. The answer is `Prompt.answer`: a text, or a number,
which counts as its JSON text.
"""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Context, Decimal
from functools import partial
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks import base

# A sign after a digit, a letter or a closing bracket is an operator or a hyphen, not a part of the number. Exponents
# are limited, so that no response causes endless arithmetic.
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]])[-+])?
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)
        (?:[eE][-+]?\d{1,4}(?!\d))?""",
    re.VERBOSE | re.ASCII,
)
_EXACT = Context(prec=1000)


def exact_match(prompt: Prompt, response: str, *, ignore_case: bool = False) -> float:
    """Return 1 if the response equals the answer, without blanks at both ends, else 0."""
    said, right = response.strip(), _answer_text(prompt).strip()
    return float(said.casefold() == right.casefold() if ignore_case else said == right)


def contains_answer(prompt: Prompt, response: str, *, ignore_case: bool = False) -> float:
    """Return 1 if the response contains the answer as whole words (``7`` in ``it is 7.``, not in ``17``), else 0."""
    right = _answer_text(prompt).strip()
    if not right:
        raise ValueError("the answer is blank")
    return float(
        re.search(rf"(?<!\w){re.escape(right)}(?!\w)", response, re.IGNORECASE if ignore_case else 0) is not None
    )


def numeric_match(prompt: Prompt, response: str, *, tolerance: float = 0.0) -> float:
    """Return 1 if the last number in the response is the last number in the answer, else 0.

    An answer may thus include its derivation, as ``... so 3 + 4 = 7. #### 7``. Numbers are decimal, with an optional
    sign, commas between thousands, and an exponent; the comparison is exact (``7``, ``7.0`` and ``0.7e1`` are equal).
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


# Checks of a function in a user's Python file, without running the file.


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_function_file(path: Path, name: str, arguments: Collection[str]) -> None:
    """Check that a file defines a function with certain keyword arguments. A name that is bound in another way, such as
    by an import, passes.
    """
    try:
        module = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"task.reward.function_path is {path}, which cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"task.reward.function_path is {path}, which is not Python: {error}") from error
    defined = [node for node in module.body if isinstance(node, _DEFINITIONS) and node.name == name]
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


def _may_bind(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return name == (node.asname or node.name) or node.name == "*"
    if isinstance(node, _DEFINITIONS):
        return node.name in (name, "__getattr__")
    return isinstance(node, ast.Name) and node.id == name


# Reward functions of users, checked before a run.


RewardNumber = Callable[..., float]
"""``f(prompt, response) -> number``; may have a keyword parameter ``finished``."""


class FunctionReward:
    """Judges by a function. Raises ConfigError if the function is asynchronous, does not take these arguments, or has a
    parameter with the name of one of our keys.
    """

    def __init__(self, function: RewardNumber) -> None:
        self.name = name_of(function)
        self._function = function
        self._takes_finished = False
        signature = _signature(function, self.name)
        if signature is not None:
            self._takes_finished = _takes_finished(function, signature)
            self._check(signature)

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> base.RewardResult:
        more = {"finished": finished} if self._takes_finished else {}
        return base.RewardResult(self._function(prompt, text, **more))

    def _check(self, signature: inspect.Signature) -> None:
        inner = check_plain(self._function, self.name)
        required = {key for key, taken in signature.parameters.items() if taken.default is taken.empty}
        if {"solution_str", "ground_truth"} <= required:
            name, file = self.name.rpartition(".")[2], getattr(getattr(inner, "__code__", None), "co_filename", "FILE")
            raise ConfigError(
                f"task.reward._target_ is {self.name}{signature}, a function of verl's form; use task=verl "
                f"task.reward.function_path={file} task.reward.function_name={name}, with verl's columns in task.path"
            )
        if ours := sorted(set(KEYS) & signature.parameters.keys()):
            raise ConfigError(
                f"task.reward._target_ is {self.name}, which has a parameter {ours[0]}; task.reward.{ours[0]} says how "
                "rewards are judged and does not reach it, so call the parameter something else"
            )
        try:
            signature.bind(None, "", **({"finished": True} if self._takes_finished else {}))
        except TypeError as error:
            raise ConfigError(
                f"task.reward._target_ is {self.name}{signature}, which cannot be called with a prompt and a response: "
                f"{error}"
            ) from error


RESERVED = ("mean", "std", "min", "max", "exact", "failed", "flat_groups")
"""Names that a part cannot have, since metrics below ``reward/`` have them."""


class WeightedSum:
    """Judges by the weighted sum of functions; the parts of its results are named after them. Raises ConfigError as
    `FunctionReward`, and if two functions are the same or their weights are wrong.
    """

    def __init__(self, functions: Sequence[RewardNumber], weights: Sequence[float]) -> None:
        parts = [FunctionReward(function) for function in functions]
        self._weights = tuple(weights)
        if not parts or len(parts) != len(self._weights) or not all(map(_is_number, self._weights)):
            raise ConfigError(
                f"task.reward.weights is {list(weights)}; it must have one number for each function of task.reward, of "
                f"which there are {len(parts)}"
            )
        last = [part.name.rpartition(".")[2] for part in parts]
        names = [
            n if last.count(n) == 1 and n not in RESERVED else part.name for n, part in zip(last, parts, strict=True)
        ]
        if len({*names}) < len(names):
            raise ConfigError(f"task.reward has {max(names, key=names.count)} twice; add up its weights")
        self._parts = dict(zip(names, parts, strict=True))
        self.name = " + ".join(f"{weight:g}*{part.name}" for weight, part in zip(self._weights, parts, strict=True))

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> base.RewardResult:
        found = {}
        for name, part in self._parts.items():
            result = base.judged(part, base.Response(prompt, text, finished))
            if isinstance(result, base.Failure):
                raise base.FailedPartError(base.Failure(f"has a part {part.name}, which {result.what}", result.origin))
            found[name] = result.reward
        return base.SummedResult.of(sum(map(operator.mul, self._weights, found.values())), found)


def check_plain(function: Callable[..., object], name: str) -> Callable[..., object]:
    """Check that a function is neither a class, asynchronous nor a generator; return it without its `partial`."""
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, type):
        raise ConfigError(
            f"task.reward._target_ is {name}, which is a class; name a function, or set task.reward._partial_=false to "
            "use an object of it"
        )
    for called in (inner, getattr(inner, "__call__", None)):  # noqa: B004 - the method of a callable object
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigError(f"task.reward._target_ is {name}, which is asynchronous; make it a plain function")
        if inspect.isgeneratorfunction(called):
            raise ConfigError(f"task.reward._target_ is {name}, which is a generator; have it return a number")
    return inner


def name_of(function: Callable[..., object]) -> str:
    """Return the dotted name of a function, without its `partial`."""
    while isinstance(function, partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _signature(function: RewardNumber, name: str) -> inspect.Signature | None:
    """Return the signature without the arguments of a `partial`; None: unknown, as of functions written in C."""
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
    # a value from the config stays: `partial` makes it a default
    given = isinstance(function, partial) and "finished" in function.keywords
    return found is not None and found.kind is not found.POSITIONAL_ONLY and not given


# Judging. Called by the rollout engines.


ON_ERROR = ("stop", "zero", "skip")
"""Treatment of a response that cannot be judged: end the run; reward 0; no reward, so it is not trained on."""


KEYS = ("on_error", "timeout_s", "processes")
"""Our keys of `task.reward`, which the function does not get."""


class RewardSettings:
    """The settings of reward processes. `timeout_s`: limit of one response, seconds. Raises ConfigError if a value is
    not allowed; names its key.
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
    def taken_from(cls, reward: Mapping[str, Any]) -> tuple[RewardSettings, Mapping[str, object]]:
        """Read our keys of a node `task.reward`; also return the function's keys."""
        judging = cls(**{key: value for key, value in reward.items() if key in KEYS})
        return judging, {key: value for key, value in reward.items() if key not in KEYS}


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def judge(task: base.Task, responses: Sequence[base.Response], *, step: int) -> list[base.Verdict]:
    """Have a task judge responses: by its `reward_judge` if it has one, else in this process. Returns one verdict for
    each response, in their order.
    """
    reward_judge: base.Judge | None = getattr(task, "reward_judge", None)
    if reward_judge is not None:
        return reward_judge.judge(responses, step=step)
    return [base.Verdict.of(score(task, *response, step=step)) for response in responses]


def score(task: base.Task, prompt: Prompt, text: str, finished: bool, *, step: int) -> base.RewardResult:
    """Have a task judge one response in this process."""
    result = base.judged_here(task.reward, base.Response(prompt, text, finished))
    if isinstance(result, base.Failure):
        name = getattr(task, "reward_name", None) or f"{type(task).__module__}.{type(task).__qualname__}.reward"
        raise base.error_of(result, name, prompt, step)
    return result
