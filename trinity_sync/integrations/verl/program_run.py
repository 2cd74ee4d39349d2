"""`open_run`: the driver of a verl program prepares the checkpoint folder and starts the actors, before the workers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray.actor import ActorHandle

from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.checkpoint.folder import recovery
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.lock import has_no_monitor, locked
from trinity_sync.checkpoint.folder.resume_point import put_in_order
from trinity_sync.checkpoint.monitor import ACTOR_NAME, MonitorConfig
from trinity_sync.errors import RunError
from trinity_sync.sync import Synchronizer, SynchronizerConfig

# Timeout for a killed monitor to be gone, seconds.
_END_S = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class VerlRun:
    """A run's actors."""

    namespace: str  # of the actors; pass it to the workers as `ray_namespace`
    attempt: int  # 0 for a fresh folder, one more for each later start on it
    step: int  # the step to resume after; 0: the initial weights
    resume_path: Path | None  # folder of that step, None for 0
    verified: bool  # False: verl itself wrote that checkpoint, so its files have no digests
    monitor: ActorHandle  # handle of the checkpoint monitor
    synchronizer: Synchronizer  # the client
    root: Path  # the checkpoint folder
    lock: ExitStack = field(repr=False)  # the lock of the checkpoint folder, which keeps other runs out

    def close(self) -> None:
        """End the actors and unlock the folder. The end of the driver does the same."""
        _open.remove(self)
        try:
            for actor in (self.monitor, self.synchronizer.actor):
                ray.kill(actor)
            # Otherwise the next run does it.
            if has_no_monitor(self.root, _END_S):
                recovery.clean_versions(self.root, now=time.time())
        finally:
            self.lock.close()


# Runs live as long as the driver, even if the result of `open_run` is dropped.
_open: list[VerlRun] = []


def open_run(
    checkpoint_dir: str | os.PathLike[str],
    namespace: str | None = None,
    *,
    resume_step: int | None = None,
    save_strategy: str | None = None,
    roles: Sequence[str] = (),
    monitor_config: MonitorConfig | None = None,
    synchronizer_config: SynchronizerConfig | None = None,
) -> VerlRun:
    """Start a run on a checkpoint folder, fresh or resumed. Called by the driver, before the workers.

    Half-written files of a crash are removed, folders of later steps become ``abandoned-*``, and the trackers name the
    existing checkpoints, so verl's ``find_latest_ckpt_path(checkpoint_dir)`` finds the right one. Checkpoints that verl
    itself wrote can be resumed and are not changed.

    Args:
        checkpoint_dir: verl's ``trainer.default_local_dir``, shared by all nodes.
        namespace: Ray namespace of the actors; None: that of the driver.
        resume_step: resume after this step; None: after the newest full checkpoint, which has to verify unless verl
            itself wrote it; 0: from the start.
        save_strategy: which ranks may write at the same time, see `CheckpointMonitor`.
        roles: the folders in ``global_step_N`` that make up a full checkpoint, such as ``("actor", "critic")``. A step
            is committed when all of them are written, and a checkpoint of verl's that lacks one is not resumed. Empty:
            a step is committed with the parts that are announced by then; later parts of the step are added to it.
        monitor_config: the other settings of the monitor; attempt and roles are filled in.
        synchronizer_config: the other settings of the synchronizer; the folder is filled in.

    Raises:
        ConfigError: the folder cannot be written, or another live run uses it.
        RunError: the step to resume is not a full checkpoint, a committed checkpoint cannot be seen (see
            `resume_point.put_in_order`), or a run is open in the namespace.
    """
    namespace = namespace or ray.get_runtime_context().namespace
    _refuse_second(namespace)
    root = Path(checkpoint_dir).absolute()
    with ExitStack() as lock:
        lock.enter_context(locked(root, root))
        start = put_in_order(root, resume_step, roles)
        config = replace(monitor_config or MonitorConfig(), attempt=start.attempt, roles=tuple(roles))
        monitor = CheckpointMonitor.get_actor(namespace, save_strategy, str(root), config=config)
        synchronizer = Synchronizer.get_actor(
            replace(synchronizer_config or SynchronizerConfig(), checkpoint_dir=str(root)), namespace
        )
        run = VerlRun(
            namespace=namespace,
            attempt=start.attempt,
            step=start.step,
            resume_path=step_dir(root, start.step) if start.step > 0 else None,
            verified=start.verified,
            monitor=monitor,
            synchronizer=synchronizer,
            root=root,
            lock=lock.pop_all(),
        )
    _open.append(run)
    return run


def _refuse_second(namespace: str) -> None:
    """Refuse a second run in the namespace: its start would rearrange the folder while the first monitor works in
    it.
    """
    try:
        ray.get_actor(ACTOR_NAME, namespace=namespace)
    except ValueError:
        return
    raise RunError(f"a run is open in Ray namespace {namespace!r} already; give this one a namespace of its own")
