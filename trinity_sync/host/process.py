"""What processes of a run do for themselves: their start, their size. Imports nothing heavy."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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
