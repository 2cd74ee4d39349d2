"""A run of a configuration that Hydra's `PickleJobInfoCallback` has pickled, by Hydra's ``--experimental-rerun FILE``.

Hydra reads the file and calls the job. It calls no callback then, writes none of its own files, and leaves the folder
as it was pickled: that of the first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from hydra.types import RunMode
from omegaconf import open_dict, read_write

from trinity_sync.tracking.run_folder import holds_run


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Return whether a command line of Hydra's asks for one."""
    return get_args_parser().parse_known_args(list(arguments))[0].experimental_rerun is not None


def take_free_folder() -> None:
    """Have the job that Hydra is in be a run of its own, in a folder without one: where the first run was to be, else
    ``NAME-rerun`` beside it (``-rerun-2``, ...). A job of a sweep goes beside the sweep. The folder is not made.
    """
    whole = HydraConfig.get()._get_parent()  # type: ignore[attr-defined]
    hydra = whole.hydra
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode == RunMode.MULTIRUN:
        sweep = folder.parents[len(Path(hydra.sweep.subdir).parts) - 1]
        folder = sweep.with_name(f"{sweep.name}-{hydra.job.num}")
    tried = folder
    for number in count(1):
        if not holds_run(tried):
            break
        tried = folder.with_name(f"{folder.name}-rerun{f'-{number}' if number > 1 else ''}")
    with read_write(hydra), open_dict(hydra):
        hydra.mode = RunMode.RUN
        hydra.run.dir = hydra.runtime.output_dir = str(tried)
    HydraConfig.instance().set_config(whole)
    configure_log(hydra.job_logging, hydra.verbose)
