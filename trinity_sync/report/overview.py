"""All runs and sweeps below a folder, at a glance: what their records, settings and last lines say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from trinity_sync.host.masking import masked_override
from trinity_sync.report.data import is_run, job_order, status_now
from trinity_sync.tracking import jsonl
from trinity_sync.tracking.record import RunJson, read_record
from trinity_sync.tracking.summary import REWARD_STEPS, summarise, wall_seconds

UNREADABLE = "unreadable"
"""Status of a run or folder of which nothing is known."""

_Loader: type[yaml.CSafeLoader] | type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEYS = ("name", "trainer.steps", "backend.strategy", "backend.ranks", "sync.mode")


@dataclass(kw_only=True)
class RunLine:
    """A run at a glance; what is not known is None.

    Attributes:
        path: its folder.
        status: as in a report, or `UNREADABLE`.
        steps, total_steps: done, and asked for.
        reward: mean of the last ten steps.
        wall_s: seconds of all attempts.
        started: when its newest attempt began, in Unix seconds.
        overrides: of the command line.
        problems: what could not be read, one sentence each.
    """

    path: Path
    name: str | None = None
    status: str = "not started"
    steps: int = 0
    total_steps: int | None = None
    reward: float | None = None
    backend: str | None = None
    ranks: int | None = None
    sync: str | None = None
    wall_s: float | None = None
    started: float | None = None
    overrides: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether it is under way."""
        return self.status == "running"


@dataclass(kw_only=True)
class SweepLine:
    """A sweep at a glance: its folder, and its jobs by number."""

    path: Path
    jobs: list[RunLine]

    @property
    def started(self) -> float | None:
        """When the newest attempt of a job began."""
        return max((job.started for job in self.jobs if job.started is not None), default=None)

    @property
    def running(self) -> bool:
        """Whether one of its jobs is under way."""
        return any(job.running for job in self.jobs)

    @property
    def states(self) -> dict[str, int]:
        """How many jobs there are of each status."""
        return dict(Counter(job.status for job in self.jobs))

    def distinct(self, job: RunLine) -> list[str]:
        """List the overrides of a job that not all jobs share."""
        shared = set.intersection(*(set(one.overrides) for one in self.jobs)) if len(self.jobs) > 1 else set()
        return [text for text in job.overrides if text not in shared]


def find(roots: Sequence[Path]) -> list[RunLine | SweepLine]:
    """Find all runs and sweeps below folders, the newest last. Links are passed over, and so are folders whose names
    begin with a dot.

    Args:
        roots: the folders; each may be that of a run or of a sweep itself.
    """
    found = [line for root in roots for line in _below(root)]
    return sorted(found, key=lambda line: (line.started or _modified(line.path), str(line.path)))


def _below(folder: Path) -> Iterator[RunLine | SweepLine]:
    try:
        if is_run(folder):
            yield run_line(folder)
            return
        inner = [
            Path(entry.path)
            for entry in os.scandir(folder)
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        ]
        swept = (folder / "multirun.yaml").is_file()
    except OSError as error:
        yield RunLine(path=folder, status=UNREADABLE, problems=[f"{folder} cannot be read: {error.strerror or error}"])
        return
    lines = [line for place in sorted(inner, key=job_order) for line in _below(place)]
    if swept:
        jobs = [job for line in lines for job in (line.jobs if isinstance(line, SweepLine) else [line])]
        yield SweepLine(path=folder, jobs=jobs)
    else:
        yield from lines


def run_line(folder: Path) -> RunLine:
    """Read the folder of one run, of a whole one in milliseconds."""
    line = RunLine(path=folder)
    for read in (_read_settings, _read_overrides, _read_record):
        try:
            read(folder, line)
        except Exception as error:  # whatever it is, the other runs are listed
            line.problems.append(str(error) if str(folder) in str(error) else f"{folder}: {error}")
    return line


def _read_record(folder: Path, line: RunLine) -> None:
    if not (folder / "run.json").exists():
        return
    line.status = UNREADABLE
    record = read_record(folder / "run.json")
    line.status, line.started = status_now(folder, record), record.get("started")
    metrics, events = _last_lines(folder, record)
    line.wall_s = wall_seconds(record, metrics, events)
    summary = summarise(metrics, (), line.status, line.wall_s)
    line.steps, line.reward = summary["steps"], summary["reward_last"]


def _last_lines(folder: Path, record: RunJson) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Lines of metrics.jsonl and events.jsonl: the last ones; all of them where an earlier attempt was killed, as how
    long it lasted stands nowhere else.
    """
    names = ("metrics.jsonl", "events.jsonl")
    earlier = (record.get("attempts") or [])[:-1]
    if any(attempt.get("ended") is None for attempt in earlier):
        metrics, events = (jsonl.read(folder / name) for name in names)
    else:
        metrics, events = (jsonl.read_last(folder / name, REWARD_STEPS) for name in names)
    return metrics, events


def _read_settings(folder: Path, line: RunLine) -> None:
    path = folder / ".hydra" / "config.yaml"
    if not path.exists():
        return
    config = _load(path)
    values = [_at(config, key) for key in _KEYS]
    if any(isinstance(value, str) and "${" in value for value in values):
        resolved = OmegaConf.create(config)
        assert isinstance(resolved, DictConfig)
        values = [OmegaConf.select(resolved, key) for key in _KEYS]
    name, steps, backend, ranks, sync = values
    line.name, line.backend, line.sync = (None if text is None else str(text) for text in (name, backend, sync))
    line.total_steps, line.ranks = (number if isinstance(number, int) else None for number in (steps, ranks))


def _read_overrides(folder: Path, line: RunLine) -> None:
    path = folder / ".hydra" / "overrides.yaml"
    if path.exists():
        line.overrides = [masked_override(str(text)) for text in _load(path) or ()]


def _load(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _at(config: object, key: str) -> object:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
