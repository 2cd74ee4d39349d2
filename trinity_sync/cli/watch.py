"""The command `trinity-sync watch`: shows a run or a sweep while it runs, from another terminal. It only reads."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path

from trinity_sync.cli.listing import runs_below
from trinity_sync.errors import ConfigError

_INTERRUPTED = 130


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `trinity-sync`."""
    watch = commands.add_parser(
        "watch",
        help="show a run or a sweep live, until it ends; exit 1 if it did not complete",
    )
    watch.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="of the run or of the sweep (default: the newest here)",
    )
    watch.add_argument("--once", action="store_true", help="show it as it stands now, and end; exit 1 where it failed")
    watch.add_argument(
        "--wait",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for a run to begin, or for the next job of a sweep (default: 60)",
    )
    watch.set_defaults(command=_watch)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e9:
        raise ValueError(text)
    return value


def _watch(options: argparse.Namespace) -> int:
    from trinity_sync.report.run_data import is_run
    from trinity_sync.tracking.live import LiveView

    folder = options.folder.absolute() if options.folder is not None else _newest()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder of a run or of a sweep")
    if is_run(folder):
        from trinity_sync.cli.watchers import watch_run as watch
    else:
        from trinity_sync.cli.watchers import watch_sweep as watch
    logging.getLogger("trinity_sync").addHandler(logging.NullHandler())  # the watcher reports the view's errors
    view = LiveView("off" if options.once else "auto")
    try:
        with contextlib.closing(view):
            return watch(folder, view, once=options.once, wait_s=options.wait)
    except KeyboardInterrupt:
        print("no longer watched; the run or sweep continues", file=sys.stderr)
        return _INTERRUPTED


def _newest() -> Path:
    """Return the running or else the newest run or sweep here."""
    lines = runs_below(None)
    if not lines:
        raise ConfigError(f"there are no runs in {Path.cwd()}; name the folder of a run or of a sweep")
    running = [line for line in lines if line.running]
    return (running or lines)[-1].path
