"""The errors that users see. Every layer raises these; the command line turns them into one paragraph and an exit code.

Lowest of all modules: it imports nothing of the project, so any package may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class TrinityError(Exception):
    """Base of all expected failures. The message is one short paragraph: what is wrong, where, what to do."""

    exit_code = 1


class ConfigError(TrinityError):
    """The configuration, the command line or an input file is wrong. Nothing was started. Exit code 2."""

    exit_code = 2


class RunError(TrinityError, RuntimeError):
    """A run or a check failed after it had begun. Exit code 1. A `RuntimeError`, as callers of verl expect."""


class WaitTimeout(RunError):  # noqa: N818 - the name says what happened
    """A wait timed out.

    Args:
        who: the awaited process or actor, such as ``"explorer-0"``.
        what: its work, such as ``"load version 12"``.
        seconds: the timeout.
    """

    def __init__(self, who: str, what: str, seconds: float) -> None:
        super().__init__(who, what, seconds)
        self.who, self.what, self.seconds = who, what, seconds

    def __str__(self) -> str:
        return f"{self.who} did not {self.what} within {self.seconds:g} s"


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
