"""Into which folders the jobs of a sweep will write: Hydra would not ask whether something is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_sync.tracking.run_folder import holds_run, lock_owner


def folder_problem(config: DictConfig) -> str | None:
    """Say why a sweep cannot have the folders of its jobs; None: it can.

    Of a sweeper that chooses values as it goes only the first job is looked at, and with none of those values.

    Args:
        config: of the sweep, as Hydra's callbacks are given it.

    Raises:
        HydraException: a job cannot be composed.
        OmegaConfBaseException: its folder cannot be named.
    """
    folders = _job_folders(config)
    for folder in (Path(config.hydra.sweep.dir).absolute(), *folders):
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


def _job_folders(config: DictConfig) -> list[Path]:
    loader = GlobalHydra.instance().config_loader()
    sweeper: Any = OmegaConf.to_container(config.hydra.sweeper)
    given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    texts = [*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *given]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(texts)
    if sweeper["_target_"] == f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}":
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
    else:
        jobs = [[text for text, one in zip(texts, overrides, strict=True) if not one.is_sweep_override()]]
    return [_folder(loader.load_sweep_config(config, job), number) for number, job in enumerate(jobs)]


def _folder(cfg: DictConfig, number: int) -> Path:
    with open_dict(cfg):
        cfg.hydra.job.id = cfg.hydra.job.num = number
    state = HydraConfig.instance()
    before = state.cfg
    state.set_config(cfg)  # what is written as ${hydra:...} looks there
    try:
        return Path(cfg.hydra.sweep.dir, str(cfg.hydra.sweep.subdir)).absolute()
    finally:
        state.cfg = before
