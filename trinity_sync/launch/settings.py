"""The settings of a run, as Hydra saves those of a new one, and the record of this user: files in `.hydra/`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trinity_sync.config.recorded import FILE
from trinity_sync.config.saved import Trust, record_of
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import replace_file

FOLDER = ".hydra"
"""In the folder of a run."""


@contextmanager
def settings_files(
    run: Path, cfg: DictConfig, used: DictConfig, started_in: Path, *, saved_by_hydra: bool
) -> Iterator[None]:
    """Save what a resume of a run goes by: of a new run its record, of one that goes on its settings, too; those of
    before are put back where it turns out that it cannot begin.

    Args:
        run: its folder.
        cfg: as composed by the job that Hydra is in.
        used: the same with the places that the run uses.
        started_in: where the run was started first, from which its relative paths count.
        saved_by_hydra: whether Hydra has saved the settings of this start, as of a new run that it has composed.

    Raises:
        RunError: the disk refuses.
    """
    folder = run / FOLDER
    texts = _texts(run, cfg, used, started_in)
    if saved_by_hydra:  # but for hydra.output_subdir=null
        texts = {name: text for name, text in texts.items() if name == FILE and folder.is_dir()}
    before = {name: path.read_text("utf-8") if (path := folder / name).exists() else None for name in texts}
    _write(folder, texts)
    try:
        yield
    except ConfigError:
        if not saved_by_hydra:
            _write(folder, before)
        raise


def _texts(run: Path, cfg: DictConfig, used: DictConfig, started_in: Path) -> dict[str, str]:
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
    texts = {name: OmegaConf.to_yaml(part) for name, part in parts.items()}
    record = record_of([cfg, used], hydra.hydra, Trust(where=run, started_in=started_in))
    return texts if record is None else texts | {FILE: record}  # a key that cannot be read now leaves the one of before


def _write(folder: Path, texts: Mapping[str, str | None]) -> None:
    for name, text in texts.items():
        try:
            if text is not None:
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(folder / name, text)
            else:
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{folder / name} cannot be written: {error.strerror or error}") from error
