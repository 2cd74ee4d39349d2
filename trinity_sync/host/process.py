"""What processes of a run do for themselves: their start, their size, their end. Imports nothing heavy.

``python .../process.py COMMAND ...`` becomes the command, which ends with its driver, see `end_with_driver`.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DRIVER = "TRINITY_SYNC_LIFELINE"
"""Environment variable: path of a named pipe that is open for writing in the driver of the run, and nowhere else."""


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


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for the length of the block; what others set in it meanwhile stays."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def driver_lifeline(path: Path) -> Iterator[dict[str, str]]:
    """Within the block, be the driver with which processes end that call `end_with_driver`.

    Args:
        path: of the named pipe, which is made.

    Yields:
        Environment variables for these processes.
    """
    os.mkfifo(path, 0o600)
    held = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # only for writing it would wait for a reader
    try:
        yield {DRIVER: str(path)}
    finally:
        os.close(held)


def end_with_driver(*, kept: bool = False) -> None:
    """Have the kernel kill this process and its group when its driver is gone, even where it is stopped or hangs.
    Nothing where the driver has no lifeline: Ray is another program's, and ends its processes.

    Args:
        kept: it holds for the program that this process becomes, too.
    """
    if (path := os.environ.get(DRIVER)) is None:
        return
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # processes of others may be in the group
    try:
        lifeline = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_inheritable(lifeline, kept)
    except FileNotFoundError:
        os.kill(os.getpid(), signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):  # it is there
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_driver(kept=True)
    os.execv(sys.argv[1], sys.argv[1:])
