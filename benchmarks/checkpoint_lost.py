"""The training time that one save costs, all in: of steps with a save, until it is on the disk, the time that the same
number of steps takes without. For `checkpoint.py --lost`.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from checkpoint_worker import LIMIT_S

from trinity_sync.actors.calls import ended

if TYPE_CHECKING:
    from checkpoint import BenchJob

_STEPS = 2
"""With a save, at least; each time as many without come before."""


def lost(job: BenchJob) -> dict[str, float]:
    """One round: each way to save in turn, after steps without a save.

    Returns:
        ``step_s`` and for each way the seconds of training lost, of steps with it, and their number.
    """
    found: dict[str, float] = {}
    alone: list[float] = []
    for name, save in _ways(job).items():
        before = [job._train() for _ in range(_STEPS)]
        alone += before
        began = time.perf_counter()
        is_durable, clean_up = save()
        steps = 0
        while steps < _STEPS or not is_durable():
            job._train()
            steps += 1
        seconds = time.perf_counter() - began
        clean_up()
        found[f"{name}/with_save_s"], found[f"{name}/steps"] = seconds, steps
        found[f"{name}/lost_s"] = seconds - steps * statistics.mean(before)
        told = ", ".join(f"{one:.2f}" for one in before)
        print(f"{name}: {seconds:.2f} s for {steps} steps, alone {told}", file=sys.stderr)
    return {"step_s": statistics.median(alone), **found}


_Begun = tuple[Callable[[], bool], Callable[[], object]]
"""What tells whether a save is on the disk, and what ends it."""
_Save = Callable[[], _Begun]
"""Begins a save."""


def _ways(job: BenchJob) -> dict[str, _Save]:
    def ours() -> _Begun:
        step = job._step
        job._call("save", step, job._begin())
        committed = job.actors.monitor.wait_committed(step, 0, LIMIT_S, kind="full")
        return lambda: bool(ended([committed])), lambda: committed.result(LIMIT_S)

    def verls(fsync: bool) -> _Save:
        def save() -> _Begun:
            folder = job.place / "verl"
            folder.mkdir()
            job._call("save_with_verl", str(folder), fsync)
            return lambda: True, lambda: shutil.rmtree(folder)

        return save

    def dcps() -> _Begun:
        folder = job.place / "dcp"
        folder.mkdir()
        job._call("begin_with_dcp", str(folder), "thread")
        return lambda: all(job._call("end_with_dcp", 0.0)), lambda: shutil.rmtree(folder)

    ways = {"ours": ours, "verl": verls(True), "verl_without_fsync": verls(False)}
    return ways if job._writes_itself else {**ways, "dcp_async": dcps}
