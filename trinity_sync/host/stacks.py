"""Where a process stands, told by itself while it hangs or dies: by the signal handlers of `faulthandler`, which need
no turn of the interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
from pathlib import Path

ASK = signal.SIGUSR1
"""Has a process that called `tell_stack` write down where it stands, and end."""

_LINE = re.compile(r'^  File "(.+)", line (\d+) in ')
_MOST = 1 << 16


def tell_stack(file: int) -> None:
    """Have this process write the stack of the thread in question when it crashes, or is sent `ASK`, and end.

    Args:
        file: file descriptor of an empty file.
    """
    faulthandler.enable(file=file, all_threads=False)
    faulthandler.register(ASK, file=file, all_threads=False, chain=True)  # the signal's own effect, which is the end


def stack_told(file: int) -> str:
    """Return what a process that is no more wrote by `tell_stack`; empty: nothing."""
    return os.pread(file, _MOST, 0).decode(errors="replace").rstrip()


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
