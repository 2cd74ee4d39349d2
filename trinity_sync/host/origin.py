"""The place in the user's code from which an error comes. Code that calls the user's, such as the engines, is skipped.

A traceback does not travel between processes, so `keep_origin` stores the origin in the error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trinity_sync.errors import TrinityError

_CALLERS = sys.stdlib_module_names | {
    "accelerate",
    "fsspec",
    "huggingface_hub",
    "hydra",
    "mbridge",
    "megatron",
    "numpy",
    "omegaconf",
    "pyarrow",
    "ray",
    "rich",
    "safetensors",
    "tenacity",
    "tensordict",
    "tokenizers",
    "torch",
    "transformers",
    "trinity_sync",
    "verl",
    "vllm",
}
"""Packages that call the user's code, or are between us and it."""

_KEPT = "_trinity_sync_origin"
_MOST_SAID = 2_000
"""Limit of the characters of a message."""
_MOST = 20_000
"""Limit of the characters of a traceback; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Origin:
    """The place in the user's code from which an error comes."""

    place: str  # file and line of the innermost frame of the user's own, as in ``/home/me/my_rewards.py:17``
    traceback: str  # as Python prints it, from the first frame of the user's code


def origin(error: BaseException) -> Origin | None:
    """Return the origin of an error, or of its causes, in the user's code; None: it has none there."""
    cause: object = error
    for _ in range(10):
        if not isinstance(cause, BaseException):
            break
        found = getattr(cause, _KEPT, None)
        if not isinstance(found, Origin):
            found = None if isinstance(cause, TrinityError) else _found(cause)
        if found is not None:
            return found
        cause = cause.__cause__ or getattr(cause, "cause", None)  # the second is Ray's, for an actor's error
    return None


def keep_origin(error: BaseException) -> Origin | None:
    """Store an error's origin in it, so that it travels to other processes; return it."""
    found = origin(error)
    if found is not None:
        with contextlib.suppress(Exception):  # a foreign class may refuse attributes
            setattr(error, _KEPT, found)
    return found


def give_origin(error: BaseException, found: Origin) -> None:
    """Store an origin in another process in an error that was created here."""
    setattr(error, _KEPT, found)


def error_text(error: BaseException) -> str:
    """Describe an error for other processes: its class, its message, its place in the user's code."""
    return _worded(error, _says(error))


def end_text(error: BaseException) -> str:
    """As `error_text`; for an error by which code ends its program, that it called `sys.exit`."""
    if not isinstance(error, SystemExit):
        return error_text(error)
    found = origin(error)
    return f"called sys.exit({shortened(repr(error.code))})" + (f" ({found.place})" if found is not None else "")


def error_line(error: BaseException) -> str:
    """Describe an error in one line: as `error_text`, with the first line of its message."""
    return _worded(error, _says(error).strip().partition("\n")[0])


def shortened(text: str) -> str:
    """Return a foreign text, shortened if it is long."""
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}..."


def _says(error: BaseException) -> str:
    try:
        return shortened(str(error))
    except Exception:  # of a foreign class
        return "(it cannot be put into words)"


def _worded(error: BaseException, says: str) -> str:
    found = origin(error)
    text = f"{type(error).__name__}: {says}" if says else type(error).__name__
    return text if found is None else f"{text} ({found.place})"


def _found(error: BaseException) -> Origin | None:
    steps = []
    step = error.__traceback__
    while step is not None:
        if not _calls(step):
            steps.append(step)
        step = step.tb_next
    if not steps:
        return None
    last = ([step for step in steps if not _installed(step)] or steps)[-1]
    place = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    text = "".join(traceback.format_exception(type(error), error, steps[0])).rstrip()
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]}\n  ...\n{text[-_MOST // 2 :]}"
    return Origin(place, text)


def _calls(step: TracebackType) -> bool:
    """Return whether a frame is of a package that calls the user's code."""
    frame = step.tb_frame
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _CALLERS or frame.f_code.co_filename.startswith("<")


def _installed(step: TracebackType) -> bool:
    """Return whether a frame is of an installed package."""
    return _in_site_packages(step.tb_frame.f_code.co_filename)


def _in_site_packages(path: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


# The stack of a process that hangs or dies, written by the signal handlers of `faulthandler`, which do not need the
# interpreter.

ASK = signal.SIGUSR1
"""Has a process that called `tell_stack` write its stack, and end."""

_LINE = re.compile(r'^  File "(.+)", line (\d+) in ')
_STACK_BYTES = 1 << 16


def tell_stack(file: int) -> None:
    """Have this process write its current thread's stack to an empty file, and end, at a crash or `ASK`."""
    faulthandler.enable(file=file, all_threads=False)
    faulthandler.register(ASK, file=file, all_threads=False, chain=True)  # chain: the signal then ends the process


def stack_told(file: int) -> str:
    """Return what an ended process wrote by `tell_stack`; empty: nothing."""
    return os.pread(file, _STACK_BYTES, 0).decode(errors="replace").rstrip()


def place_of(stack: str, caller: str) -> str | None:
    """Return file and line of the innermost call in a stack, above `caller`, that is not a library's; else of any; or
    None.
    """
    calls = []
    for line in stack.splitlines():
        if (found := _LINE.match(line)) is not None:
            if found[1] == caller:
                break
            calls.append((found[1], found[2]))
    own = [call for call in calls if not _of_library(call[0])]
    return ":".join((own or calls)[0]) if calls else None


def _of_library(path: str) -> bool:
    return path.startswith((f"{sysconfig.get_path('stdlib')}/", "<")) or _in_site_packages(path)
