"""The commands `list`, all runs and sweeps below a folder, one line each, and `watch`, one of them while it runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.errors import ConfigError
from trinity_sync.host.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

    from trinity_sync.report.run_page import RunLine, SweepLine

_STATUS = 3
_STYLES = {"failed": "red", "unreadable": "red", "interrupted": "yellow", "running": "cyan", "completed": "green"}
_HEAD = ("folder", "task", "model", "status", "steps", "reward", "wall")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser of `trinity-sync`."""
    listing = commands.add_parser("list", help="list all runs and sweeps below a folder, the newest last")
    listing.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="the folder (default: outputs and multirun, here)"
    )
    listing.add_argument(
        "--jobs", action="store_true", help="also list the jobs of sweeps, with the settings in which they differ"
    )
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    listing.set_defaults(command=_list)
    watch = commands.add_parser(
        "watch", help="show a run or a sweep live, until it ends; exit 1 if it did not complete"
    )
    watch.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="of the run or of the sweep (default: the newest here)"
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


def _list(options: argparse.Namespace) -> int:
    from trinity_sync.cli.tables import print_json
    from trinity_sync.report.run_page import SweepLine

    lines = runs_below(options.folder)
    if options.json:
        return print_json([_as_json(line) for line in lines])
    rows, problems = [], []
    for line in lines:
        if isinstance(line, SweepLine):
            rows.append(_sweep_row(line))
            if options.jobs:
                rows += [_run_row(job, " ".join(line.distinct(job)) or "-", "-") for job in line.jobs]
            problems += [problem for job in line.jobs for problem in job.problems]
        else:
            rows.append(_run_row(line, line.task or "-", line.model or "-"))
            problems += line.problems
    rows = [tuple(map(printable, row)) for row in rows]
    if not rows:
        print("no runs")
    _print(rows)
    sys.stdout.flush()
    for problem in problems:
        print(f"note: {printable(problem)}", file=sys.stderr)
    return 0


def _print(rows: Sequence[tuple[str, ...]]) -> None:
    """Print the table; on a narrow terminal, several lines per run."""
    from trinity_sync.cli.tables import print_table

    if sys.stdout.isatty():
        from trinity_sync.tracking.console import PlainConsole

        console = PlainConsole()
        widths = [max(len(row[column]) for row in [_HEAD, *rows]) for column in range(len(_HEAD))]
        if sum(widths) + 2 * (len(widths) - 1) > console.width:
            for row in rows:
                _print_block(row, console)
            return
    print_table(_HEAD, rows, column=_STATUS, colours=_STYLES)


def _print_block(row: tuple[str, ...], console: Console) -> None:
    """Print the folder, and below it the known values, wrapped at the terminal's width."""
    from rich.cells import cell_len
    from rich.text import Text

    from trinity_sync.cli.tables import colour

    folder, task, model, status, steps, reward, wall = row
    console.print(Text(folder, style="bold"), soft_wrap=True)
    result = reward if reward == "-" or reward.startswith("loss ") else f"reward {reward}"
    labelled = [f"{steps} steps" if steps != "-" else "-", result]
    line = Text("  ")
    for piece in (status, *labelled, task, model, wall):
        if piece == "-":
            continue
        if len(line) > 2:
            if line.cell_len + 2 + cell_len(piece) > console.width:
                console.print(line, soft_wrap=True)
                line = Text("  ")
            else:
                line.append("  ")
        line.append(piece, style=colour(status, _STYLES) if piece is status else "")
    console.print(line, soft_wrap=True)


def runs_below(folder: Path | None) -> list[RunLine | SweepLine]:
    """Return all runs and sweeps below a folder, the newest last; None: below outputs and multirun, here. Raises
    ConfigError if there is no such folder.
    """
    from trinity_sync.report.run_page import find

    named = [Path("outputs"), Path("multirun")] if folder is None else [folder]
    roots = [root.absolute() for root in named if root.is_dir()]
    if not roots and folder is None:
        raise ConfigError(f"there is neither outputs nor multirun in {Path.cwd()}; name a folder with runs")
    if not roots:
        raise ConfigError(f"{folder} is not a folder; name one with runs below it")
    return find(roots)


def _run_row(run: RunLine, task: str, model: str) -> tuple[str, ...]:
    from trinity_sync.tracking.run_end import shorten

    return (
        shorten(run.path),
        task,
        model,
        run.status,
        f"{run.steps}/{run.total_steps}" if run.total_steps is not None else str(run.steps),
        run.figure.removeprefix("reward ") or "-",
        _wall(run.wall_s),
    )


def _sweep_row(sweep: SweepLine) -> tuple[str, ...]:
    from trinity_sync.tracking import units
    from trinity_sync.tracking.run_end import shorten

    walls = [job.wall_s for job in sweep.jobs if job.wall_s is not None]
    states = ", ".join(f"{count} {status}" for status, count in sweep.states.items())
    return (
        shorten(sweep.path),
        _shared({job.task or "-" for job in sweep.jobs}),
        _shared({job.model or "-" for job in sweep.jobs}),
        f"{units.plural(len(sweep.jobs), 'job')}{': ' if states else ''}{states}",
        "-",
        "-",
        _wall(sum(walls) if walls else None),
    )


def _wall(seconds: float | None) -> str:
    """Format a duration with one unit, so that the table fits 100 columns."""
    from trinity_sync.tracking import units

    if seconds is None or seconds < 90:
        return units.seconds(seconds and round(seconds, 1))
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _shared(values: set[str]) -> str:
    return values.pop() if len(values) == 1 else "various" if values else "-"


def _as_json(line: RunLine | SweepLine) -> dict[str, object]:
    from trinity_sync.report.run_page import SweepLine

    if isinstance(line, SweepLine):
        return {"path": str(line.path), "states": line.states, "jobs": [_as_json(job) for job in line.jobs]}
    return {**dataclasses.asdict(line), "path": str(line.path)}


# Watching, from another terminal. It only reads.


_INTERRUPTED = 130


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
