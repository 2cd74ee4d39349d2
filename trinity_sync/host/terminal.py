"""The standard streams of our commands: failed output ends no work, and foreign text stays text."""

from __future__ import annotations

import errno
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from trinity_sync.host.masking import without_hidden

_READER_GONE = (errno.EPIPE, errno.EIO)
"""A closed pipe and a closed terminal."""


def printable(text: str, keep: str = "", instead: str = "?") -> str:
    """Return a foreign text for a terminal, without unprintable characters, such as those of a control sequence."""

    def shown(char: str) -> str:
        return char if char.isprintable() or char in keep or unicodedata.category(char) == "Zs" else instead

    return text if text.isprintable() else "".join(map(shown, text))


class _Output:
    """A stream whose first error is kept and not raised. Later output goes to the null device."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | ValueError | None = None
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., object], *arguments: str) -> None:
        if self.error is not None:
            return
        try:
            action(*arguments)
        except (OSError, ValueError) as error:
            self.error = error
            # Python flushes its buffer again at its end, which would fail again.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _PlainOutput(_Output):
    """A stream that escapes control characters and masks hidden texts.

    Rich, which needs control sequences for its colours, writes to the stream below; see `tracking.console`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = _Output(stream)
        super().__init__(self.rich_proxied_file)  # type: ignore[arg-type]

    def write(self, text: str) -> int:
        bar = "\r" * text.startswith("\r")  # of a progress bar; inside a text it would overwrite the beginning
        super().write(bar + printable(without_hidden(text.removeprefix(bar)), keep="\n\t"))
        return len(text)


def open_missing() -> None:
    """Open the null device for each closed standard descriptor: the next file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115 - lives as long as we do


@contextmanager
def safe_streams() -> Iterator[None]:
    """Make stdout and stderr raise no error and escape foreign text, within the block and blocks inside it."""
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, _PlainOutput):
        yield
        return
    sys.stdout, sys.stderr = _PlainOutput(before[0]), _PlainOutput(before[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def output_lost() -> bool:
    """Return whether stdout has refused output, and report it on stderr. A reader that left has seen enough."""
    error = _stdout_error()
    if error is None or getattr(error, "errno", None) in _READER_GONE:
        return False
    print(f"error: standard output cannot be written: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
    return True


def output_ended() -> bool:
    """Return whether stdout accepts no more output."""
    return _stdout_error() is not None


def _stdout_error() -> Exception | None:
    sys.stdout.flush()
    return getattr(getattr(sys.stdout, "rich_proxied_file", None), "error", None)
