"""The report of a run or of a sweep: an HTML page in one file, a table, JSON, and a trace of the run.

The recorder calls it at the end of a run, and so do the sweep callback and `trinity-sync report`. It only reads the
folder, so it also works on a run that is running, that was killed, or that was copied from another machine.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.report import run_page, sweep_page, terminal_tables, timeline
from trinity_sync.report.run_data import Run, Sweep, load
from trinity_sync.tracking.json_lines import plain, write_atomic

__all__ = ["load", "render_json", "render_table", "write_report", "write_trace"]


def write_report(folder: str | os.PathLike[str] | Run | Sweep) -> Path:
    """Write `report.html` into the folder of a run or of a sweep.

    Args:
        folder: the folder, or what `load` read from it.

    Returns:
        The page.

    Raises:
        ConfigError: the folder holds neither a run nor a sweep.
        RunError: the disk refuses the page.
    """
    found = _read(folder)
    page = sweep_page.render(found, time.time()) if isinstance(found, Sweep) else run_page.render(found, time.time())
    target = found.path / "report.html"
    write_atomic(target, page.encode(errors="backslashreplace"))
    return target


def render_table(folder: str | os.PathLike[str] | Run | Sweep, width: int | None = None) -> str:
    """Render the main figures of a run, or the comparison of a sweep, as plain text.

    Args:
        folder: the folder of the run or sweep, or what `load` read from it.
        width: columns; those of the terminal by default.

    Raises:
        ConfigError: the folder has neither a run nor a sweep.
    """
    return terminal_tables.render(_read(folder), width)


def render_json(folder: str | os.PathLike[str] | Run | Sweep) -> str:
    """Render the summary of a run, or the comparison of a sweep, as indented JSON. `folder`: the folder of the run or
    sweep, or what `load` read from it. Raises ConfigError if the folder has neither a run nor a sweep.
    """
    return json.dumps(plain(terminal_tables.to_json(_read(folder))), indent=2, ensure_ascii=False, allow_nan=False)


def write_trace(run: Run, target: Path | None = None) -> Path:
    """Write the timeline of a run as a trace for Perfetto and chrome://tracing.

    Args:
        run: the run, from `load`.
        target: the file; `trace.json` in the run's folder by default.

    Returns:
        The file.

    Raises:
        ConfigError: the target cannot be a file.
        RunError: the disk refuses.
    """
    target = target or run.path / "trace.json"
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"cannot be written: {target.parent} is not a folder"
        raise ConfigError(f"{target} {what}; name a file in an existing folder")
    write_atomic(target, timeline.trace_document(run))
    return target


def _read(folder: str | os.PathLike[str] | Run | Sweep) -> Run | Sweep:
    return folder if isinstance(folder, Run | Sweep) else load(Path(folder))
