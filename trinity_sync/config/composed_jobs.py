"""The jobs of a sweep, composed before the first one starts, and the record of their settings. `launch.app` and the
resume of a sweep call it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from hydra import initialize_config_dir
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

from trinity_sync.config.comparison import RunConfig
from trinity_sync.config.composition import as_written, conf_dir, override_texts, section
from trinity_sync.config.invocation import Invocation
from trinity_sync.config.saved_config import Trust, record_of
from trinity_sync.config.user_record import OF_SWEEP
from trinity_sync.host.durable import replace_file
from trinity_sync.host.process import replaced
from trinity_sync.host.references import Settings


@dataclass(frozen=True, kw_only=True)
class ComposedJob:
    """A job of a sweep: its overrides, and the composed configuration with Hydra's own settings."""

    number: int
    overrides: Sequence[str]
    cfg: DictConfig

    @property
    def started_in(self) -> Path:
        """The folder from which relative paths count."""
        return Path(self.cfg.hydra.runtime.cwd)

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Within the block, ${hydra:...} and the environment are those of the job; yields the job's folder."""
        state = HydraConfig.instance()
        before = state.cfg
        with read_write(self.cfg.hydra), open_dict(self.cfg.hydra):
            self.cfg.hydra.job.id = self.cfg.hydra.job.num = self.number
        state.set_config(self.cfg)
        try:
            hydra = cast(DictConfig, HydraConfig.get())
            folder = Path(hydra.sweep.dir, str(hydra.sweep.subdir)).absolute()
            with read_write(hydra.runtime):
                hydra.runtime.output_dir = str(folder)
            with env_override(hydra.job.env_set):
                yield folder
        finally:
            state.cfg = before

    @cached_property
    def settings(self) -> RunConfig:
        """The configuration without Hydra's own settings, as the job will get it."""
        settings = copy.deepcopy(self.cfg)
        with read_write(settings), open_dict(settings):
            del settings["hydra"]
        return RunConfig(settings)


def is_fixed(hydra: HydraConf | DictConfig) -> bool:
    """Return whether a sweep's jobs are known before it starts; else its sweeper chooses values as it goes."""
    return str(hydra.sweeper._target_) == f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"


def composed_before(hydra: DictConfig) -> AbstractContextManager[None]:
    """Within the block, keep Hydra's own sweeper from composing all jobs again: `sweep_problem` has done so."""
    return replaced(Sweeper, validate_batch_is_legal=lambda self, batch: None) if is_fixed(hydra) else nullcontext()


def note_settings(config: DictConfig, jobs: Sequence[ComposedJob]) -> None:
    """Save the settings of a sweep in its folder, which mark it as a sweep, if Hydra's sweeper does not. Record its
    jobs as this user's.
    """
    sweep = Path(config.hydra.sweep.dir)
    sweep.mkdir(parents=True, exist_ok=True)
    if not is_fixed(config.hydra):
        OmegaConf.save(config, sweep / "multirun.yaml")
        return
    trust = Trust(where=sweep, started_in=Path(config.hydra.runtime.cwd))
    if (text := record_of([job.cfg for job in jobs], config.hydra, trust, sweep=True)) is not None:
        replace_file(sweep / OF_SWEEP, text)


def split_jobs(hydra: DictConfig) -> list[list[str]] | None:
    """Return the overrides of each job of a sweep; None: its sweeper chooses values as it goes. Call it while Hydra is
    initialized. Raises HydraException: an override cannot be parsed.
    """
    if not is_fixed(hydra):
        return None
    (jobs,) = BasicSweeper.split_arguments(_parsed(_texts(hydra)), None)
    return [list(job) for job in jobs]


def sweep_jobs(config: DictConfig) -> list[ComposedJob]:
    """Compose the jobs of a sweep; of a search only one, without the values that it chooses. Raises HydraException: a
    job cannot be composed.
    """
    jobs = split_jobs(config.hydra)
    if jobs is None:
        texts = _texts(config.hydra)
        fixed = [text for text, one in zip(texts, _parsed(texts), strict=True) if not one.is_sweep_override()]
        jobs = [fixed]
    loader = GlobalHydra.instance().config_loader()
    with suppress(OmegaConfBaseException):  # resolvable only where the jobs run
        OmegaConf.select(config, "hydra.sweep.dir")  # once, before the jobs, which may have names of their own
    return [
        ComposedJob(number=number, overrides=job, cfg=loader.load_sweep_config(config, job))
        for number, job in enumerate(jobs)
    ]


def _texts(hydra: DictConfig) -> list[str]:
    params = section(cast("Settings", as_written(hydra.sweeper)), "params")
    return [*(f"{key}={value}" for key, value in params.items()), *override_texts(hydra)]


def _parsed(texts: list[str]) -> list[Override]:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(texts)


def saved_jobs(settings: Path) -> tuple[list[Invocation] | None, bool]:
    """Read the jobs of a sweep from its `multirun.yaml`; None: it is a search. Also return whether its jobs have
    folders of their own.
    """
    hydra = OmegaConf.load(settings).hydra
    own_folders = section(cast("Settings", as_written(hydra)), "sweep")["subdir"] != "${hydra.job.num}"
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        jobs = split_jobs(hydra)
    found = None if jobs is None else [Invocation.of_hydra(hydra, job, settings.parent) for job in jobs]
    return found, own_folders
