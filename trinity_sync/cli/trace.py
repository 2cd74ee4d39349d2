"""The command `trinity-sync trace`: who did what when in a run, as a file for Perfetto."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trinity_sync.errors import ConfigError


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the parser of `trinity-sync`."""
    trace = commands.add_parser(
        "trace", help="write who did what when in a run, for ui.perfetto.dev or chrome://tracing"
    )
    trace.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of the run, which may be going on")
    trace.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to (default: trace.json in the run's folder); - for standard output",
    )
    trace.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    from trinity_sync.report import load, write_trace
    from trinity_sync.report.data import Sweep

    run = load(options.run)
    if isinstance(run, Sweep):
        raise ConfigError(f"{run.path} is a sweep; name one of its jobs, such as {run.runs[0].path}")
    if not run.metrics and not run.events:
        raise ConfigError(" ".join([f"{run.path} has recorded nothing that could be traced.", *run.notes]))
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.output == "-":
        from trinity_sync.report.trace import document

        sys.stdout.writelines(document(run))
        return 0
    print(write_trace(run, None if options.output is None else Path(options.output)))
    return 0
