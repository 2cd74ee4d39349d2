"""verl's copies of a checkpoint to a remote place (`trainer.default_hdfs_dir`) wait for its commit.

The trainers copy the step's folder right after the save, when it is not yet whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl import driver_copies


class Awaits(Protocol):
    """What a checkpoint manager does for a copy."""

    def follow(self, path: str, then: Callable[[], None]) -> bool: ...


_managers: weakref.WeakSet[Awaits] = weakref.WeakSet()


def of_manager(manager: Awaits) -> None:
    """Have copies of what this manager saves wait."""
    _managers.add(manager)


def instead_of(verls: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in for verl's ``hdfs_io.copy``, of which it keeps the arguments. For a checkpoint that is
    being written the answer is True at once; that the copy failed is told at the next save, or at the program's end. A
    process without a manager, as a driver under Ray is, asks the checkpoint monitor.
    """

    @functools.wraps(verls)
    def copy(src: str, dst: str, **kwargs: Any) -> Any:
        def now() -> None:
            if not verls(src, dst, **kwargs):
                raise RunError(f"{src} could not be copied to {dst}")

        managers = list(_managers)
        follows = any(manager.follow(src, now) for manager in managers) if managers else driver_copies.follow(src, now)
        return follows or verls(src, dst, **kwargs)

    return copy
