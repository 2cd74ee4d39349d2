"""Who did what when: the spans of a run's trainer, node agents, saves and explorers, worked out from its lines.

Times are Unix seconds of the driver's clock: it notes when it asked, and whoever was asked tells how long it took. What
a run of an earlier release did not note is left out, or stands where it was reported.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from trinity_sync.tracking.jsonl import Record
from trinity_sync.tracking.units import finite

TRAINER, AGENT, SAVES, MIRROR = "trainer", "node agents", "checkpoints", "mirror"
_TOTALS = ("step", "total")
_SAMPLES_FROM = {"generate": "wait for samples", "load": "wait for loads", "validate": "wait for a validation"}


class Span(NamedTuple):
    """Something that somebody did.

    Attributes:
        who: an explorer's name, or one of `TRAINER`, `AGENT`, `SAVES` and `MIRROR`.
        what: ``step`` and its parts; ``generate``, ``load`` and its ``pause``; ``digest``, ``publish``; ``save`` with
            ``write`` and ``commit``; ``copy``.
        about: what it was for, such as ``step 12``.
        begin, end: Unix seconds.
        parts: what it consisted of, one after another within it.
        facts: more of it, by name.
    """

    who: str
    what: str
    about: str
    begin: float
    end: float
    parts: tuple[Span, ...] = ()
    facts: Mapping[str, object] = {}


class Held(NamedTuple):
    """From when on an explorer held which version, in Unix seconds; `attempt` is the run's."""

    at: float
    attempt: object
    explorer: str
    version: int


def spans(metrics: Iterable[Record], events: Iterable[Record]) -> Iterator[Span]:
    """Work out the spans of a run, the trainer's first, each one's in the order of their lines.

    Args:
        metrics, events: its lines, oldest first.
    """
    for line in metrics:
        yield from _step(line)
    for event in events:
        make = _EVENTS.get(str(event.get("event")))
        if make is not None:
            yield from make(event)


def span_lanes(found: Iterable[Span]) -> dict[str, list[Span]]:
    """Sort spans by who, trainer first and explorers by number, and those of each by when they began."""
    by_who: dict[str, list[Span]] = defaultdict(list)
    for span in found:
        by_who[span.who].append(span)
    return {who: sorted(by_who[who], key=lambda span: span.begin) for who in sorted(by_who, key=_lane)}


def span_rows(ordered: Iterable[Span], slack_s: float = 1e-3) -> list[list[Span]]:
    """Put spans of one lane into rows in which none overlaps the one before, as few as it takes; mostly one.

    Args:
        ordered: by when they began.
        slack_s: an overlap no longer than this is a matter of clocks: the later one is cut.
    """
    found: list[list[Span]] = []
    for span in ordered:
        row = next((row for row in found if span.begin >= row[-1].end - slack_s), None)
        if row is None:
            found.append([span])
        else:
            row.append(span if span.begin >= row[-1].end else within(span, row[-1].end, max(span.end, row[-1].end)))
    return found


def within(span: Span, begin: float, end: float) -> Span:
    """Cut a span and its parts to what lies between two times."""
    parts = tuple(within(part, begin, end) for part in span.parts if part.end > begin and part.begin < end)
    return span._replace(begin=min(max(span.begin, begin), end), end=min(max(span.end, begin), end), parts=parts)


def loads(events: Iterable[Record]) -> list[Held]:
    """List what explorers held from when on, in the order of time."""
    found = []
    for event in events:
        version = event.get("version")
        if event.get("event") == "load" and isinstance(version, int):
            for span in _load(event):
                found.append(Held(span.end, event.get("attempt"), span.who, version))
    return sorted(found, key=lambda held: held.at)


def held_by_step(metrics: Sequence[Record], events: Iterable[Record]) -> dict[str, list[tuple[float, float | None]]]:
    """Return by explorer which version it held when each step began; None before its first load of an attempt."""
    times: dict[tuple[str, object], list[float]] = defaultdict(list)
    versions: dict[tuple[str, object], list[int]] = defaultdict(list)
    for held in loads(events):
        times[held.explorer, held.attempt].append(held.at)
        versions[held.explorer, held.attempt].append(held.version)
    found: dict[str, list[tuple[float, float | None]]] = {
        name: [] for name in sorted({explorer for explorer, _ in times}, key=_lane)
    }
    for line in metrics:
        step, at = finite(line.get("step")), finite(line.get("time"))
        if step is None or at is None:
            continue
        began = at - (finite(line.get("timing/step")) or 0.0)
        for name, points in found.items():
            key = name, line.get("attempt")
            count = bisect_right(times[key], began) if key in times else 0
            points.append((step, float(versions[key][count - 1]) if count else None))
    return found


def _step(line: Record) -> Iterator[Span]:
    """A step and its parts, which the trainer did one after another in the order in which they stand."""
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
            parts.append(Span(TRAINER, _SAMPLES_FROM.get(name, name), about, begin, at))
    facts = {name: line[name] for name in ("reward/mean", "loss", "staleness/mean") if name in line}
    yield Span(TRAINER, "step", about, end - whole, end, tuple(parts), facts)


def _generate(event: Record) -> Iterator[Span]:
    about = f"step {event.get('step')}, version {event.get('version')}"
    for begin, took in _times(event):
        yield Span(str(event.get("explorer")), "generate", about, begin, begin + took)


def _load(event: Record) -> Iterator[Span]:
    who, about = str(event.get("explorer")), f"version {event.get('version')}"
    for begin, took in _times(event):
        end = begin + took
        paused = min(max(finite(event.get("paused_s")) or 0.0, 0.0), took)
        parts = (Span(who, "pause", about, end - paused, end),) if paused else ()
        yield Span(who, "load", about, begin, end, parts, _facts(event, "bytes", "digest"))


def _publish(event: Record) -> Iterator[Span]:
    about, facts = f"version {event.get('version')}", _facts(event, "blocked_s", "bytes_moved", "digest")
    for begin, took in _times(event):
        sealed = finite(event.get("sealed_s"))
        if sealed is None:
            yield Span(AGENT, "publish", about, begin, begin + took, (), facts)
            continue
        sealed = min(max(sealed, 0.0), took)
        digesting = min(max(finite(event.get("digest_s")) or 0.0, 0.0), sealed)
        if digesting:
            yield Span(AGENT, "digest", about, begin + sealed - digesting, begin + sealed)
        yield Span(AGENT, "publish", about, begin + sealed, begin + took, (), facts)


def _commit(event: Record) -> Iterator[Span]:
    about, facts = f"step {event.get('step')}", _facts(event, "kind", "blocked_s", "bytes", "digest")
    for begin, took in _times(event):
        written = finite(event.get("written_s"))
        parts: tuple[Span, ...] = ()
        if written is not None:
            between = begin + min(max(written, 0.0), took)
            parts = (
                Span(SAVES, "write", about, begin, between),
                Span(SAVES, "commit", about, between, begin + took),
            )
        yield Span(SAVES, "save", about, begin, begin + took, parts, facts)


def _mirror(event: Record) -> Iterator[Span]:
    for begin, took in _times(event):
        yield Span(
            MIRROR, "copy", f"step {event.get('step')}", begin, begin + took, (), _facts(event, "state", "bytes")
        )


def _times(event: Record) -> Iterator[tuple[float, float]]:
    """When what an event tells of began and how long it took, where both are known."""
    took, began, told = (finite(event.get(name)) for name in ("total_s", "began", "time"))
    if took is not None and told is not None:
        took = max(0.0, took)
        yield (told - took if began is None else began), took


def _facts(event: Record, *names: str) -> dict[str, object]:
    return {name: event[name] for name in names if event.get(name) is not None}


def _lane(who: str) -> tuple[int, list[tuple[int, str]]]:
    places = (TRAINER, AGENT, SAVES, MIRROR)
    words = [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", who)]
    return (places.index(who) if who in places else len(places)), words


_EVENTS: Mapping[str, Callable[[Record], Iterator[Span]]] = {
    "generate": _generate,
    "load": _load,
    "publish": _publish,
    "commit": _commit,
    "mirror": _mirror,
}
