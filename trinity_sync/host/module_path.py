"""Where a program looks for modules: last of all, in the folder in which the user has started it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: list[str] = []


@contextmanager
def own_modules_found(folder: Path | None = None) -> Iterator[None]:
    """Inside, a module that is found nowhere else is looked for in a folder, and in none that was named around it: a
    user's own reward or task lies there. Last of all, so that a file of theirs hides no module of anybody's.

    Args:
        folder: where the run was started; None: the current one.
    """
    here = str(folder or Path.cwd())
    around = list(_folders)
    for other in around:
        _leave_out(other)
    _folders[:] = [here]
    sys.path.append(here)
    try:
        yield
    finally:
        _leave_out(here)
        sys.path += around
        _folders[:] = around


def _leave_out(folder: str) -> None:
    """Of the path; the last one, since it may have been there before."""
    if folder in sys.path:
        sys.path.reverse()
        sys.path.remove(folder)
        sys.path.reverse()


def own_module_folders() -> list[str]:
    """Where `own_modules_found` has modules looked for, which processes elsewhere are told to do, too."""
    return list(dict.fromkeys(_folders))
