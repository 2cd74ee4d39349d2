"""The end of a verl program, which waits for nothing: what was saved last is finished first, and a failure is one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol


class Saves(Protocol):
    """What a checkpoint manager does at the end."""

    def settle_at_exit(self) -> None:
        """Tell what others wait for. Does not wait for them."""
        ...

    def finish_at_exit(self) -> None:
        """Return when all saves are complete, or have failed."""
        ...


# Not weak: the trainer may be gone before the program's end, and what it saved last is still to be finished.
_managers: list[Saves] = []
_failed = False
_process = 0


def finish_at_exit(manager: Saves) -> None:
    """Have the process end only when all saves of this manager are complete, or have failed."""
    global _process
    if not _managers:
        # Not `atexit`: from Python 3.12 on no thread can be started in what that calls. The interpreter waits for this
        # one before it calls anything.
        threading.Thread(target=_finish_after_main, name="saves-at-exit", daemon=False).start()
    _process = os.getpid()
    _managers.append(manager)


def end_as_failed() -> None:
    """Give the process the exit code 1 if a save failed at its end. To be called by the handler that runs last."""
    if _failed and os.getpid() == _process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _finish_after_main() -> None:
    threading.main_thread().join()
    for manager in list(_managers):
        _aloud(manager.settle_at_exit)
    for manager in list(_managers):
        _aloud(manager.finish_at_exit)


def _aloud(do: Callable[[], None]) -> None:
    global _failed
    try:
        do()
    except Exception as error:
        _failed = True
        print(f"trinity-sync: a checkpoint was lost at the end of the program: {error}", file=sys.stderr, flush=True)
