"""The end of a verl program, which waits for nothing: what was saved last is finished first, and a failure is one."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol


class Saves(Protocol):
    """What a checkpoint manager does at the end."""

    def finish_at_exit(self) -> None: ...


# Not weak: the trainer may be gone before the program's end, and what it saved last is still to be finished.
_managers: list[Saves] = []
_failed = False
_process = 0


def finish_at_exit(manager: Saves) -> None:
    """Have the process end only when all saves of this manager are complete, or have failed."""
    global _process
    if not _managers:
        atexit.register(_finish)
    _process = os.getpid()
    _managers.append(manager)


def end_as_failed() -> None:
    """Give the process the exit code 1 if a save failed at its end. To be called by the handler that runs last."""
    if _failed and os.getpid() == _process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _finish() -> None:
    global _failed
    for manager in list(_managers) if os.getpid() == _process else ():  # a fork saves nothing
        try:
            manager.finish_at_exit()
        except Exception as error:
            _failed = True
            print(
                f"trinity-sync: a checkpoint was lost at the end of the program: {error}", file=sys.stderr, flush=True
            )
