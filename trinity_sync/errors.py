"""The errors that users see. Every layer raises these; the command line turns them into one paragraph and an exit code.

Lowest of all modules: it imports nothing of the project, so any package may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self


class TrinityError(Exception):
    """Base of all expected failures. The message is one short paragraph: what is wrong, where, what to do."""

    exit_code = 1


class ConfigError(TrinityError):
    """The configuration, the command line or an input file is wrong. Nothing was started. Exit code 2."""

    exit_code = 2


class RunError(TrinityError, RuntimeError):
    """A run or a check failed after it had begun. Exit code 1. A `RuntimeError`, as callers of verl expect."""


class ProcessLoss(RunError):  # noqa: N818 - named as WaitTimeout is
    """A process of a run has died or does not answer: with new processes the same work may succeed."""


class WaitTimeout(ProcessLoss):
    """A wait timed out.

    Args:
        who: the awaited process or actor, such as ``"explorer-0"``.
        what: its work, such as ``"load version 12"``.
        seconds: the timeout; of a `WaitLimit` the error names the settings.
    """

    def __init__(self, who: str, what: str, seconds: float) -> None:
        super().__init__(who, what, seconds)
        self.who, self.what, self.seconds = who, what, seconds

    def __str__(self) -> str:
        return f"{self.who} did not {self.what} within {limit_text(self.seconds)}"


_LONGEST_S = 1e9
"""Locks take no longer timeout."""


class WaitLimit(float):
    """The limit of a wait in seconds, which `grown` makes longer for bytes. A number as any other timeout.

    Args:
        timeout_s: limit of a wait that moves no bytes, seconds.
        min_rate_mbps: the slowest rate at which bytes may move, Mbit/s; None: bytes get no time.
        keys: names of both settings in errors.

    Raises:
        ConfigError: the rate is not a number above 0.
    """

    min_rate_mbps: float | None
    keys: tuple[str, str]
    reason = ""

    def __new__(
        cls,
        timeout_s: float,
        min_rate_mbps: float | None = None,
        keys: tuple[str, str] = ("sync.timeout_s", "sync.min_rate_mbps"),
    ) -> Self:
        rate, is_number = min_rate_mbps, isinstance(min_rate_mbps, int | float) and not isinstance(min_rate_mbps, bool)
        if rate is not None and not (is_number and 0 < rate < float("inf")):
            raise ConfigError(f"{keys[1]} is {rate!r}; it has to be a number of Mbit/s above 0, or null")
        found = super().__new__(cls, timeout_s)
        found.min_rate_mbps, found.keys = rate, keys
        return found


def grown(limit_s: float, nbytes: int, *, more_s: float = 0.0) -> float:
    """Return the limit of a wait that moves so many bytes, over all of its hops, and may take `more_s` seconds besides.
    Only a `WaitLimit` grows with the bytes.
    """
    if not isinstance(limit_s, WaitLimit) or not nbytes:
        return limit_s + more_s if more_s else limit_s
    rate, (constant, slowest) = limit_s.min_rate_mbps, limit_s.keys
    seconds = limit_s + more_s + (0.0 if rate is None else nbytes * 8e-6 / rate)
    found = WaitLimit(min(seconds, _LONGEST_S), rate, limit_s.keys)
    slow = f"{nbytes / 1e6:,.1f} MB at {slowest}="
    time = f"no time for {slow}null" if rate is None else f"{slow}{rate:g}"
    more = f", {abs(more_s):g} s {'more' if more_s > 0 else 'less'}" if more_s else ""
    found.reason = f" ({constant}={limit_s:g}{more}, and {time})"
    return found


def limit_text(limit_s: float) -> str:
    """Return the text of a limit, with the settings that gave it."""
    return f"{limit_s:g} s{limit_s.reason if isinstance(limit_s, WaitLimit) else ''}"


def near(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the nearest of some words; empty if none is near."""
    import difflib  # processes that meet no error start without it

    found = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def take_back(error: BaseException, undo: Callable[[], object]) -> None:
    """Undo earlier work after an error. A failure of the undoing becomes a note of that error."""
    try:
        undo()
    except Exception as second:
        error.add_note(f"it could not be undone either: {second}")


def in_one_line(error: BaseException) -> str:
    """Return an error's text without line breaks; the name of its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__
