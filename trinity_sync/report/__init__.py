"""The report of a run or of a sweep: one self-contained HTML page, and a table for the terminal.

Called by the recorder at the end of a run, by the sweep callback, and by `trinity-sync report`. It only reads what is
in the folder, so it works on a run that is still going on, one that died, and one that was copied from elsewhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from trinity_sync.report import run_page, sweep_page, terminal
from trinity_sync.report.data import Sweep, load
from trinity_sync.tracking.files import write_atomic

__all__ = ["render_table", "write_report"]


def write_report(path: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the folder of a run or of a sweep.

    Args:
        path: the folder.

    Returns:
        The page.

    Raises:
        ConfigError: the folder holds neither a run nor a sweep.
        RunError: the disk refuses the page.
    """
    found = load(Path(path))
    page = sweep_page.render(found, time.time()) if isinstance(found, Sweep) else run_page.render(found, time.time())
    target = found.path / "report.html"
    write_atomic(target, page.encode())
    return target


def render_table(path: str | os.PathLike[str], width: int | None = None) -> str:
    """Render the main figures of a run, or one row per run of a sweep, as plain text.

    Args:
        path: the folder of the run or sweep.
        width: columns; those of the terminal by default.

    Raises:
        ConfigError: the folder has neither a run nor a sweep.
    """
    return terminal.render(load(Path(path)), width)
