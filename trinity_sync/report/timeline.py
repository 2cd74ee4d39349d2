"""The timeline of a run's page: lanes for trainer, node agents, saves and explorers over a few steps."""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple, TypeAlias

from markupsafe import Markup

from trinity_sync.report.charts import render, ticks
from trinity_sync.report.run_data import Run
from trinity_sync.tracking import summary, units
from trinity_sync.tracking.events import (
    CommitEvent,
    Event,
    FaultEvent,
    GenerateEvent,
    LoadEvent,
    MirrorEvent,
    PruneEvent,
    PublishEvent,
    SkipEvent,
    event_fields,
    event_name,
    events_of,
)
from trinity_sync.tracking.json_lines import Record, column, plain
from trinity_sync.tracking.summary import is_late
from trinity_sync.tracking.units import finite

_MOST_STEPS = 12
_MOST_BARS = 800
_MOST_EXPLORERS = 12
_SLOW = 1.5
_LANE, _BAR = 26, 18
_LEFT, _TOP, _WIDTH = 118, 22, 1120

_WORDS = {
    "train": "trains",
    "wait": "waits for samples, loads or a validation",
    "stage": "copies the weights",
    "publish": "makes a version available",
    "save": "begins a checkpoint",
    "digest": "digests a version",
    "write": "writes a checkpoint",
    "commit": "commits it",
    "copy": "copies to the mirror",
    "generate": "generates",
    "load": "loads a version",
    "pause": "is paused by the load",
}
"""Kinds of bars and their text in the legend; the page's style has a colour for each."""

_OTHERS = "does something else"


class Bar(NamedTuple):
    """A bar: its place in pixels, the style class of its colour, and its description."""

    x: float
    y: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Window:
    """A few neighbouring steps; begin and end in Unix seconds."""

    title: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class _LaneChart:
    """A window of the lanes, in pixels; `started` is the zero of the axis, in Unix seconds."""

    window: Window
    lanes: dict[str, list[list[TimelineSpan]]]
    started: float
    width: int = _WIDTH
    left: int = _LEFT
    top: int = _TOP

    @property
    def label(self) -> str:
        return f"Who did what when: {self.window.title}"

    @property
    def end(self) -> int:
        return self.width - 14

    @property
    def floor(self) -> int:
        return self.top + _LANE * sum(map(len, self.lanes.values()))

    @property
    def height(self) -> int:
        return self.floor + 38

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        window = self.window
        values = ticks(window.begin - self.started, window.end - self.started, 7)[0]
        inside = [value for value in values if window.begin <= value + self.started <= window.end]
        return [(self.x(value + self.started), _clock(value, values[1] - values[0])) for value in inside]

    @cached_property
    def names(self) -> list[tuple[float, str, str]]:
        """Place, name and busy share of each lane."""
        found, row = [], 0
        for who, spans in self.lanes.items():
            busy = sum(_worked(span) for one in spans for span in one)
            share = busy / (self.window.end - self.window.begin)
            found.append((self.top + row * _LANE + _LANE / 2, who, f"{min(share, 1):.0%} busy"))
            row += len(spans)
        return found

    @cached_property
    def bars(self) -> list[Bar]:
        flat = (one for spans in self.lanes.values() for one in spans)
        return [
            Bar(self.x(span.begin), y, max(self.x(span.end) - self.x(span.begin), 0.8), _kind(span.what), title)
            for row, spans in enumerate(flat)
            for y in [self.top + row * _LANE + (_LANE - _BAR) / 2]
            for span in _drawn(spans)
            for title in [f"{span.who}: {span.what}, {span.about}: {units.seconds(span.end - span.begin)}"]
        ]

    @property
    def steps(self) -> list[tuple[float, str]]:
        """The beginnings of steps, with a minimum distance for their texts."""
        found: list[tuple[float, str]] = []
        for span in (span for row in self.lanes.get(TRAINER, []) for span in row if span.what == "step"):
            x = self.x(span.begin)
            if not found or x - found[-1][0] > 70:
                found.append((x, span.about))
        return found

    def x(self, at: float) -> float:
        window = self.window
        return self.left + (at - window.begin) / (window.end - window.begin) * (self.end - self.left)


def timeline(run: Run) -> Markup | None:
    """Draw the last steps of a run, and those around a slow step; None without any spans."""
    lanes = span_lanes(_shown(run))
    if not lanes:
        return None
    started = min(lane[0].begin for lane in lanes.values())
    if run.start is not None:
        started = min(run.start, started)
    explorers = [who for who in lanes if who not in (TRAINER, AGENT, SAVES, MIRROR)]
    lanes = {who: spans for who, spans in lanes.items() if who not in explorers[_MOST_EXPLORERS:]}
    since = finite(run.record.get("started"))
    pictures = [_picture(lanes, window, started) for window in windows(lanes, since)]
    kinds = {bar.kind for picture in pictures for bar in picture.bars}
    words = {_kind(what): text for what, text in _WORDS.items()} | {_kind(""): _OTHERS}
    legend = [(kind, text) for kind, text in words.items() if kind in kinds]
    return render("timeline.html", plots=pictures, legend=legend, notes=_notes(run), lane=_LANE, height=_BAR)


def _shown(run: Run) -> Iterator[TimelineSpan]:
    """Yield the spans that the windows may show, the first of each lane, and the other steps without their parts."""
    whole = (span for span in spans(run.metrics, ()) if span.what == "step")
    steps = sorted((span._replace(parts=(), facts={}) for span in whole), key=lambda span: span.begin)
    if len(steps) <= _MOST_STEPS + 2:
        yield from spans(run.metrics, run.events)
        return
    slowest = max(range(1, len(steps) - _MOST_STEPS), key=lambda at: steps[at].end - steps[at].begin)
    around = [(steps[slowest - 1].begin, steps[slowest + 1].end), (steps[-_MOST_STEPS - 1].begin, math.inf)]

    def shown(span: TimelineSpan) -> bool:
        return any(span.end > begin and span.begin < end for begin, end in around)

    yield from (span for span in steps if not shown(span))
    first: dict[str, TimelineSpan] = {}
    for span in spans(run.metrics, run.events):
        if shown(span):
            yield span
        elif span.what != "step" and (span.who not in first or span.begin < first[span.who].begin):
            first[span.who] = span
    yield from first.values()


def _notes(run: Run) -> list[str]:
    """Return one sentence for each thing that the timeline cannot show."""
    explorers = {event.explorer for event in run.of(LoadEvent)}
    found = []
    if explorers and not run.of(GenerateEvent):
        found.append("This run did not note when explorers generated: their lanes show loads only.")
    if len(explorers) > _MOST_EXPLORERS:
        found.append(f"{len(explorers) - _MOST_EXPLORERS} more explorers are in the trace.")
    return found


def windows(lanes: dict[str, list[TimelineSpan]], since: float | None = None) -> Iterator[Window]:
    """Choose the steps to show: the last ones, and the slowest one before them. `since`: the beginning of the newest
    attempt, in Unix seconds. A window shows one attempt only, since days may lie between two.
    """
    steps = [span for span in lanes.get(TRAINER, []) if span.what == "step"]
    if not steps:
        begin, end = _ends(lanes)
        yield Window(title="All of it", begin=begin, end=end)
        return
    newest = sum(since is None or span.end > since for span in steps) or len(steps)
    count = min(_MOST_STEPS, newest)
    while count > 2 and sum(_bars_between(lanes, steps[-count].begin, steps[-1].end)) > _MOST_BARS:
        count = max(2, count // 2)
    last = steps[-count:]
    title = f"The last {count} of {len(steps)} steps" if count < len(steps) else "All steps"
    begin, end = _ends(lanes)
    yield Window(title=title, begin=last[0].begin if count < len(steps) else begin, end=end)
    earlier = steps[1:-count]  # the first step includes warm-up
    if not earlier:
        return
    slowest = max(earlier, key=lambda span: span.end - span.begin)
    usual = median(span.end - span.begin for span in steps)
    took = slowest.end - slowest.begin
    if took >= _SLOW * usual:
        place = steps.index(slowest)
        around = [
            span
            for span in steps[max(place - 1, 0) : place + 2]
            if max(span.begin - slowest.end, slowest.begin - span.end) <= took
        ]
        times = f"{units.seconds(took)}, a median step {units.seconds(usual)}"
        title = f"Around {slowest.about}, the slowest of the others: {times}"
        yield Window(title=title, begin=around[0].begin, end=around[-1].end)


def _picture(lanes: dict[str, list[TimelineSpan]], window: Window, started: float) -> _LaneChart:
    shown = {who: span_rows(_inside(spans, window)) for who, spans in lanes.items()}
    return _LaneChart(window=window, lanes={who: rows or [[]] for who, rows in shown.items()}, started=started)


def _inside(spans: Sequence[TimelineSpan], window: Window) -> list[TimelineSpan]:
    begin, end = window.begin, window.end
    return [within(span, begin, end) for span in spans if span.end > begin and span.begin < end]


def _ends(lanes: dict[str, list[TimelineSpan]]) -> tuple[float, float]:
    begin = min(spans[0].begin for spans in lanes.values())
    return begin, max(begin + 1e-6, *(span.end for spans in lanes.values() for span in spans))


def _bars_between(lanes: dict[str, list[TimelineSpan]], begin: float, end: float) -> Iterator[int]:
    for spans in lanes.values():
        for span in spans:
            if span.end > begin and span.begin < end:
                yield max(len(span.parts), 1)


def _drawn(spans: Sequence[TimelineSpan]) -> Iterator[TimelineSpan]:
    """Return the spans to draw: a load with its pause, and the parts of steps and saves."""
    for span in spans:
        if span.what not in ("step", "save") or (span.what == "save" and not span.parts):
            yield span
        yield from span.parts


def _worked(span: TimelineSpan) -> float:
    """Return the seconds without waits."""
    if span.what.startswith("wait"):
        return 0.0
    if span.what == "step":
        return sum(part.end - part.begin for part in span.parts if not part.what.startswith("wait"))
    return span.end - span.begin


def _kind(what: str) -> str:
    kind = what.partition(" ")[0]  # of "wait for ..."
    return kind if kind in _WORDS else "other"


def _clock(seconds: float, step: float) -> str:
    """Format a tick: seconds with as many decimals as the step needs, minutes and hours before them."""
    digits = next((digits for digits in range(6) if abs(round(step, digits) - step) < 1e-9), 6)
    if abs(seconds) < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(seconds, 60)
    text = f"{rest:0{3 + digits if digits else 2}.{digits}f}"
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{text}" if hours else f"{minutes}:{text}"


# Spans of a run, computed from its lines.


TRAINER, AGENT, SAVES, MIRROR = "trainer", "node agents", "checkpoints", "mirror"
_TOTALS = ("step", "total")
_SAMPLES_FROM = {"generate": "wait for samples", "load": "wait for loads", "validate": "wait for a validation"}


class TimelineSpan(NamedTuple):
    """A piece of work.

    Attributes:
        who: an explorer's name, or one of `TRAINER`, `AGENT`, `SAVES` and `MIRROR`.
        what: ``step`` and its parts; ``generate``, ``load`` and its ``pause``; ``digest``, ``publish``; ``save`` with
            ``write`` and ``commit``; ``copy``.
        about: its step or version, such as ``step 12``.
        begin, end: Unix seconds.
        parts: its consecutive parts.
        facts: further values, by name.
    """

    who: str
    what: str
    about: str
    begin: float
    end: float
    parts: tuple[TimelineSpan, ...] = ()
    facts: Mapping[str, object] = {}


class HeldVersion(NamedTuple):
    """The version of an explorer since a time in Unix seconds."""

    at: float
    attempt: object
    explorer: str
    version: int


def spans(metrics: Iterable[Record], events: Iterable[Event]) -> Iterator[TimelineSpan]:
    """Return the spans of a run, the trainer's first; metrics and events oldest first."""
    for line in metrics:
        yield from _step(line)
    for event in events:
        yield from event_spans(event)


def event_spans(event: Event) -> Iterator[TimelineSpan]:
    """Return the spans of one event; none where it has no duration."""
    match event:
        case GenerateEvent():
            about = f"step {event.step}, version {event.version}"
            for begin, took in _times(event, event.total_s, event.began):
                yield TimelineSpan(event.explorer, "generate", about, begin, begin + took)
        case LoadEvent():
            yield from _load(event)
        case PublishEvent():
            yield from _publish(event)
        case CommitEvent():
            yield from _commit(event)
        case MirrorEvent():
            facts = _facts(state=event.state, bytes=event.bytes)
            for begin, took in _times(event, event.total_s):
                yield TimelineSpan(MIRROR, "copy", f"step {event.step}", begin, begin + took, (), facts)


def span_lanes(found: Iterable[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    """Group spans by who, trainer first and explorers by number, each group by begin."""
    by_who: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in found:
        by_who[span.who].append(span)
    return {who: sorted(by_who[who], key=lambda span: span.begin) for who in sorted(by_who, key=_lane)}


def span_rows(ordered: Iterable[TimelineSpan], slack_s: float = 1e-3) -> list[list[TimelineSpan]]:
    """Put the spans of one lane, sorted by begin, into as few rows without overlaps as possible."""
    found: list[list[TimelineSpan]] = []
    for span in ordered:
        row = next((row for row in found if span.begin >= row[-1].end - slack_s), None)
        if row is None:
            found.append([span])
        else:
            row.append(span if span.begin >= row[-1].end else within(span, row[-1].end, max(span.end, row[-1].end)))
    return found


def within(span: TimelineSpan, begin: float, end: float) -> TimelineSpan:
    """Cut a span and its parts to a range of time."""
    parts = tuple(within(part, begin, end) for part in span.parts if part.end > begin and part.begin < end)
    return span._replace(begin=min(max(span.begin, begin), end), end=min(max(span.end, begin), end), parts=parts)


def loads(events: Iterable[Event]) -> list[HeldVersion]:
    """List the versions that explorers took, by time."""
    found = []
    for event in events:
        if isinstance(event, LoadEvent):
            for span in _load(event):
                found.append(HeldVersion(span.end, event.attempt, span.who, event.version))
    return sorted(found, key=lambda held: held.at)


def held_by_step(metrics: Sequence[Record], events: Iterable[Event]) -> dict[str, list[tuple[float, float | None]]]:
    """Return by explorer its version at the beginning of each step; None before its first load of an attempt."""
    times: dict[tuple[str, object], array[float]] = defaultdict(lambda: array("d"))
    versions: dict[tuple[str, object], array[float]] = defaultdict(lambda: array("d"))
    for event in events_of(LoadEvent, events):
        for span in _load(event):
            key = span.who, event.attempt
            place = bisect_right(times[key], span.end)  # nearly always the end
            times[key].insert(place, span.end)
            versions[key].insert(place, event.version)
    found: dict[str, list[tuple[float, float | None]]] = {
        name: [] for name in sorted({explorer for explorer, _ in times}, key=_lane)
    }
    for step, at, took, attempt in zip(*(column(metrics, key) for key in _STEP_TIMES), strict=True):
        number, ended = finite(step), finite(at)
        if number is None or ended is None:
            continue
        began = ended - (finite(took) or 0.0)
        for name, points in found.items():
            key = name, attempt
            count = bisect_right(times[key], began) if key in times else 0
            points.append((number, versions[key][count - 1] if count else None))
    return found


_STEP_TIMES = ("step", "time", "timing/step", "attempt")


def _step(line: Record) -> Iterator[TimelineSpan]:
    """Return the span of a step with its consecutive parts."""
    end, about = finite(line.get("time")), f"step {line.get('step')}"
    timings = {
        name.removeprefix("timing/"): finite(value) for name, value in line.items() if name.startswith("timing/")
    }
    seconds = {name: max(0.0, value) for name, value in timings.items() if name not in _TOTALS and value is not None}
    whole = timings.get("step")
    whole = sum(seconds.values()) if whole is None else whole
    if end is None or whole <= 0:
        return
    at, parts = end - whole, []
    for name, took in seconds.items():
        if took:
            begin, at = at, min(at + took, end)
            parts.append(TimelineSpan(TRAINER, _SAMPLES_FROM.get(name, name), about, begin, at))
    if is_late(line):  # a validation before the first step
        yield from parts
        return
    facts = {name: line[name] for name in ("reward/mean", "loss", "staleness/mean") if name in line}
    yield TimelineSpan(TRAINER, "step", about, end - whole, end, tuple(parts), facts)


def _load(event: LoadEvent) -> Iterator[TimelineSpan]:
    who, about = event.explorer, f"version {event.version}"
    for begin, took in _times(event, event.total_s, event.began):
        end = begin + took
        paused = min(max(event.paused_s or 0.0, 0.0), took)
        parts = (TimelineSpan(who, "pause", about, end - paused, end),) if paused else ()
        yield TimelineSpan(who, "load", about, begin, end, parts, _facts(bytes=event.bytes, digest=event.digest))


def _publish(event: PublishEvent) -> Iterator[TimelineSpan]:
    about = f"version {event.version}"
    facts = _facts(blocked_s=event.blocked_s, bytes_moved=event.bytes_moved, digest=event.digest)
    for begin, took in _times(event, event.total_s):
        if event.sealed_s is None:
            yield TimelineSpan(AGENT, "publish", about, begin, begin + took, (), facts)
            continue
        sealed = min(max(event.sealed_s, 0.0), took)
        digesting = min(max(event.digest_s or 0.0, 0.0), sealed)
        if digesting:
            yield TimelineSpan(AGENT, "digest", about, begin + sealed - digesting, begin + sealed)
        yield TimelineSpan(AGENT, "publish", about, begin + sealed, begin + took, (), facts)


def _commit(event: CommitEvent) -> Iterator[TimelineSpan]:
    about = f"step {event.step}"
    facts = _facts(kind=event.kind, blocked_s=event.blocked_s, bytes=event.bytes, digest=event.digest)
    for begin, took in _times(event, event.total_s, event.began):
        parts: tuple[TimelineSpan, ...] = ()
        if event.written_s is not None:
            between = begin + min(max(event.written_s, 0.0), took)
            parts = (
                TimelineSpan(SAVES, "write", about, begin, between),
                TimelineSpan(SAVES, "commit", about, between, begin + took),
            )
        yield TimelineSpan(SAVES, "save", about, begin, begin + took, parts, facts)


def _times(event: Event, took: float | None, began: float | None = None) -> Iterator[tuple[float, float]]:
    """Return when the work of an event began, in Unix seconds, and its duration; nothing where one is not known."""
    if took is not None and event.time is not None:
        took = max(0.0, took)
        yield (event.time - took if began is None else began), took


def _facts(**values: object) -> Mapping[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _lane(who: str) -> tuple[int, list[tuple[int, str]]]:
    places = (TRAINER, AGENT, SAVES, MIRROR)
    words = [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", who)]
    return (places.index(who) if who in places else len(places)), words


# The timeline as a trace for Perfetto and chrome://tracing.


TraceEvent: TypeAlias = Mapping[str, object]

_RUN, _TRAINER, _AGENT, _SAVES, _MIRROR, _EXPLORERS = range(1, 7)
_PROCESSES = {
    _RUN: "run",
    _TRAINER: "trainer",
    _AGENT: "node agents",
    _SAVES: "checkpoint writers",
    _MIRROR: "mirror",
    _EXPLORERS: "explorers",
}
_PLACES = {TRAINER: _TRAINER, AGENT: _AGENT, SAVES: _SAVES, MIRROR: _MIRROR}
_INSTANTS = {FaultEvent: _RUN, SkipEvent: _AGENT, CommitEvent: _SAVES, PruneEvent: _SAVES}


def trace_document(run: Run) -> Iterator[str]:
    """Return the trace of a run as pieces of one JSON object; the run may be running."""
    about = {"run": str(run.path), "name": run.name, "status": run.status}
    about["clock"] = "the driver's; other processes reported their durations"
    yield f'{{"displayTimeUnit": "ms", "otherData": {_text(about)}, "traceEvents": [\n'
    separator = ""
    for event in _trace_events(run):
        yield f"{separator}{_text(event)}"
        separator = ",\n"
    yield "\n]}\n"


def _trace_events(run: Run) -> Iterator[TraceEvent]:
    """Make the events of a trace."""
    found = span_lanes(spans(run.metrics, run.events))
    attempts = summary.spans(run.record, run.metrics, run.events)
    begun = [begin for begin, _ in attempts.values()] + [lane[0].begin for lane in found.values()]
    begun += [event.time for event in run.events if event.time is not None]
    trace = _Trace(min(begun, default=0.0))
    for number, (pid, name) in enumerate(_PROCESSES.items()):
        if pid == _RUN or any(_PLACES.get(who, _EXPLORERS) == pid for who in found):
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": number}}
    yield from trace.thread(_RUN, 1, "attempts")
    for attempt, (begin, end) in attempts.items():
        yield trace.complete(_RUN, 1, TimelineSpan("run", f"attempt {attempt}", "", begin, end))
    tids = dict.fromkeys(_PROCESSES, 0)
    for who, lane in found.items():
        pid = _PLACES.get(who, _EXPLORERS)
        for row, ordered in enumerate(span_rows(lane)):
            tid = tids[pid] = tids[pid] + 1
            yield from trace.thread(pid, tid, f"{_thread(run, who)}{f' ({row + 1})' if row else ''}")
            for span in ordered:
                yield from trace.nested(pid, tid, span)
    yield from trace.held(loads(run.events))
    yield from trace.instants(run.events)


class _Trace:
    """Makes trace events with times since `zero`, in Unix seconds."""

    def __init__(self, zero: float) -> None:
        self._zero = zero

    def thread(self, pid: int, tid: int, name: str) -> Iterator[TraceEvent]:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}

    def nested(self, pid: int, tid: int, span: TimelineSpan) -> Iterator[TraceEvent]:
        yield self.complete(pid, tid, span)
        for part in span.parts:
            yield from self.nested(pid, tid, part)

    def complete(self, pid: int, tid: int, span: TimelineSpan) -> TraceEvent:
        begin, end = self._at(span.begin), self._at(span.end)
        event: dict[str, object] = {"ph": "X", "name": span.what, "pid": pid, "tid": tid}
        event |= {"ts": begin, "dur": end - begin}
        args = {**({"for": span.about} if span.about else {}), **span.facts}
        return {**event, "args": args} if args else event

    def held(self, found: Iterable[HeldVersion]) -> Iterator[TraceEvent]:
        for held in found:
            name, args = f"version held by {held.explorer}", {"version": held.version}
            yield {"ph": "C", "name": name, "pid": _EXPLORERS, "ts": self._at(held.at), "args": args}

    def instants(self, recorded: Sequence[Event]) -> Iterator[TraceEvent]:
        for event in recorded:
            at, pid = event.time, _INSTANTS.get(type(event))
            if at is None or pid is None:
                continue
            if isinstance(event, CommitEvent):  # it was recorded later
                at = next((span.end for span in event_spans(event)), at)
            scope = "g" if isinstance(event, FaultEvent) else "p"
            args = {"attempt": event.attempt, **event_fields(event)}
            name = event_name(event)
            yield {"ph": "i", "name": name, "pid": pid, "tid": 1, "ts": self._at(at), "s": scope, "args": args}

    def _at(self, seconds: float) -> int:
        return round((seconds - self._zero) * 1e6)


def _thread(run: Run, who: str) -> str:
    ranks = run.setting("backend", "ranks")
    if who == TRAINER and isinstance(ranks, int):
        return "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
    return {SAVES: "writer", AGENT: "agent", TRAINER: "ranks"}.get(who, who)


def _text(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # rare, and slower
        return json.dumps(plain(value), allow_nan=False)
