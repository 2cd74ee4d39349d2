"""Checks the jobs of a sweep before the first one starts: their settings, and the folders that they would write. Also
reads the results of jobs that a Hydra launcher runs in other processes. `launch.app` calls it.
"""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.backends.platform import accelerator_count
from trinity_sync.config import anchored, check, check_inputs
from trinity_sync.config.saved_config import Trust, record_of
from trinity_sync.config.user_record import OF_SWEEP
from trinity_sync.errors import TrinityError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.interrupts import SAME_S, ending_signals, handling
from trinity_sync.host.urls import absolute, local_folder, shown
from trinity_sync.tracking.run_record import holds_run, lock_owner


@dataclass(frozen=True, kw_only=True)
class ComposedJob:
    """A job of a sweep: its overrides, and the composed configuration with Hydra's own settings."""

    number: int
    overrides: Sequence[str]
    cfg: DictConfig

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Within the block, ${hydra:...} and the environment are those of the job; yields the job's folder."""
        state = HydraConfig.instance()
        before = state.cfg
        with read_write(self.cfg.hydra), open_dict(self.cfg.hydra):
            self.cfg.hydra.job.id = self.cfg.hydra.job.num = self.number
        state.set_config(self.cfg)
        try:
            hydra: Any = HydraConfig.get()
            folder = Path(hydra.sweep.dir, str(hydra.sweep.subdir)).absolute()
            with read_write(hydra.runtime):
                hydra.runtime.output_dir = str(folder)
            with env_override(hydra.job.env_set):
                yield folder
        finally:
            state.cfg = before

    def settings(self) -> DictConfig:
        """Return the configuration without Hydra's own settings, as the job will get it."""
        settings = copy.deepcopy(self.cfg)
        with read_write(settings), open_dict(settings):
            del settings["hydra"]
        return settings


def sweep_problem(config: DictConfig, jobs: Sequence[ComposedJob]) -> str | None:
    """Say why a sweep cannot start; None: it can.

    A search (a sweeper that chooses values as it goes) has only its first job checked, without the chosen values, and
    only for its folder. Settings of jobs that may run on other machines are checked there.

    Raises:
        OmegaConfBaseException: the folder of a job cannot be resolved.
    """
    sweep, fixed = Path(config.hydra.sweep.dir).absolute(), _is(config.hydra.sweeper, BasicSweeper)
    # a search: two jobs with the known values, which show a shared place
    alike = jobs if fixed else [*jobs, *(replace(job, number=1) for job in jobs)]
    problem = _folder_problem(sweep, jobs) or _place_problem(alike, fixed=fixed) or _gpu_problem(config.hydra, jobs)
    if not fixed:
        return problem or _search_problem(sweep)
    return problem or (_settings_problem(jobs) if on_this_machine(config.hydra) else None)


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
            settings = anchored(job.settings(), Path(job.cfg.hydra.runtime.cwd))
            texts: Any = OmegaConf.to_container(settings.checkpoint, resolve=False)
            for name in ("dir", "mirror"):
                if not fixed and "${" in str(texts[name]):
                    continue  # the search may choose a value of it
                with suppress(OmegaConfBaseException):  # resolvable only where the job runs
                    place = settings.checkpoint[name]
                    if place is None and name == "dir":
                        place = folder / "checkpoints"
                    if place is None:
                        continue
                    local = local_folder(absolute(str(place)))
                    place = str(place).rstrip("/") if local is None else str(local.resolve())
                    if (first := seen.setdefault(place, job.number)) != job.number:
                        return (
                            f"jobs {first} and {job.number} of the sweep would both write to checkpoint.{name}="
                            f"{shown(place)}, so nothing was started; give each a place of its own, such as "
                            f"checkpoint.{name}=.../${{hydra:job.num}}"
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


def _gpu_problem(hydra: DictConfig, jobs: Sequence[ComposedJob]) -> str | None:
    shared = is_beside_others(hydra) and accelerator_count() > 0
    if shared and any(job.cfg.cluster.address is None for job in jobs):
        return (
            "jobs side by side would all take the same GPUs, each by a Ray of its own, so nothing was started; start "
            "one Ray for all (ray start --head) and give cluster=existing, or run them one after another "
            "(hydra/launcher=basic)"
        )
    return None


def _settings_problem(jobs: Sequence[ComposedJob]) -> str | None:
    tasks: dict[str, object] = {}  # reads each file of prompts once
    for job in jobs:
        settings = anchored(job.settings(), Path(job.cfg.hydra.runtime.cwd))
        with job.begun():
            try:
                check(settings)
                task = OmegaConf.to_yaml(settings.task, resolve=True)
                tasks[task] = check_inputs(settings, tasks.get(task))
            except TrinityError as error:
                given = " ".join(job.overrides)
                return f"job {job.number} of the sweep ({given}) cannot run, so nothing was started: {error}"
    return None


def for_each_job(jobs: Sequence[ComposedJob], do: Callable[[DictConfig, Path], object]) -> None:
    """Call a function with the settings and the folder of each job of a sweep."""
    for job in jobs:
        with job.begun() as folder:
            do(job.settings(), folder)


@contextmanager
def composed_before(hydra: DictConfig) -> Iterator[None]:
    """Within the block, keep Hydra's own sweeper from composing all jobs again: `sweep_problem` has done so."""
    validate = Sweeper.validate_batch_is_legal
    if _is(hydra.sweeper, BasicSweeper):
        Sweeper.validate_batch_is_legal = lambda self, batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = validate  # type: ignore[method-assign]


def note_settings(config: DictConfig, jobs: Sequence[ComposedJob]) -> None:
    """Save the settings of a sweep in its folder, which mark it as a sweep, if Hydra's sweeper does not. Record its
    jobs as this user's.
    """
    sweep = Path(config.hydra.sweep.dir)
    sweep.mkdir(parents=True, exist_ok=True)
    if not _is(config.hydra.sweeper, BasicSweeper):
        OmegaConf.save(config, sweep / "multirun.yaml")
        return
    trust = Trust(where=sweep, started_in=Path(config.hydra.runtime.cwd))
    if (text := record_of([job.cfg for job in jobs], config.hydra, trust, sweep=True)) is not None:
        replace_file(sweep / OF_SWEEP, text)


def split_jobs(hydra: DictConfig) -> list[list[str]] | None:
    """Return the overrides of each job of a sweep; None: its sweeper chooses values as it goes. Call it while Hydra is
    initialized.

    Raises:
        HydraException: an override cannot be parsed.
    """
    if not _is(hydra.sweeper, BasicSweeper):
        return None
    (jobs,) = BasicSweeper.split_arguments(_parsed(_texts(hydra)), None)
    return [list(job) for job in jobs]


def sweep_jobs(config: DictConfig) -> list[ComposedJob]:
    """Compose the jobs of a sweep; of a search only one, without the values that it chooses.

    Raises:
        HydraException: a job cannot be composed.
    """
    jobs = split_jobs(config.hydra)
    if jobs is None:
        texts = _texts(config.hydra)
        fixed = [text for text, one in zip(texts, _parsed(texts), strict=True) if not one.is_sweep_override()]
        jobs = [fixed]
    loader = GlobalHydra.instance().config_loader()
    return [
        ComposedJob(number=number, overrides=job, cfg=loader.load_sweep_config(config, job))
        for number, job in enumerate(jobs)
    ]


def _texts(hydra: DictConfig) -> list[str]:
    params = OmegaConf.to_container(hydra.sweeper, resolve=False).get("params") or {}  # type: ignore[union-attr]
    given = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return [*(f"{key}={value}" for key, value in params.items()), *map(str, given or ())]


def _parsed(texts: list[str]) -> list[Override]:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(texts)


def _is(plugin: DictConfig, kind: type) -> bool:
    return str(plugin._target_) == f"{kind.__module__}.{kind.__qualname__}"


# -- jobs in other processes: parallel on this machine (joblib), or in a queue (submitit)


HydraSettings = HydraConf | DictConfig

# prefixes of `_target_`
_BASIC = "hydra._internal.core_plugins.basic_launcher."
_JOBLIB = "hydra_plugins.hydra_joblib_launcher."
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher."
_SUBMITIT_LOCAL = f"{_SUBMITIT}submitit_launcher.LocalLauncher"
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper."

EXTRA = "launchers"
"""The extra of this package that installs them."""
OPTIONS = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/sweeper/optuna": "Optuna",
}
"""Options that need it, with the product that each needs."""

_FREE_S = 120.0
_POLL_S = 0.05


def in_this_process(hydra: HydraSettings) -> bool:
    """Return whether the jobs of a sweep run in this process, one after another."""
    return str(hydra.launcher._target_).startswith(_BASIC)


def on_this_machine(hydra: HydraSettings) -> bool:
    """Return whether all jobs of a sweep run on this machine, so that they see the same files."""
    return str(hydra.launcher._target_).startswith((_BASIC, _JOBLIB, _SUBMITIT_LOCAL))


def is_beside_others(hydra: HydraSettings) -> bool:
    """Return whether the jobs of a sweep run concurrently on this machine."""
    local = str(hydra.launcher._target_).startswith((_JOBLIB, _SUBMITIT_LOCAL))
    return local and hydra.launcher.get("n_jobs") != 1


def takes_no_nan(hydra: HydraSettings) -> bool:
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


def started_again(hydra: HydraSettings, folder: Path) -> bool:
    """Return whether a queue has restarted this job, so that the run in its folder is resumed. No other run can be
    there: a sweep into a folder with runs is refused.
    """
    return _in_queue() and str(hydra.launcher._target_).startswith(_SUBMITIT) and holds_run(folder)


def wait_until_free(folder: Path) -> None:
    """Wait up to two minutes for a run's lock. A queue restarts a job after its node failed, and a file server keeps
    that node's lock for some time.
    """
    deadline = time.monotonic() + _FREE_S
    while lock_owner(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def command_in_queue(hydra: HydraSettings) -> list[str]:
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
def beside_others(hydra: HydraSettings) -> Iterator[None]:
    """Around a job that shares its terminal with concurrent jobs: prefix its lines with its number, and leave Ctrl-C to
    the program that started it, see `jobs_end_first`.
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
def jobs_end_first(hydra: HydraSettings, limit_s: float) -> Iterator[None]:
    """Around a sweep: Ctrl-C, SIGTERM and SIGHUP first end its parallel jobs cleanly, then the sweep. joblib would kill
    the jobs and leave their processes behind.

    Args:
        limit_s: timeout for the jobs' end, seconds.
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
