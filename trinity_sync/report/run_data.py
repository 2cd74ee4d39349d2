"""Reads the files of a run or of a sweep for the report. A missing or damaged file costs only its own part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from trinity_sync.errors import ConfigError
from trinity_sync.host.masking import masked_override
from trinity_sync.host.references import model_name, read_shown, read_started_in, read_written, setting_of, task_name
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import (
    E,
    Event,
    FaultEvent,
    HealEvent,
    RowsEvent,
    event_step,
    events_of,
    stream_events,
)
from trinity_sync.tracking.json_lines import PackedRecords, Record
from trinity_sync.tracking.run_record import RunJson, lock_owner, read_record, recorded_checkpoints
from trinity_sync.tracking.summary import Summary, is_late, put_to_steps, summarise, wall_seconds
from trinity_sync.tracking.units import finite

TARGET_REWARD = 0.9
_SMOOTH_STEPS = 10
_MOST_SAMPLES = 32
_MOST_STEPS = 2**53
_TAIL = 512
"""The number of last lines of samples.jsonl that are read."""

T = TypeVar("T")


@dataclass(kw_only=True)
class Run:
    """One run.

    Attributes:
        checkpoints: its checkpoint folder; None: not known.
        record: the content of run.json, empty if missing.
        metrics, events: its lines, oldest first.
        samples: the last lines of samples.jsonl of the last step with training samples.
        validation_samples: likewise of the last validation.
        summary: the content of summary.json, computed from the current lines.
        status: the status in run.json; ``interrupted`` if it says running but no process has locked the folder; ``not
            started`` without a record.
        config_text: the config as YAML, see `host.masking.shown`; None if missing.
        config: the config as a mapping, resolved.
        overrides: the command-line overrides, secrets masked.
        notes: one sentence for each file that could not be read.
    """

    path: Path
    checkpoints: Path | None = None
    record: RunJson = field(default_factory=lambda: RunJson())
    metrics: Sequence[Record] = ()
    events: Sequence[Event] = ()
    samples: Sequence[Record] = ()
    validation_samples: Sequence[Record] = ()
    summary: Summary = field(default_factory=lambda: summarise((), (), "not started", None))
    status: str = "not started"
    config_text: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.name)

    @property
    def task(self) -> str | None:
        """See `task_name`."""
        return task_name(self.config)

    @property
    def model(self) -> str | None:
        """See `model_name`."""
        return model_name(self.config)

    @property
    def total_steps(self) -> int | None:
        steps = self.setting("trainer", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def start(self) -> float | None:
        """The beginning of its first attempt, in Unix seconds."""
        starts = [finite(item.get("started")) for item in self.record.get("attempts") or [self.record]]
        return min((at for at in starts if at is not None), default=None)

    @property
    def trained(self) -> Sequence[Record]:
        """The metrics of steps, without those of a validation before the first one."""
        lines = self.metrics if isinstance(self.metrics, PackedRecords) else PackedRecords(self.metrics)
        return lines.where(lambda line: not is_late(line))

    def setting(self, *keys: str) -> object:
        """Return a value of the config; None without one."""
        return setting_of(self.config, ".".join(keys))

    def of(self, kind: type[E]) -> Sequence[E]:
        """Return the events of one kind, oldest first."""
        return events_of(kind, self.events)

    def measured(self, kind: type[E], figure: Callable[[E], float | None]) -> list[tuple[float, float | None]]:
        """Return a figure of the events of one kind by step or version, ascending."""
        points = [(event_step(event), figure(event)) for event in self.of(kind)]
        return sorted(((float(at), value) for at, value in points if at is not None), key=lambda point: point[0])

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """Return one metric by step; None for a step without a finite value. Empty if no step has one."""
        columns = (json_lines.column(self.metrics, key) for key in ("step", name))
        points = [(step, finite(value)) for at, value in zip(*columns, strict=True) if (step := finite(at)) is not None]
        return points if any(value is not None for _, value in points) else []


@dataclass(kw_only=True)
class Sweep:
    """The runs of one sweep, by job number."""

    path: Path
    runs: list[Run]

    @property
    def common(self) -> list[str]:
        return [text for text in self.runs[0].overrides if all(text in run.overrides for run in self.runs)]

    def distinct(self, run: Run) -> list[str]:
        """List the overrides of a run that not all runs share; all of them for a single run."""
        return [text for text in run.overrides if len(self.runs) == 1 or text not in self.common]


def load(path: Path) -> Run | Sweep:
    """Read the folder of a run or of a sweep."""
    path = path.absolute()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; name the folder of a run or of a sweep")
    if is_run(path):
        return load_run(path)
    jobs = sorted((child for child in path.iterdir() if child.is_dir() and is_run(child)), key=job_order)
    if not jobs:
        raise ConfigError(
            f"{path} holds neither a run (run.json) nor a sweep (folders of runs); name one, such as "
            "outputs/NAME/DATE_TIME"
        )
    return Sweep(path=path, runs=[load_run(job) for job in jobs])


def load_run(path: Path) -> Run:
    """Read the folder of a run; files that cannot be read are left out and noted."""
    run = Run(path=path, checkpoints=path / "checkpoints")
    if (path / "run.json").exists():
        run.record = _read(run, "run.json", read_record, RunJson())
        run.status = status_now(path, run.record)
        if run.status != run.record.get("status") == "running":
            run.notes.append("The run ended without saying so: run.json says running, but no process holds the folder.")
    else:
        run.notes.append("There is no run.json: the run did not start.")
    run.metrics = _read(run, "metrics.jsonl", _read_metrics, ())
    run.events = _read(run, "events.jsonl", _read_events, ())
    samples: list[Record] = _read(run, "samples.jsonl", _read_samples, [])
    run.samples = _of_last_step([line for line in samples if not line.get("validation")])
    run.validation_samples = _of_last_step([line for line in samples if line.get("validation")])
    run.overrides = _read(run, ".hydra/overrides.yaml", _read_list, [])
    nothing: tuple[str | None, Mapping[str, object]] = (None, {})
    run.config_text, run.config = _read(run, ".hydra/config.yaml", read_shown, nothing)
    recorded, elsewhere = recorded_checkpoints(run.record, path), run.setting("checkpoint", "dir")
    if recorded is not None:
        run.checkpoints = recorded
    elif elsewhere:
        run.checkpoints = Path(_read(run, ".hydra/hydra.yaml", read_started_in, str(path)), str(elsewhere))
    peaks = _read(run, "summary.json", _read_peaks, None)
    # Computed from the lines: after a kill and a resume, summary.json may be from an earlier attempt.
    wall = wall_seconds(run.record, run.metrics, run.events)
    run.summary = summarise(run.metrics, run.events, run.status, wall, peaks, run.checkpoints)
    return run


def status_now(path: Path, record: RunJson) -> str:
    """Return the status in run.json, but ``interrupted`` if it says running and no process has locked the folder."""
    status = str(record.get("status", "unknown"))
    return "interrupted" if status == "running" and lock_owner(path) is None else status


def smooth(
    points: Sequence[tuple[float, float | None]], window: int = _SMOOTH_STEPS
) -> list[tuple[float, float | None]]:
    """Return the running mean of the last `window` values, of fewer at the beginning."""
    result: list[tuple[float, float | None]] = []
    recent: list[float] = []
    for x, value in points:
        if value is not None:
            recent = [*recent[-(window - 1) :], value] if window > 1 else [value]
        result.append((x, sum(recent) / len(recent) if recent else None))
    return result


def steps_to(run: Run) -> int | None:
    """Return the first step at which the mean reward of ten steps reaches `TARGET_REWARD`; None if it never does."""
    trained = [(step, value) for step, value in run.series("reward/mean") if value is not None]
    for index, (step, value) in enumerate(smooth(trained)):
        if index + 1 >= _SMOOTH_STEPS and value is not None and value >= TARGET_REWARD:
            return int(step)
    return None


def is_run(path: Path) -> bool:
    """Return whether a folder has a run, even one that did not start."""
    return (path / "run.json").exists() or (path / ".hydra").is_dir()


def job_order(path: Path) -> tuple[int, str]:
    """Sort key of a sweep's job folders: numbers first, then other names."""
    return (int(path.name), "") if path.name.isdecimal() else (1 << 62, path.name)


def _read(run: Run, name: str, reader: Callable[[Path], T], default: T) -> T:
    path = run.path / name
    if not path.exists():
        return default
    try:
        return reader(path)
    except Exception as error:
        run.notes.append(f"{name} could not be read and is left out: {error}")
        return default


def _read_metrics(path: Path) -> Sequence[Record]:
    lines = (line for line in json_lines.stream(path) if isinstance(line.get("attempt"), int | None))
    return put_to_steps(line for line in lines if _is_step(json_lines.metrics_step(line)))


def _read_samples(path: Path) -> list[Record]:
    lines = json_lines.read_last(path, _TAIL)
    return [line for line in lines if isinstance(line.get("step"), int) and _are_spans(line.get("spans"))]


def _of_last_step(lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if line["step"] == lines[-1]["step"]][-_MOST_SAMPLES:]


def _are_spans(spans: object) -> bool:
    return isinstance(spans, list) and all(isinstance(span, list) and len(span) == 3 for span in spans)


def _read_events(path: Path) -> Sequence[Event]:
    """Read the events that a report needs: faults, healings, counts of rows, and events of a step or of a version."""
    events = stream_events(path)
    kept = FaultEvent | HealEvent | RowsEvent
    return PackedRecords(event for event in events if isinstance(event, kept) or _is_step(event_step(event)))


def _is_step(step: int | None) -> bool:
    return step is not None and 0 <= step < _MOST_STEPS


def _read_peaks(path: Path) -> dict[str, int] | None:
    """Read the peak memory by role, in bytes, of a summary.json."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    peaks = value.get("peak_memory") or {}
    if not isinstance(peaks, dict) or None in map(finite, peaks.values()):
        raise ValueError(f"peak_memory is {peaks!r:.60}")
    return peaks


def _read_list(path: Path) -> list[str]:
    found = read_written(path)
    return [masked_override(str(item)) for item in (found if isinstance(found, list | dict) else ())]
