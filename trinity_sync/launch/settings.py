"""The settings with which a run goes on, as Hydra saves those of a new one: three files in `.hydra/`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import replace_file

FOLDER = ".hydra"
"""In the folder of a run."""


@contextmanager
def changed_settings(run: Path, cfg: DictConfig, started_in: Path) -> Iterator[None]:
    """Save the settings of a run that goes on; those of before are put back where it turns out that it cannot.

    Args:
        run: its folder.
        cfg: as composed by the job that Hydra is in.
        started_in: where the run was started first, from which its relative paths count.

    Raises:
        RunError: the disk refuses.
    """
    folder = run / FOLDER
    texts = _texts(cfg, started_in)
    before = {name: (folder / name).read_text("utf-8") for name in texts}
    _write(folder, texts)
    try:
        yield
    except ConfigError:
        _write(folder, before)
        raise


def _texts(cfg: DictConfig, started_in: Path) -> dict[str, str]:
    """The files by name. What a resume goes by stands before the configuration that it compares with: should only some
    be written, the next one shows what has changed.
    """
    hydra = copy.deepcopy(HydraConfig.instance().cfg)
    assert isinstance(hydra, DictConfig)
    OmegaConf.set_readonly(hydra.hydra, False)
    hydra.hydra.output_subdir = FOLDER
    hydra.hydra.runtime.cwd = str(started_in)
    OmegaConf.set_readonly(hydra.hydra, True)
    parts = {"hydra.yaml": hydra, "overrides.yaml": hydra.hydra.overrides.task, "config.yaml": cfg}
    return {name: OmegaConf.to_yaml(part) for name, part in parts.items()}


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        try:
            replace_file(folder / name, text)
        except OSError as error:
            raise RunError(f"{folder / name} cannot be written: {error.strerror or error}") from error
