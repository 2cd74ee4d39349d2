"""Jobs of a sweep that a launcher of Hydra's runs in other processes: side by side on this machine (joblib), or where a
queue puts them (submitit). What they came to is read from their folders.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil
from hydra.conf import HydraConf
from omegaconf import DictConfig

from trinity_sync.host.interrupts import SAME_S, ending_signals, handling
from trinity_sync.tracking.run_folder import holds_run, lock_owner

HydraSettings = HydraConf | DictConfig

# Beginnings of the `_target_` of launchers and sweepers.
_BASIC = "hydra._internal.core_plugins.basic_launcher."
_JOBLIB = "hydra_plugins.hydra_joblib_launcher."
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher."
_SUBMITIT_LOCAL = f"{_SUBMITIT}submitit_launcher.LocalLauncher"
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper."

EXTRA = "launchers"
"""The extra of this package that brings them."""
OPTIONS = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/sweeper/optuna": "Optuna",
}
"""Options that are there only where it is installed, and what each needs."""

_FREE_S = 120.0
_POLL_S = 0.05


def in_this_process(hydra: HydraSettings) -> bool:
    """Whether the jobs of a sweep run here, one after another."""
    return str(hydra.launcher._target_).startswith(_BASIC)


def on_this_machine(hydra: HydraSettings) -> bool:
    """Whether the jobs of a sweep are known to run on this machine, so that they see the same files."""
    return str(hydra.launcher._target_).startswith((_BASIC, _JOBLIB, _SUBMITIT_LOCAL))


def is_beside_others(hydra: HydraSettings) -> bool:
    """Whether the jobs of a sweep run at the same time on this machine."""
    local = str(hydra.launcher._target_).startswith((_JOBLIB, _SUBMITIT_LOCAL))
    return local and hydra.launcher.get("n_jobs") != 1


def takes_no_nan(hydra: HydraSettings) -> bool:
    """Whether the sweeper ends where the objective of a job is NaN, but goes on where a job raises."""
    return str(hydra.sweeper._target_).startswith(_OPTUNA)


def codes_on_disk(sweep: Path) -> dict[Path, int]:
    """Exit codes of the jobs of a sweep, by their folders, from the files they left. Folders may be below each other,
    as those named by paths that are swept.
    """
    return {folder: _code(folder) for folder in job_folders(sweep)}


def job_folders(sweep: Path) -> list[Path]:
    """Where jobs of a sweep have begun, or runs are."""
    found = []
    for place, inner, files in os.walk(sweep):
        if Path(place) != sweep and (".hydra" in inner or "run.json" in files):
            found.append(Path(place))
            inner.clear()
        inner[:] = [name for name in inner if not name.startswith(".")]
    return sorted(found)


def _code(folder: Path) -> int:
    try:
        return 0 if json.loads((folder / "run.json").read_text())["status"] == "completed" else 1
    except FileNotFoundError:
        return 2
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def started_again(hydra: HydraSettings, folder: Path) -> bool:
    """Whether a queue has started this job once before, so that the run in its folder is to go on. No other run can be
    there: a sweep into a folder that has runs is refused.
    """
    return _in_queue() and str(hydra.launcher._target_).startswith(_SUBMITIT) and holds_run(folder)


def wait_until_free(folder: Path) -> None:
    """Wait until nobody works in the folder of a run, for two minutes at most. A queue starts a job again when its node
    has failed, whose lock a file server keeps for some time yet.
    """
    deadline = time.monotonic() + _FREE_S
    while lock_owner(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def command_in_queue(hydra: HydraSettings) -> list[str]:
    """The command line that is the job by itself, where a queue has started it by one of its own; else none."""
    return ["trinity-sync", "run", *map(str, hydra.overrides.task)] if _in_queue() else []


def has_completed(folder: Path) -> bool:
    """Whether the run in a folder has come to its end, as its record says."""
    return _code(folder) == 0


def is_of_queue(error: BaseException) -> bool:
    """Whether an error is how submitit ends a job that is out of time: queued again, or not."""
    return _in_queue() and (isinstance(error, SystemExit) or type(error).__module__.startswith("submitit."))


def _in_queue() -> bool:
    return "SUBMITIT_EXECUTOR" in os.environ


@contextmanager
def beside_others(hydra: HydraSettings) -> Iterator[None]:
    """Around a job: where others run at the same time on this terminal, each of its lines begins with its number, and
    it leaves Ctrl-C to the program that has started it, see `jobs_end_first`.
    """
    if multiprocessing.parent_process() is None or not str(hydra.launcher._target_).startswith(_JOBLIB):
        yield
        return
    group = os.getpgrp()
    os.setpgid(0, 0)
    try:
        with redirect_stdout(_Prefixed(f"job {hydra.job.num}  ", sys.stdout)):
            yield
    finally:
        os.setpgid(0, group)


class _Prefixed(io.TextIOBase):
    """Writes whole lines only, each after a prefix."""

    def __init__(self, prefix: str, out: TextIO) -> None:
        self._prefix = prefix
        self._out = out
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._out.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._out.flush()
        return len(text)


@contextmanager
def jobs_end_first(hydra: HydraSettings, limit_s: float) -> Iterator[None]:
    """Around a sweep: have Ctrl-C, SIGTERM and SIGHUP end jobs that run beside each other in good order, and then the
    sweep. joblib by itself kills them, and what they have started stays behind.

    Args:
        limit_s: for the jobs to end, seconds.
    """
    joblib = str(hydra.launcher._target_).startswith(_JOBLIB)
    if not joblib or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        told = time.monotonic()

        def again(signum: int, frame: FrameType | None) -> None:
            if time.monotonic() > told + SAME_S:  # a second one waits for nobody
                raise KeyboardInterrupt

        for number in signums:
            signal.signal(number, again)
        with suppress(OSError):
            print("note: ending the jobs", file=sys.stderr)
        _end_jobs(limit_s)
        raise KeyboardInterrupt

    signums = ending_signals()
    with handling(signums, end):
        yield


def _end_jobs(limit_s: float) -> None:
    told: set[psutil.Process] = set()
    deadline = time.monotonic() + limit_s
    while (running := set(_running())) and time.monotonic() < deadline:
        for process in running - told:  # one that ends well meanwhile makes room for the next
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        told |= running
        time.sleep(_POLL_S)


def _running() -> list[psutil.Process]:
    """Processes that are in a job, see `beside_others`."""
    found = []
    for process in psutil.Process().children():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == process.pid:
                found.append(process)
    return found
