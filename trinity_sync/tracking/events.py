"""The events of a run: one class for each kind of line in events.jsonl.

The trainer, the launcher and the checkpoint monitor make them, the recorder writes them; the live view, the summary and
the report read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TypeAlias, TypeVar

from trinity_sync.tracking import json_lines, units
from trinity_sync.tracking.json_lines import PackedRecords, Record


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of events.jsonl. Fields named ``_s`` are seconds, bytes are counts; None: not known. `time`: Unix seconds;
    the recorder sets it. `attempt`: the run's attempt; the recorder sets it. `extra`: keys of the line that the class
    does not declare, as a newer release may write them.
    """

    time: float | None = None
    attempt: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PhaseEvent(Event):
    """The run is busy outside of its steps, such as ``starting Ray``."""

    what: str


@dataclass(frozen=True, kw_only=True)
class RowsEvent(Event):
    """The rows of the task's file were counted; `longest` in tokens, `policy` is `task.too_long`."""

    rows: int
    too_long: int
    longest: int
    policy: str


@dataclass(frozen=True, kw_only=True)
class PublishEvent(Event):
    """A version is available; `sealed_s` until it was digested, `base` the digest of an adapter's base; of a delta its
    `codec`, the seconds to encode it, and the share of elements that `changed`, by layer in parts per million.
    """

    version: int
    mode: str
    encoding: str
    digest: str | None
    bytes_full: float | None
    bytes_moved: float | None
    blocked_s: float | None
    digest_s: float | None = None
    sealed_s: float | None = None
    total_s: float | None
    base: str | None = None
    codec: str | None = None
    changed: float | None = None
    changed_ppm: Mapping[str, int] | None = None
    encode_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoadEvent(Event):
    """An explorer holds a version; it generated nothing for `paused_s`; deltas took `apply_s`. `began`: Unix time."""

    version: int
    explorer: str
    digest: str | None
    total_s: float | None
    paused_s: float | None
    bytes: float | None = None
    began: float | None = None
    base: str | None = None
    apply_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateEvent(Event):
    """An explorer made samples for a step with a version; `began` in Unix seconds."""

    explorer: str
    step: int
    version: int
    began: float | None
    total_s: float | None


@dataclass(frozen=True, kw_only=True)
class SkipEvent(Event):
    """A version was not published."""

    version: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SkippedUpdateEvent(Event):
    """Optimizer updates of a step were skipped, because their gradient was not finite."""

    step: int
    count: int


@dataclass(frozen=True, kw_only=True)
class FailedRewardsEvent(Event):
    """The task could not judge `count` responses of a step; `error` is the first error."""

    step: int
    count: int
    error: str | None
    validation: bool = False


@dataclass(frozen=True, kw_only=True)
class AgreementEvent(Event):
    """Difference of an explorer's log-probs from the trainer's, in nats per token, and the bound of its mean."""

    step: int
    explorer: str
    tokens: int
    mean: float | None
    largest: float | None
    bound: float | None


@dataclass(frozen=True, kw_only=True)
class FilledBatchEvent(Event):
    """`count` groups of a batch have equal rewards, because too few of the `drawn` groups differ."""

    step: int
    count: int
    drawn: int


@dataclass(frozen=True, kw_only=True)
class AllRejectedEvent(Event):
    """Every token of a step was left out by `rollout_rs`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class SaveEvent(Event):
    """The save of a full checkpoint begins."""

    step: int


@dataclass(frozen=True, kw_only=True)
class CommitEvent(Event):
    """A checkpoint is committed; `written_s` until all parts were on disk, `began` in Unix seconds."""

    step: int
    kind: str
    digest: str | None
    bytes: float | None
    blocked_s: float | None = None
    written_s: float | None = None
    total_s: float | None
    began: float | None = None
    base: str | None = None


@dataclass(frozen=True, kw_only=True)
class PruneEvent(Event):
    """Retention deleted a checkpoint."""

    step: int
    reason: str
    freed_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class MirrorEvent(Event):
    """A checkpoint was copied to the mirror (`state` ``copied``), or was not, for a reason."""

    step: int
    url: str
    state: str
    bytes: float | None
    total_s: float | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """A part failed; the run goes on, or ends because of it."""

    where: str
    error: str
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True)
class HealEvent(Event):
    """A run that lost a process has done its next step by itself: what `died`, the step it went back to, how many steps
    were `lost` (and done again), and the time from the first death to the end of the next step. `kept`: names of the
    explorers that lived on. `made`: groups of samples that explorers made meanwhile.
    """

    died: str
    resumed_from: int
    lost: int
    total_s: float | None
    kept: str | None = None
    made: int | None = None


@dataclass(frozen=True, kw_only=True)
class OtherEvent(Event):
    """An event of a newer release, or a damaged one; its fields are in `extra`."""

    event: str


E = TypeVar("E", bound=Event)

EVENTS: Mapping[str, type[Event]] = {
    "phase": PhaseEvent,
    "rows": RowsEvent,
    "publish": PublishEvent,
    "load": LoadEvent,
    "generate": GenerateEvent,
    "skip": SkipEvent,
    "skipped_update": SkippedUpdateEvent,
    "failed_rewards": FailedRewardsEvent,
    "agreement": AgreementEvent,
    "filled_batch": FilledBatchEvent,
    "all_rejected": AllRejectedEvent,
    "save": SaveEvent,
    "commit": CommitEvent,
    "prune": PruneEvent,
    "mirror": MirrorEvent,
    "fault": FaultEvent,
    "heal": HealEvent,
}
_NAMES = {kind: name for name, kind in EVENTS.items()}
_COMMON = {one.name for one in fields(Event)}
_FIELDS = {kind: [one for one in fields(kind) if one.name not in _COMMON] for kind in EVENTS.values()}
_HEAD = {"event", "time", "attempt"}

LogLine: TypeAlias = Event | Record
"""A line of events.jsonl, or of metrics.jsonl."""


def event_name(event: Event) -> str:
    """Return the name of an event in events.jsonl."""
    return event.event if isinstance(event, OtherEvent) else _NAMES[type(event)]


def event_line(event: Event) -> Record:
    """Return an event as its line in events.jsonl. Optional fields without a value are left out."""
    line = {"event": event_name(event), "time": event.time, "attempt": event.attempt}
    return {**line, **event_fields(event)}


def event_fields(event: Event) -> Record:
    """Return the fields of an event's line, without its name, time and attempt."""
    values = {one.name: (getattr(event, one.name), one.default) for one in _FIELDS.get(type(event), ())}
    return {name: value for name, (value, default) in values.items() if value is not default} | dict(event.extra)


def parse_event(line: Record) -> Event:
    """Return the event of a line of events.jsonl: an `OtherEvent` where the name is unknown, or where a field that the
    event depends on is missing or has the wrong type. A number that is not finite becomes None.
    """
    time, attempt, name = units.finite(line.get("time")), _whole(line.get("attempt")), line.get("event")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is not None:
        values = {field: convert(line.get(field)) for field, convert in _CONVERTERS[kind].items()}
        if MISSING not in values.values():
            extra = {key: value for key, value in line.items() if key not in values and key not in _HEAD}
            make: Callable[..., Event] = kind
            return make(time=time, attempt=attempt, extra=extra, **values)
    rest = {key: value for key, value in line.items() if key not in _HEAD}
    return OtherEvent(time=time, attempt=attempt, extra=rest, event=str(name))


def read_events(path: Path) -> list[Event]:
    """Read the events of a log, oldest first."""
    return list(stream_events(path))


def stream_events(path: Path) -> Iterator[Event]:
    """Yield the events that `read_events` returns, in little memory."""
    return map(parse_event, json_lines.stream(path))


def events_of(kind: type[E], events: Iterable[Event]) -> Sequence[E]:
    """Return the events of one kind, in their order; of `PackedRecords` events without a look at the others."""
    return events.of(kind) if isinstance(events, PackedRecords) else [one for one in events if isinstance(one, kind)]


def merged_lines(events: Iterable[Record], metrics: Iterable[Record]) -> Iterator[LogLine]:
    """Return the lines of events.jsonl and of metrics.jsonl in the order in which they were written."""
    return (parse_event(line) if "event" in line else line for line in json_lines.by_time(events, metrics))


def line_time(line: LogLine) -> float | None:
    """Return the time of a line, in Unix seconds."""
    return line.time if isinstance(line, Event) else units.finite(line.get("time"))


def event_step(event: Event) -> int | None:
    """Return the step of the version or of the checkpoint that an event is about; None for a fault and a phase."""
    match event:
        case PublishEvent() | LoadEvent() | SkipEvent():
            return event.version
        case GenerateEvent() | SkippedUpdateEvent() | FailedRewardsEvent() | AgreementEvent() | FilledBatchEvent():
            return event.step
        case AllRejectedEvent() | SaveEvent() | CommitEvent() | PruneEvent() | MirrorEvent():
            return event.step
    return None


def event_line_step(line: Record) -> int | None:
    """Return the step of a line of events.jsonl, see `event_step`, even if other fields are missing or damaged."""
    kind = EVENTS.get(str(line.get("event")))
    names = {one.name for one in _FIELDS[kind]} if kind is not None else set()
    key = "step" if "step" in names else "version"
    return _whole(line.get(key)) if key in names else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_CONVERT: Mapping[object, Callable[[object], object]] = {
    "int": lambda value: MISSING if _whole(value) is None else value,
    "int | None": _whole,
    "str": lambda value: value if isinstance(value, str) else MISSING,
    "float | None": lambda value: None if units.finite(value) is None else value,
    "str | None": lambda value: value if isinstance(value, str) else None,
    "bool": lambda value: value is True,
    "Mapping[str, int] | None": lambda value: (
        {key: one for key, one in value.items() if _whole(one) in range(10**6 + 1)} if isinstance(value, dict) else None
    ),
}
_CONVERTERS = {kind: {one.name: _CONVERT[one.type] for one in found} for kind, found in _FIELDS.items()}
"""Converts a value of a line by the type of its field; `MISSING`: required and not there."""
