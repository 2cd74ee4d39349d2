"""Where in code of the user's own an error comes from. What calls that code, as the engines do, is left out.

A traceback does not travel between processes. `keep_origin` has an error carry what is to be known of it.
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
"""Packages that call the user's code, or stand between us and it."""

_KEPT = "_trinity_sync_origin"
_MOST_SAID = 2_000
"""Characters of what an error says."""
_MOST = 20_000
"""Characters of a traceback; of a longer one the middle is left out."""


@dataclass(frozen=True)
class Origin:
    """Where in the user's code an error comes from.

    Attributes:
        place: file and line, as in ``/home/me/my_rewards.py:17``; the innermost of the user's, and not of a library
            that it calls.
        traceback: as Python prints it, from where the user's code begins.
    """

    place: str
    traceback: str


def origin(error: BaseException) -> Origin | None:
    """Return where in the user's code an error, or what it was raised from, comes from; None: from nowhere there."""
    cause: object = error
    for _ in range(10):
        if not isinstance(cause, BaseException):
            break
        found = getattr(cause, _KEPT, None)
        if not isinstance(found, Origin):
            found = None if isinstance(cause, TrinityError) else _found(cause)
        if found is not None:
            return found
        cause = cause.__cause__ or getattr(cause, "cause", None)  # the second is Ray's, for what an actor raised
    return None


def keep_origin(error: BaseException) -> Origin | None:
    """Have an error carry its origin to another process; return it."""
    found = origin(error)
    if found is not None:
        with contextlib.suppress(Exception):  # a class of somebody's may refuse attributes
            setattr(error, _KEPT, found)
    return found


def give_origin(error: BaseException, found: Origin) -> None:
    """Have an error that was made here carry an origin in another process."""
    setattr(error, _KEPT, found)


def told(error: BaseException) -> str:
    """Put an error into words for others than who raised it: its class, what it says, its place in the user's code."""
    return _worded(error, _says(error))


def ended(error: BaseException) -> str:
    """As `told`; of an error by which code ends its program, that it called `sys.exit`."""
    if not isinstance(error, SystemExit):
        return told(error)
    found = origin(error)
    return f"called sys.exit({shortened(repr(error.code))})" + (f" ({found.place})" if found is not None else "")


def described(error: BaseException) -> str:
    """Put an error into one line: as `told`, with the first line of what it says."""
    return _worded(error, _says(error).strip().partition("\n")[0])


def shortened(text: str) -> str:
    """Return a text of somebody else's as it is kept: of a long one, the beginning."""
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}..."


def _says(error: BaseException) -> str:
    try:
        return shortened(str(error))
    except Exception:  # of a class of somebody's
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
    """Whether a frame is of a package that calls the user's code, and not of that itself."""
    frame = step.tb_frame
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _CALLERS or frame.f_code.co_filename.startswith("<")


def _installed(step: TracebackType) -> bool:
    """Whether a frame is of an installed package, as libraries are."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(step.tb_frame.f_code.co_filename).parts)


# Where a process stands, told by itself while it hangs or dies: by the signal handlers of `faulthandler`, which need
# no turn of the interpreter.


ASK = signal.SIGUSR1
"""Has a process that called `tell_stack` write down where it stands, and end."""

_LINE = re.compile(r'^  File "(.+)", line (\d+) in ')
_STACK_BYTES = 1 << 16


def tell_stack(file: int) -> None:
    """Have this process write the stack of the thread in question when it crashes, or is sent `ASK`, and end.

    Args:
        file: file descriptor of an empty file.
    """
    faulthandler.enable(file=file, all_threads=False)
    faulthandler.register(ASK, file=file, all_threads=False, chain=True)  # the signal's own effect, which is the end


def stack_told(file: int) -> str:
    """Return what a process that is no more wrote by `tell_stack`; empty: nothing."""
    return os.pread(file, _STACK_BYTES, 0).decode(errors="replace").rstrip()


def place_of(stack: str, caller: str) -> str | None:
    """Return file and line of the innermost call in a stack that is of no library and above `caller`; else of the
    innermost there; None: there is none.

    Args:
        stack: what `stack_told` gave, innermost call first.
        caller: path of the file that made the call which the stack is asked about.
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
    standard = sysconfig.get_path("stdlib")
    parts = Path(path).parts
    return path.startswith((f"{standard}/", "<")) or not {"site-packages", "dist-packages"}.isdisjoint(parts)
