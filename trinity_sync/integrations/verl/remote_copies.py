"""verl's copies of a checkpoint to a remote place (`trainer.default_hdfs_dir`) wait for its commit.

The trainers copy the step's folder right after the save, when it is not yet whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trinity_sync.checkpoint.daemon import service
from trinity_sync.checkpoint.folder.contents import step_of
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.at_exit import Saves, finish_at_exit
from trinity_sync.integrations.verl.committed_saves import Commits, follow_with_copy
from trinity_sync.integrations.verl.local_run import ANSWER_S, COMMIT_S, RunMonitor, join_alone, under_ray


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
        follows = any(manager.follow(src, now) for manager in managers) if managers else follow(src, now)
        return follows or verls(src, dst, **kwargs)

    return copy


# Copies to a remote place that a driver under Ray makes, as verl's ``sft_trainer_ray`` does: it has no engine, so it
# asks the checkpoint monitor itself.


class DriverCopies(Saves):
    """Copies of the checkpoints of one folder.

    Args:
        root: the checkpoint folder.
        monitor: of the run that saves in it.
    """

    def __init__(self, root: Path, monitor: RunMonitor) -> None:
        self._root, self._monitor = root, monitor
        self._commits = Commits(monitor.client, monitor.attempt, COMMIT_S)

    def follow(self, step: int, copy: Callable[[], None]) -> None:
        """Have a step's folder copied when it is committed. verl's trainer has written all that it writes itself.

        Args:
            step: the step.
            copy: copies its folder; called in the background.

        Raises:
            Exception: what an earlier copy failed of.
        """
        self._commits.raise_failures()
        self._monitor.client.notify_beside(step, attempt=self._monitor.attempt).result(ANSWER_S)
        follow_with_copy(self._commits, self._root, step, copy)

    def finish(self, limit_s: float | None) -> None:
        """Return when all copies are made. Raises what one failed of."""
        self._commits.wait()


_of_folders: dict[Path, DriverCopies] = {}


def follow(path: str, copy: Callable[[], None]) -> bool:
    """Copy a step's folder when it is committed, where this process is a driver under Ray and the step is saved through
    us. A copy that fails is told at the next one, or at the program's end.

    Args:
        path: the folder.
        copy: copies it; called in the background.

    Returns:
        Whether that is so; else nothing is done.

    Raises:
        TrinityError: the monitor is gone, or does not answer; or an earlier copy failed.
    """
    folder = Path(path).absolute()
    step, root = step_of(folder.name), folder.parent
    if step is None or not under_ray() or service.find(root) is None:
        return False
    if root not in _of_folders:
        _of_folders[root] = DriverCopies(root, join_alone(root, ANSWER_S))
        finish_at_exit(_of_folders[root])
    _of_folders[root].follow(step, copy)
    return True
