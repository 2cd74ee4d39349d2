"""What is wrong with the jobs of a sweep, found before the first one runs: with their settings, and with the folders
they would write into, about which Hydra would not ask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
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
from trinity_sync.config.recorded import OF_SWEEP
from trinity_sync.config.saved import Trust, record_of
from trinity_sync.errors import TrinityError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.urls import absolute, local_folder, shown
from trinity_sync.launch import elsewhere
from trinity_sync.tracking.run_folder import holds_run, lock_owner


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sweep: its overrides, and what they come to, with Hydra's own settings."""

    number: int
    overrides: Sequence[str]
    cfg: DictConfig

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Inside, ${hydra:...} and the environment are those of the job, whose folder this gives."""
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
        """What they come to without Hydra's own settings, as the job will see it."""
        settings = copy.deepcopy(self.cfg)
        with read_write(settings), open_dict(settings):
            del settings["hydra"]
        return settings


def sweep_problem(config: DictConfig, jobs: Sequence[Job]) -> str | None:
    """Say why a sweep cannot begin; None: it can.

    Of a sweeper that chooses values as it goes only the first job is looked at, with none of those values, and only for
    its folder. Settings of jobs that may run on other machines are left to them.

    Args:
        config: of the sweep, as Hydra's callbacks are given it.
        jobs: its `sweep_jobs`.

    Raises:
        OmegaConfBaseException: the folder of a job cannot be named.
    """
    sweep, fixed = Path(config.hydra.sweep.dir).absolute(), _is(config.hydra.sweeper, BasicSweeper)
    # Of a search, two jobs with the values that are known: where those name a place they share it.
    alike = jobs if fixed else [*jobs, *(replace(job, number=1) for job in jobs)]
    problem = _folder_problem(sweep, jobs) or _place_problem(alike, fixed=fixed) or _gpu_problem(config.hydra, jobs)
    if not fixed:
        return problem or _search_problem(sweep)
    return problem or (_settings_problem(jobs) if elsewhere.on_this_machine(config.hydra) else None)


def _folder_problem(sweep: Path, jobs: Sequence[Job]) -> str | None:
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


def _place_problem(jobs: Sequence[Job], *, fixed: bool) -> str | None:
    """Name a place that two jobs would both write, outside of their folders or in those of others."""
    seen: dict[str, int] = {}
    for job in jobs:
        with job.begun() as folder:
            settings = anchored(job.settings(), Path(job.cfg.hydra.runtime.cwd))
            texts: Any = OmegaConf.to_container(settings.checkpoint, resolve=False)
            for name in ("dir", "mirror"):
                if not fixed and "${" in str(texts[name]):
                    continue  # a value that the search chooses may be in it
                with suppress(OmegaConfBaseException):  # it can be named only where the job will run
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
    """Of whose jobs the folders are not known before they begin: none may be that of a run already, for which a job
    would be taken that a queue has started again.
    """
    for folder in elsewhere.job_folders(sweep):
        if holds_run(folder):
            return (
                f"{folder} already holds a run, so nothing was started: a search needs a folder of its own; choose "
                "another one by hydra.sweep.dir"
            )
    return None


def _gpu_problem(hydra: DictConfig, jobs: Sequence[Job]) -> str | None:
    shared = elsewhere.is_beside_others(hydra) and accelerator_count() > 0
    if shared and any(job.cfg.cluster.address is None for job in jobs):
        return (
            "jobs side by side would all take the same GPUs, each by a Ray of its own, so nothing was started; start "
            "one Ray for all (ray start --head) and give cluster=existing, or run them one after another "
            "(hydra/launcher=basic)"
        )
    return None


def _settings_problem(jobs: Sequence[Job]) -> str | None:
    tasks: dict[str, object] = {}  # so that a file of prompts is read once
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


def for_each_job(jobs: Sequence[Job], do: Callable[[DictConfig, Path], object]) -> None:
    """Do something with the settings and the folder of each job of a sweep."""
    for job in jobs:
        with job.begun() as folder:
            do(job.settings(), folder)


@contextmanager
def composed_before(hydra: DictConfig) -> Iterator[None]:
    """Inside, Hydra's own sweeper does not compose each job once more before the first one begins, to see whether that
    can be done: `sweep_problem` has.

    Args:
        hydra: Hydra's own settings, of the sweep.
    """
    validate = Sweeper.validate_batch_is_legal
    if _is(hydra.sweeper, BasicSweeper):
        Sweeper.validate_batch_is_legal = lambda self, batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = validate  # type: ignore[method-assign]


def note_settings(config: DictConfig, jobs: Sequence[Job]) -> None:
    """Save the settings of a sweep in its folder, as Hydra's own sweeper does, for those that do not: by them a sweep
    is known for one. Its jobs are recorded as those of this user.
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
    """Work out the overrides of each job of a sweep; None: its sweeper chooses values as it goes.

    Args:
        hydra: Hydra's own settings, of the sweep. To be called where Hydra is initialized.

    Raises:
        HydraException: an override cannot be parsed.
    """
    if not _is(hydra.sweeper, BasicSweeper):
        return None
    (jobs,) = BasicSweeper.split_arguments(_parsed(_texts(hydra)), None)
    return [list(job) for job in jobs]


def sweep_jobs(config: DictConfig) -> list[Job]:
    """Compose the jobs of a sweep; of a search one only, with none of the values that it chooses.

    Args:
        config: of the sweep, as Hydra's callbacks are given it.

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
        Job(number=number, overrides=job, cfg=loader.load_sweep_config(config, job)) for number, job in enumerate(jobs)
    ]


def _texts(hydra: DictConfig) -> list[str]:
    params = OmegaConf.to_container(hydra.sweeper, resolve=False).get("params") or {}  # type: ignore[union-attr]
    given = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return [*(f"{key}={value}" for key, value in params.items()), *map(str, given or ())]


def _parsed(texts: list[str]) -> list[Override]:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(texts)


def _is(plugin: DictConfig, kind: type) -> bool:
    return str(plugin._target_) == f"{kind.__module__}.{kind.__qualname__}"
