"""What every process of a run does for itself: its own log file, its size. Imports nothing heavy."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def own_log(folder: str | Path | None, name: str) -> None:
    """Send this process's output, native libraries' included, to ``<folder>/<name>.log``; nothing for a folder of None.

    Where the folder cannot be written (a node without the shared file system) the process keeps the output it has.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        target = os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    # A native crash (a NCCL abort, an out-of-memory kill's SIGTERM) leaves its stack in the log instead of nothing.
    faulthandler.enable(file=sys.stderr)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector off: while modules are loaded it finds nothing, and takes a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def small_actor(cls: type, *args: Any, **kwargs: Any) -> type:
    """Return a class that makes a `cls(*args, **kwargs)` without arguments, for actors whose process is to stay small.

    Ray imports pyarrow, where it is installed, into every worker that takes an argument or returns a value, to prepare
    for Ray Data: 46 MB in a process of 80 MB. A process in which pyarrow cannot be imported is spared that; the
    arguments travel with the class, because taking them would already trigger the import.
    """

    class Small(cls):
        def __init__(self) -> None:
            sys.modules.setdefault("pyarrow", None)  # type: ignore[arg-type]
            super().__init__(*args, **kwargs)

    Small.__name__, Small.__qualname__, Small.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    return Small
