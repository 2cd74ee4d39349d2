"""Checks the jobs of a sweep before the first one starts: their settings, and the folders that they would write. Also
reads the results of jobs that a Hydra launcher runs in other processes. `launch.app` calls it.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil
from hydra.conf import HydraConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.backends.option import accelerator_count
from trinity_sync.config.composed_jobs import ComposedJob, is_fixed
from trinity_sync.config.composition import section
from trinity_sync.errors import TrinityError
from trinity_sync.host.interrupts import SAME_S, ending_signals, handling
from trinity_sync.host.threads import comes_true
from trinity_sync.host.urls import absolute, local_folder, shown
from trinity_sync.tracking.run_record import holds_run, lock_owner


def sweep_problem(hydra: HydraConf, jobs: Sequence[ComposedJob]) -> str | None:
    """Say why a sweep cannot start; None: it can.

    A search (a sweeper that chooses values as it goes) has only its first job checked, without the chosen values, and
    only for its folder. Settings of jobs that may run on other machines are checked there. Raises
    OmegaConfBaseException: the folder of a job cannot be resolved.
    """
    sweep, fixed = Path(hydra.sweep.dir).absolute(), is_fixed(hydra)
    # a search: two jobs with the known values, which show a shared place
    alike = jobs if fixed else [*jobs, *(replace(job, number=1) for job in jobs)]
    problem = _folder_problem(sweep, jobs) or _place_problem(alike, fixed=fixed) or _gpu_problem(hydra, jobs)
    if not fixed:
        return problem or _search_problem(sweep)
    return problem or (_settings_problem(jobs) if on_this_machine(hydra) else None)


def _folder_problem(sweep: Path, jobs: Sequence[ComposedJob]) -> str | None:
    folders: list[Path] = []
    for job in jobs:
        with job.begun() as folder:
            folders.append(folder)
    for folder in (sweep, *folders):
        if owner := lock_owner(folder):
            return f"{folder} is in use by {owner}, so nothing was started; choose another folder by hydra.sweep.dir"
        if holds_run(folder):
            return (
                f"{folder} already holds a run, so nothing was started; go on with that run by "
                f"`trinity-sync resume {folder}`, or choose another folder by hydra.sweep.dir"
            )
    for number, folder in enumerate(folders):
        if (first := folders.index(folder)) < number:
            return (
                f"jobs {first} and {number} of the sweep would both write into {folder}, so nothing was started; give "
                "each a folder of its own by hydra.sweep.subdir"
            )
    return None


def _place_problem(jobs: Sequence[ComposedJob], *, fixed: bool) -> str | None:
    """Name a place that two jobs would both write."""
    seen: dict[str, int] = {}
    for job in jobs:
        with job.begun() as folder:
            settings = job.settings.anchored(job.started_in)
            texts = settings.written()
            for key in ("checkpoint.dir", "checkpoint.mirror", "sync.store"):
                group, _, name = key.partition(".")
                if not fixed and "${" in str(section(texts, group)[name]):
                    continue  # the search may choose a value of it
                with suppress(OmegaConfBaseException):  # resolvable only where the job runs
                    place = settings.select(key)
                    if place is None and name == "dir":
                        place = folder / "checkpoints"
                    if place is None:
                        continue
                    local = local_folder(absolute(str(place)))
                    place = str(place).rstrip("/") if local is None else str(local.resolve())
                    if (first := seen.setdefault(place, job.number)) != job.number:
                        return (
                            f"jobs {first} and {job.number} of the sweep would both write to {key}="
                            f"{shown(place)}, so nothing was started; give each a place of its own, such as "
                            f"{key}=.../${{hydra:job.num}}"
                        )
    return None


def _search_problem(sweep: Path) -> str | None:
    """Refuse a search into a folder with runs: its jobs' folders are unknown, and a job whose folder has a run counts
    as restarted by a queue.
    """
    for folder in job_folders(sweep):
        if holds_run(folder):
            return (
                f"{folder} already holds a run, so nothing was started: a search needs a folder of its own; choose "
                "another one by hydra.sweep.dir"
            )
    return None


def _gpu_problem(hydra: HydraConf, jobs: Sequence[ComposedJob]) -> str | None:
    shared = is_beside_others(hydra) and accelerator_count() > 0
    if shared and any(job.settings.select("cluster.address") is None for job in jobs):
        return (
            "jobs side by side would all take the same GPUs, each by a Ray of its own, so nothing was started; start "
            "one Ray for all (ray start --head) and give cluster=existing, or run them one after another "
            "(hydra/launcher=basic)"
        )
    return None


def _settings_problem(jobs: Sequence[ComposedJob]) -> str | None:
    tasks: dict[str, object] = {}  # reads each file of prompts once
    for job in jobs:
        settings = job.settings.anchored(job.started_in)
        with job.begun():
            try:
                settings.check(tasks)
            except TrinityError as error:
                given = " ".join(job.overrides)
                return f"job {job.number} of the sweep ({given}) cannot run, so nothing was started: {error}"
    return None


# -- jobs in other processes: parallel on this machine (joblib), or in a queue (submitit)


# prefixes of `_target_`
_BASIC = "hydra._internal.core_plugins.basic_launcher."
_JOBLIB = "hydra_plugins.hydra_joblib_launcher."
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher."
_SUBMITIT_LOCAL = f"{_SUBMITIT}submitit_launcher.LocalLauncher"
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper."

_FREE_S = 120.0
_POLL_S = 0.05


def in_this_process(hydra: HydraConf) -> bool:
    """Return whether the jobs of a sweep run in this process, one after another."""
    return str(hydra.launcher._target_).startswith(_BASIC)


def on_this_machine(hydra: HydraConf) -> bool:
    """Return whether all jobs of a sweep run on this machine, so that they see the same files."""
    return str(hydra.launcher._target_).startswith((_BASIC, _JOBLIB, _SUBMITIT_LOCAL))


def is_beside_others(hydra: HydraConf) -> bool:
    """Return whether the jobs of a sweep run concurrently on this machine."""
    local = str(hydra.launcher._target_).startswith((_JOBLIB, _SUBMITIT_LOCAL))
    return local and hydra.launcher.get("n_jobs") != 1


def takes_no_nan(hydra: HydraConf) -> bool:
    """Return whether the sweeper stops at a NaN objective, but continues after a job that raises."""
    return str(hydra.sweeper._target_).startswith(_OPTUNA)


def codes_on_disk(sweep: Path) -> dict[Path, int]:
    """Return the exit codes of a sweep's jobs by folder, from their files. Swept paths may nest folders."""
    return {folder: _code(folder) for folder in job_folders(sweep)}


def job_folders(sweep: Path) -> list[Path]:
    """Return the folders in which jobs of a sweep have started."""
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


def started_again(hydra: HydraConf, folder: Path) -> bool:
    """Return whether a queue has restarted this job, so that the run in its folder is resumed. No other run can be
    there: a sweep into a folder with runs is refused.
    """
    return _in_queue() and str(hydra.launcher._target_).startswith(_SUBMITIT) and holds_run(folder)


def wait_until_free(folder: Path) -> None:
    """Wait up to two minutes for a run's lock. A queue restarts a job after its node failed, and a file server keeps
    that node's lock for some time.
    """
    comes_true(lambda: not lock_owner(folder), _FREE_S, _POLL_S)


def command_in_queue(hydra: HydraConf) -> list[str]:
    """Return the command line of the job itself if a queue has started it by a command of its own."""
    return ["trinity-sync", "run", *map(str, hydra.overrides.task)] if _in_queue() else []


def has_completed(folder: Path) -> bool:
    """Return whether the record of the run in a folder says that it completed."""
    return _code(folder) == 0


def is_of_queue(error: BaseException) -> bool:
    """Return whether submitit ends a job this way that is out of time."""
    return _in_queue() and (isinstance(error, SystemExit) or type(error).__module__.startswith("submitit."))


def _in_queue() -> bool:
    return "SUBMITIT_EXECUTOR" in os.environ


@contextmanager
def beside_others(hydra: HydraConf) -> Iterator[None]:
    """Around a job that shares its terminal with concurrent jobs: prefix its lines with its number, and leave Ctrl-C to
    the program that started it, see `jobs_end_first`.
    """
    if multiprocessing.parent_process() is None or not str(hydra.launcher._target_).startswith(_JOBLIB):
        yield
        return
    group = os.getpgrp()
    os.setpgid(0, 0)
    try:
        with redirect_stdout(_PrefixWriter(f"job {hydra.job.num}  ", sys.stdout)):
            yield
    finally:
        os.setpgid(0, group)


class _PrefixWriter(io.TextIOBase):
    """Writes whole lines, each with a prefix."""

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
def jobs_end_first(hydra: HydraConf, limit_s: float) -> Iterator[None]:
    """Around a sweep: Ctrl-C, SIGTERM and SIGHUP first end its parallel jobs cleanly, then the sweep. joblib would kill
    the jobs and leave their processes behind. `limit_s`: timeout for the jobs' end, seconds.
    """
    joblib = str(hydra.launcher._target_).startswith(_JOBLIB)
    if not joblib or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        told = time.monotonic()

        def again(signum: int, frame: FrameType | None) -> None:
            if time.monotonic() > told + SAME_S:  # a second signal ends at once
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
        for process in running - told:  # a job that ends makes room for the next
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        told |= running
        time.sleep(_POLL_S)


def _running() -> list[psutil.Process]:
    """Return the processes that run a job, see `beside_others`."""
    found = []
    for process in psutil.Process().children():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == process.pid:
                found.append(process)
    return found
