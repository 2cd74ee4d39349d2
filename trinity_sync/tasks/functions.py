"""Reward functions of the user's: what they have to be, told before a run, and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import RewardResult
from trinity_sync.tasks.judging import KEYS

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
