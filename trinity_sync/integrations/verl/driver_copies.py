"""Copies to a remote place that a driver under Ray makes, as verl's ``sft_trainer_ray`` does: it has no engine, so it
asks the checkpoint monitor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trinity_sync.checkpoint.daemon import rendezvous
from trinity_sync.checkpoint.layout import step_of
from trinity_sync.integrations.verl.at_exit import Saves, finish_at_exit
from trinity_sync.integrations.verl.commits import Commits, follow_with_copy
from trinity_sync.integrations.verl.local_run import ANSWER_S, COMMIT_S, join_alone
from trinity_sync.integrations.verl.program import under_ray
from trinity_sync.integrations.verl.run_monitor import RunMonitor


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
    if step is None or not under_ray() or rendezvous.find(root) is None:
        return False
    if root not in _of_folders:
        _of_folders[root] = DriverCopies(root, join_alone(root, ANSWER_S))
        finish_at_exit(_of_folders[root])
    _of_folders[root].follow(step, copy)
    return True
