"""A trainer rank with the saves that ours are compared with, for `checkpoint.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from trinity_sync.backends.base import Backend
from trinity_sync.backends.option import accelerator_count, platform_env
from trinity_sync.weights.snapshot import plan

os.environ.update(platform_env(accelerator_count() > 0))  # verl looks for it when it is imported
from trinity_sync.trainer.worker import TrinityWorker

LIMIT_S = 600.0


class BenchWorker(TrinityWorker):
    """A trainer rank with what it is compared with."""

    def state_bytes(self) -> int:
        """Of this rank."""
        return plan(cast("Backend", self._backend).state("verl")).nbytes

    def set_lazy(self, lazy: bool) -> None:
        """Whether the next saves copy beside the next step."""
        self._saver._lazy = lazy and self._backend.deadline == "optimizer_step"

    def one_copy(self, numel: int) -> float:
        """Seconds of a single-thread copy of so many bytes, a rank's state, between two existing buffers."""
        source, target = np.ones(numel, np.uint8), np.ones(numel, np.uint8)
        began = time.perf_counter()
        target[:] = source
        return time.perf_counter() - began

    def save_with_verl(self, folder: str, fsync: bool = True) -> float:
        """verl's own save."""
        began = time.perf_counter()
        self.engine.save_checkpoint(folder, global_step=1)
        if fsync:
            _sync(Path(folder))
        return time.perf_counter() - began

    def save_inline(self, folder: str) -> float:
        """`torch.save` of the same state, with fsync."""
        began = time.perf_counter()
        for name, value in cast("Backend", self._backend).state("verl").items():
            torch.save(value, Path(folder) / name)
            _sync_file(Path(folder) / name)
        return time.perf_counter() - began

    def save_with_dcp(self, folder: str, kind: str) -> tuple[float, float]:
        """`dcp.async_save`: seconds until it returns, and until it is done."""
        began = time.perf_counter()
        self.begin_with_dcp(folder, kind)
        returned = time.perf_counter() - began
        self.end_with_dcp(LIMIT_S)
        return returned, time.perf_counter() - began

    def begin_with_dcp(self, folder: str, kind: str) -> None:
        """Return from `dcp.async_save`, in a process group of its own: training uses the default one meanwhile."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if not hasattr(self, "_dcp_group"):
            self._dcp_group = dist.new_group(backend="gloo")
        self._dcp: Any = dcp.async_save(
            cast("dict[str, Any]", cast("Backend", self._backend).state("dcp")["dcp"]),
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True),
            async_checkpointer_type=AsyncCheckpointerType(kind),
            process_group=self._dcp_group,
        )

    def end_with_dcp(self, timeout_s: float) -> bool:
        """Whether that save, which fsyncs, is done within so many seconds; raises what it failed of."""
        if timeout_s == 0 and not self._dcp.done():
            return False
        self._dcp.result(timeout=timeout_s)
        return True

    def run_on(self, cores: set[int]) -> None:
        """Of the machine's."""
        run_on(os.getpid(), cores)


def run_on(pid: int, cores: set[int]) -> None:
    """Have the threads that a process has now run on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # a thread that has just ended
            continue


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync_file(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
