"""verl's copies of a checkpoint to a remote place (`trainer.default_hdfs_dir`) wait for its commit.

verl's trainers copy the step's folder right after the save, before it is whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path

from trinity_sync.checkpoint import daemon
from trinity_sync.checkpoint.folder.contents import step_of
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.at_exit import Saves, finish_at_exit
from trinity_sync.integrations.verl.committed_saves import Commits, CommittedSaves, follow_with_copy
from trinity_sync.integrations.verl.local_run import ANSWER_S, COMMIT_S, RunMonitor, join_alone, under_ray

_managers: weakref.WeakSet[CommittedSaves] = weakref.WeakSet()


def of_manager(manager: CommittedSaves) -> None:
    """Let copies of this manager's checkpoints wait for their commit."""
    _managers.add(manager)


def instead_of(verls: Callable[..., object]) -> Callable[..., object]:
    """Return a replacement for verl's ``hdfs_io.copy``, with the same arguments. For a checkpoint that is being written
    it returns True at once; an error of the copy is raised by the next save or printed at the program's end. A process
    without a manager, such as a driver under Ray, asks the checkpoint monitor.
    """

    @functools.wraps(verls)
    def copy(src: str, dst: str, **kwargs: object) -> object:
        def now() -> None:
            if not verls(src, dst, **kwargs):
                raise RunError(f"{src} could not be copied to {dst}")

        managers = list(_managers)
        follows = any(manager.follow(src, now) for manager in managers) if managers else follow(src, now)
        return follows or verls(src, dst, **kwargs)

    return copy


class DriverCopies(Saves):
    """Remote copies of one folder's checkpoints by a driver under Ray, such as verl's ``sft_trainer_ray``. It has no
    engine, so it asks the checkpoint monitor.
    """

    def __init__(self, root: Path, monitor: RunMonitor) -> None:
        self._root, self._monitor = root, monitor
        self._commits = Commits(monitor.client, monitor.attempt, COMMIT_S)

    def follow(self, step: int, copy: Callable[[], None]) -> None:
        """Call `copy` in the background when the step is committed. verl's trainer has written its own files. Raises
        the error of an earlier copy.
        """
        self._commits.raise_failures()
        self._monitor.client.notify_beside(step, attempt=self._monitor.attempt).result(ANSWER_S)
        follow_with_copy(self._commits, self._root, step, copy)

    def finish(self, limit_s: float | None) -> None:
        """Wait until all copies are made. Raises the first error."""
        self._commits.wait()


_of_folders: dict[Path, DriverCopies] = {}


def follow(path: str, copy: Callable[[], None]) -> bool:
    """Copy a step's folder when it is committed, if this process is a driver under Ray and the step is saved through
    us. Raises TrinityError if the monitor is gone or does not answer, or an earlier copy failed. Returns False if
    nothing is done.
    """
    folder = Path(path).absolute()
    step, root = step_of(folder.name), folder.parent
    if step is None or not under_ray() or daemon.find(root) is None:
        return False
    if root not in _of_folders:
        _of_folders[root] = DriverCopies(root, join_alone(root, ANSWER_S))
        finish_at_exit(_of_folders[root])
    _of_folders[root].follow(step, copy)
    return True
