"""Resumes a sweep: completed jobs stay, interrupted jobs are resumed, and the others start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraException

from trinity_sync.config.composed_jobs import saved_jobs
from trinity_sync.config.invocation import Invocation, Recomposition
from trinity_sync.config.messages import explain, print_error
from trinity_sync.errors import ConfigError, TrinityError
from trinity_sync.launch.app import DONE, INTERRUPTED, finish_sweep
from trinity_sync.tracking.run_record import lock_owner, read_record

SETTINGS = "multirun.yaml"
"""Written by Hydra into a sweep's folder."""


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """A job of a sweep: its folder, and how it is started."""

    folder: Path
    invocation: Invocation

    def settings(self, allowed: Sequence[str]) -> Recomposition:
        """Compose the job's settings."""
        found = self.invocation.recompose((), allowed)
        place = self.invocation.started_in
        if found.config.anchored(place) != found.config:
            raise ConfigError(
                f"its settings have paths relative to {place}, where the sweep was started; resume it there"
            )
        return found

    @property
    def state(self) -> str:
        """``completed``, ``in use``, ``begun``, or ``not begun``."""
        if not (self.folder / "run.json").exists():
            return "not begun"
        if lock_owner(self.folder):
            return "in use"
        try:
            status = read_record(self.folder / "run.json").get("status")
        except ConfigError:  # its resume reports the problem
            status = None
        return "completed" if status == "completed" else "begun"


def resume_sweep(sweep: Path, *, begin: Callable[[SweepJob], int], go_on: Callable[[Path], int]) -> int:
    """Resume a sweep, one job after another, and write its report. Returns the exit code, as of the sweep itself: 0 all
    completed, 1 some did not, 130 interrupted.
    """
    jobs = read_jobs(sweep)
    states = [job.state for job in jobs]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(f"{len(jobs)} jobs: {told}", file=sys.stderr)
    codes: dict[Path, int] = {}
    for job, state in zip(jobs, states, strict=True):
        codes[job.folder] = DONE
        if state == "completed":
            continue
        print(f"job {job.folder.name}: {state}", file=sys.stderr)
        try:
            codes[job.folder] = begin(job) if state == "not begun" else go_on(job.folder)
        except TrinityError as error:
            print_error(f"job {job.folder.name}: {error}")
            codes[job.folder] = error.exit_code
        if codes[job.folder] == INTERRUPTED:
            return INTERRUPTED
    return finish_sweep(sweep, codes)


def read_jobs(sweep: Path) -> list[SweepJob]:
    """Return the jobs of a sweep from the settings in its folder. Raises ConfigError if they cannot be read, or if it
    is a search.
    """
    path = sweep / SETTINGS
    try:
        found, own_folders = saved_jobs(path)
    except HydraException as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}; name the folder of a sweep") from error
    if found is None:
        raise ConfigError(f"{sweep} has a sweeper that chooses values while it runs; name one of its jobs to resume")
    if own_folders:
        raise ConfigError(f"{sweep} names its jobs' folders by hydra.sweep.subdir; name one of them to resume")
    return [SweepJob(folder=sweep / str(number), invocation=one) for number, one in enumerate(found)]
