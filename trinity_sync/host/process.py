"""The start, the size and the end of a run's processes. Imports nothing heavy.

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

DRIVER = "TRINITY_SYNC_LIFELINE"
"""Environment variable: path of a named pipe that only the driver of the run has open for writing."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch the garbage collector off: it takes a tenth of the time of an import, and finds nothing then."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def small_actor(cls: type, *args: object, **kwargs: object) -> type:
    """Return a class that constructs `cls(*args, **kwargs)` without arguments, for actors with small processes.

    Ray imports pyarrow, where it is installed, into every worker that takes an argument or returns a value, to prepare
    for Ray Data: 46 MB in a process of 80 MB. A process in which pyarrow cannot be imported avoids that; the arguments
    travel with the class, because receiving them would already trigger the import.
    """

    class SmallActor(cls):
        def __init__(self) -> None:
            sys.modules.setdefault("pyarrow", None)  # type: ignore[arg-type]
            super().__init__(*args, **kwargs)

    SmallActor.__name__, SmallActor.__qualname__, SmallActor.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    return SmallActor


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables during the block; changes that others make meanwhile stay."""
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
def replaced(owner: object, **attributes: object) -> Iterator[None]:
    """Replace attributes of a class, a module or an object during the block, such as functions of other programs that
    have no switch.
    """
    before = {name: vars(owner)[name] if name in vars(owner) else getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def driver_lifeline(path: Path) -> Iterator[dict[str, str]]:
    """Be the driver during the block: processes that call `end_with_driver` end with it. Yields variables for them.

    `path`: of the named pipe, which is created.
    """
    os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # with O_WRONLY it would wait for a reader
    try:
        yield {DRIVER: str(path)}
    finally:
        os.close(pipe)


def end_with_driver(*, kept: bool = False) -> None:
    """Have the kernel kill this process and its group when its driver is gone, even where it is stopped or hangs.

    Do nothing where the driver has no lifeline: then Ray is another program's, and ends its processes. `kept`: also for
    the program that this process becomes.
    """
    if (path := os.environ.get(DRIVER)) is None:
        return
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # other programs' processes may be in the group
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
