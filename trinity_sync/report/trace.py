"""A run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's Trace Event Format, as JSON.

The trainer, node agents, saves and explorers are threads; spans are nested complete events; versions of explorers are
counters; faults, commits, prunes and skips are instants. Times are microseconds since the beginning of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from trinity_sync.report import timeline
from trinity_sync.report.run_data import Run
from trinity_sync.report.timeline import AGENT, MIRROR, SAVES, TRAINER, TimelineSpan
from trinity_sync.tracking import summary
from trinity_sync.tracking.events import CommitEvent, Event, FaultEvent, PruneEvent, SkipEvent, event_fields, event_name
from trinity_sync.tracking.json_lines import plain

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


def document(run: Run) -> Iterator[str]:
    """Return the trace of a run as pieces of one JSON object; the run may be running."""
    about = {"run": str(run.path), "name": run.name, "status": run.status}
    about["clock"] = "the driver's; other processes reported their durations"
    yield f'{{"displayTimeUnit": "ms", "otherData": {_text(about)}, "traceEvents": [\n'
    separator = ""
    for event in events(run):
        yield f"{separator}{_text(event)}"
        separator = ",\n"
    yield "\n]}\n"


def events(run: Run) -> Iterator[TraceEvent]:
    """Make the events of a trace."""
    found = timeline.span_lanes(timeline.spans(run.metrics, run.events))
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
    for who, spans in found.items():
        pid = _PLACES.get(who, _EXPLORERS)
        for row, ordered in enumerate(timeline.span_rows(spans)):
            tid = tids[pid] = tids[pid] + 1
            yield from trace.thread(pid, tid, f"{_thread(run, who)}{f' ({row + 1})' if row else ''}")
            for span in ordered:
                yield from trace.nested(pid, tid, span)
    yield from trace.held(timeline.loads(run.events))
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

    def held(self, found: Iterable[timeline.HeldVersion]) -> Iterator[TraceEvent]:
        for held in found:
            name, args = f"version held by {held.explorer}", {"version": held.version}
            yield {"ph": "C", "name": name, "pid": _EXPLORERS, "ts": self._at(held.at), "args": args}

    def instants(self, recorded: Sequence[Event]) -> Iterator[TraceEvent]:
        for event in recorded:
            at, pid = event.time, _INSTANTS.get(type(event))
            if at is None or pid is None:
                continue
            if isinstance(event, CommitEvent):  # it was recorded later
                at = next((span.end for span in timeline.event_spans(event)), at)
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
