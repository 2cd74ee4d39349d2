"""The command `trinity-sync reproduce`: run what somebody ran once more, in a new folder, and say whether the same comes
of it, version by version and metric by metric; or write what is needed for that to one file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trinity_sync.cli.invocation import Invocation
    from trinity_sync.reproduction.outcome import Comparison, Outcome
    from trinity_sync.tracking.record import RunJson

EQUAL, DIFFERS = 0, 1


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the parser of `trinity-sync`."""
    from trinity_sync.cli.runs import ALLOW_TARGET_HELP

    reproduce = commands.add_parser(
        "reproduce", help="run a finished run again in a new folder and compare version by version"
    )
    reproduce.add_argument(
        "run",
        metavar="RUN",
        help="folder of a run or of one job of a sweep, a bundle, or the name of an experiment: its newest run",
    )
    reproduce.add_argument("overrides", nargs="*", help="settings to change, key=value, such as hydra.run.dir=DIR")
    reproduce.add_argument("--steps", type=int, metavar="N", help="the first N steps only")
    reproduce.add_argument("--allow-target", action="append", default=[], metavar="PREFIX", help=ALLOW_TARGET_HELP)
    reproduce.add_argument(
        "--config-dir", type=Path, metavar="DIR", help="option files of your own that a bundle names"
    )
    reproduce.add_argument(
        "--metrics-only",
        action="store_true",
        help="compare the reward at the end with that of --repeats runs with other seeds, and not the weights; the way "
        "for runs that are not reproducible bit for bit",
    )
    reproduce.add_argument("--repeats", type=int, default=3, metavar="N", help="of --metrics-only (default 3)")
    reproduce.add_argument(
        "--bundle", action="store_true", help="run nothing; write what is needed to reproduce it elsewhere to one file"
    )
    reproduce.add_argument("--output", type=Path, metavar="FILE", help="of --bundle (default: NAME.bundle.json here)")
    reproduce.set_defaults(command=_reproduce)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is reproduced.

    Attributes:
        place: the run's folder, or the bundle.
        invocation: how it was started.
        record: of its run.json.
        config: all of its settings, as saved.
        outcome: what it computed.
    """

    place: Path
    invocation: Invocation
    record: RunJson
    config: DictConfig
    outcome: Outcome


def _reproduce(options: argparse.Namespace) -> int:
    source = _read(_find(options.run), options.config_dir)
    if options.bundle:
        return _write_bundle(source, options.output)
    return 0
