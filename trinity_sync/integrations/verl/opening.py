"""Opening the checkpoint monitor of a verl program that knows nothing of us: its first save says where it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_sync.checkpoint.layout import step_of
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.local_run import join_run
from trinity_sync.integrations.verl.run_monitor import RunMonitor
from trinity_sync.protocol.retention import Policy


def open_monitor(
    local_path: str, loaded: str | None, timeout_s: float, *, policies: Sequence[Policy] = ()
) -> RunMonitor:
    """Find the program's monitor for the folder that a save goes to, or start it: a process that ends with the program.
    Collective. For its arguments and errors see `interfaces.OpensMonitor` and `join_run`; `policies` are the retention
    of one that is started.

    Checkpoints of later steps than the one that was loaded from the folder become ``abandoned-*``: all of them where
    what was loaded is a step of another folder, or a copy by another name.

    Raises:
        ConfigError: `local_path` is in no folder ``global_step_N``; further as `join_run`.
    """
    saved = _split(local_path)
    if saved is None:
        raise ConfigError(f"{local_path} is in no folder global_step_N, as checkpoints of verl's trainers are")
    root, _ = saved
    place, step = (_split(loaded) if loaded is not None else None) or (None, 0)
    resume_step = step if place is not None and _same(place, root) else 0
    config = MonitorConfig(timeout_s=timeout_s, policies=policies)
    return join_run(root, resume_step=resume_step, timeout_s=timeout_s, config=config)


def _same(one: Path, other: Path) -> bool:
    """Whether both are the same folder, by whatever path."""
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _split(local_path: str) -> tuple[Path, int] | None:
    """Return the checkpoint folder and the step of a place in it; None: it is in no folder of a step's name."""
    path = Path(local_path).absolute()
    for folder in (path, *path.parents):
        step = step_of(folder.name)
        if step is not None:
            return folder.parent, step
    return None
