"""Where a program looks for modules: last of all, in the folder in which the user has started it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: list[str] = []


@contextmanager
def own_modules_found() -> Iterator[None]:
    """Inside, a module that is found nowhere else is looked for in the current folder: a user's own reward or task lies
    there. Last of all, so that a file of theirs hides no module of anybody's.
    """
    here = str(Path.cwd())
    _folders.append(here)
    sys.path.append(here)
    try:
        yield
    finally:
        _folders.remove(here)
        if here in sys.path:
            sys.path.reverse()
            sys.path.remove(here)  # the last one: it may have been there before
            sys.path.reverse()


def own_module_folders() -> list[str]:
    """Where `own_modules_found` has modules looked for, which processes elsewhere are told to do, too."""
    return list(dict.fromkeys(_folders))
