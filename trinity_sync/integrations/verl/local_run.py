"""A run without a driver of ours: its ranks open it themselves, with a checkpoint monitor in a process of its own."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trinity_sync.checkpoint.daemon import rendezvous
from trinity_sync.checkpoint.daemon.connecting import connect, wait_until_ended
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.program import this_program, under_ray
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.run_monitor import RunMonitor
from trinity_sync.integrations.verl.vendor import say

ANSWER_S = 30.0
"""What a process without an engine gives the monitor for an answer, seconds: it is there when a save has returned."""

_SHARED_S = 5.0
"""A network file system may show a new file so many seconds late."""
_POLL_S = 0.1

COMMIT_S = MonitorConfig().timeout_s
"""What such a process gives a commit, seconds."""

_CHECKPOINTS = "trinity-sync-checkpoints-"
"""Key of the checkpoint folder in Ray's store, before the word of the program."""


def join_alone(root: str | os.PathLike[str], timeout_s: float) -> RunMonitor:
    """Connect a process of a program under Ray that has no engine, such as its driver, to the monitor that the engines
    have started. Any one process.

    Args:
        root: the checkpoint folder, by the same path as the engines.
        timeout_s: limit of each wait, seconds.

    Raises:
        ConfigError, RunError, WaitTimeout: as `checkpoint.daemon.connecting.connect`.
    """
    program = this_program()
    handle = connect(root, program=program.word, may_start=False, timeout_s=timeout_s, address=program.address)
    return RunMonitor.of(handle, timeout_s)


def finish_saves_of_workers(timeout_s: float) -> None:
    """Wait until the saves under way of the engines of a program under Ray are committed. For its driver, without an
    engine; returns at once where no engine has saved through us.

    Args:
        timeout_s: limit of each wait, seconds.

    Raises:
        RunError: one failed.
        WaitTimeout: one is not committed.
    """
    said = internal_kv()._internal_kv_get(_CHECKPOINTS + this_program().word) if under_ray() else None
    if said is not None:
        wait_until_ended(said.decode(), timeout_s=timeout_s, on_wait=say)
        if rendezvous.find(Path(said.decode())) is not None:
            join_alone(said.decode(), timeout_s).client.finish_saves(timeout_s).result(timeout_s + ANSWER_S)


def internal_kv() -> Any:
    """Return the module of Ray, which runs in this process."""
    return importlib.import_module("ray.experimental.internal_kv")


def join_run(
    root: str | os.PathLike[str],
    *,
    resume_step: int | None,
    timeout_s: float,
    save_strategy: str = "unrestricted",
    config: MonitorConfig | None = None,
) -> RunMonitor:
    """Connect this rank to the run's checkpoint monitor, which rank 0 starts where there is none. Collective, over the
    default group.

    Several groups of one program (actor and critic, under Ray) have one monitor; what the first one says of it holds.
    See `checkpoint.daemon.connecting.connect` for how long it lives, and what becomes of the folder.

    Args:
        root: the checkpoint folder, by the same path on all nodes.
        resume_step: the step whose checkpoint the program has loaded, 0: none. None: the newest is gone on from.
        timeout_s: limit of each wait, seconds.
        save_strategy, config: of a monitor that is started; attempt and writer are filled in.

    Raises:
        RunError: on every rank, with the rank and its error, such as that another program writes in the folder, or
            that the ranks do not share it.
    """
    program, first = this_program(), dist.get_rank() == 0
    found: list[RunMonitor] = []

    def join() -> None:
        handle = connect(
            root,
            program=program.word,
            may_start=first,
            timeout_s=timeout_s,
            resume_step=resume_step,
            save_strategy=save_strategy,
            config=config,
            address=program.address,
        )
        found.append(RunMonitor.of(handle, timeout_s))
        if first and under_ray():
            internal_kv()._internal_kv_put(_CHECKPOINTS + program.word, str(Path(root).absolute()))

    mark = Path(root, f".shared-{secrets.token_hex(8)}")

    def begin() -> str:
        join()
        mark.touch()
        return mark.name

    # Rank 0 before the others: where it fails they have nothing to wait for.
    seen = together("open the checkpoint folder", begin if first else str)[0]
    try:
        together("see the checkpoint folder of rank 0", lambda: None if first else _check_shared(Path(root), seen))
    finally:
        if first:
            with suppress(OSError):  # the others would wait for rank 0
                mark.unlink()
    together("find the checkpoint monitor", join if not first else lambda: None)
    return found[0]


def _check_shared(root: Path, mark: str) -> None:
    deadline = time.monotonic() + _SHARED_S
    while not (root / mark).exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{root} on {socket.gethostname()} is not the checkpoint folder of rank 0: a file that rank 0 wrote is "
                f"not there after {_SHARED_S:.0f} s. Name a folder that all nodes share"
            )
        time.sleep(_POLL_S)
