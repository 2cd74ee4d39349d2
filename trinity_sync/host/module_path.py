"""Where a program looks for modules: last of all, in the folder in which the user has started it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

RAYS_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Variable of Ray's: the function that it calls in a worker before all else."""
_FOLDERS = "TRINITY_SYNC_MODULES"
_folders: list[str] = []
_named = False


@contextmanager
def own_modules_found(*folders: Path, unless_named: bool = False) -> Iterator[None]:
    """Inside, a module that is found nowhere else is looked for in these folders, and in none that was named around it:
    a user's own reward or task lies there. Last of all, so that a file of theirs hides no module of anybody's.

    Args:
        unless_named: only where no folders, or none, were named around it.
    """
    global _named
    here, around, before = [str(folder) for folder in folders], list(_folders), _named
    if unless_named and before:
        yield
        return
    for other in around:
        _leave_out(other)
    _folders[:] = here
    sys.path += here
    _named = True
    try:
        yield
    finally:
        for folder in here:
            _leave_out(folder)
        sys.path += around
        _folders[:] = around
        _named = before


def _leave_out(folder: str) -> None:
    """Of the path; the last one, since it may have been there before."""
    if folder in sys.path:
        sys.path.reverse()
        sys.path.remove(folder)
        sys.path.reverse()


def own_module_folders() -> list[str]:
    """Return the folders in which `own_modules_found` has modules looked for."""
    return list(dict.fromkeys(_folders))


class ScriptFolder(list[str]):
    """For Ray's list of folders in which workers look first: takes the one in which this program looks first, and not
    the current one, which Ray adds.
    """

    def extend(self, folders: Iterable[str]) -> None:
        """See `list.extend`."""
        super().extend(folder for folder in folders if folder in sys.path[:1])


def for_workers() -> dict[str, str]:
    """Return variables for `look_there`."""
    return {_FOLDERS: json.dumps(own_module_folders())}


def look_there() -> None:
    """In a worker of Ray's, look for modules where `own_modules_found` does, last of all. Programs that the worker
    starts do not inherit the variables.
    """
    os.environ.pop(RAYS_HOOK, None)
    sys.path.extend(json.loads(os.environ.pop(_FOLDERS, "[]")))
