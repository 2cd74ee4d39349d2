"""What the driver fetches of the monitor's events."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host import interrupts
from trinity_sync.launch import actors
from trinity_sync.launch.actors import EventRelay
from trinity_sync.tracking.events import Event, FaultEvent, event_fields, event_name

FAULT = {"event": "fault", "time": 1.0, "attempt": 0, "where": "retention", "error": "disk"}


class Answer:
    """An answer that comes when it has been asked for so many times: in vain, late, or at once."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = list(outcomes)
        self.limits: list[float] = []

    def result(self, timeout_s: float) -> Any:
        self.limits.append(timeout_s)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Monitor:
    """A monitor that tells everything once, in the answers that are given here."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)

    def drain_events(self) -> Answer:
        return self._answers.pop(0) if self._answers else Answer([])


class Record:
    """Takes events as a run's does, when the disk has refused some of them."""

    def __init__(self, refusals: int = 0) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self._refusals = refusals

    def event(self, event: Event) -> None:
        if self._refusals:
            self._refusals -= 1
            raise RunError("the disk is full")
        self.events.append((event_name(event), event_fields(event)))


def told(monitor: Monitor, monkeypatch: Any, times: int, refusals: int = 0) -> list[tuple[str, dict[str, object]]]:
    monkeypatch.setattr(actors, "_INTERVAL_S", 3600.0)  # the thread fetches nothing by itself
    record = Record(refusals)
    fetched = EventRelay(monitor, record.event)  # type: ignore[arg-type]
    for _ in range(times - 1):
        fetched._fetch()
    fetched.close()
    return record.events


def test_what_a_slow_monitor_tells_late_is_recorded(monkeypatch: Any) -> None:
    late = Answer(WaitTimeout("the checkpoint monitor", "tell its events", 10.0), [FAULT])
    assert told(Monitor(late), monkeypatch, 2) == [("fault", {"where": "retention", "error": "disk"})]


def test_what_came_after_a_late_answer_is_fetched_at_the_end_too(monkeypatch: Any) -> None:
    late = Answer(WaitTimeout("the checkpoint monitor", "tell its events", 10.0), [FAULT])
    assert len(told(Monitor(late, Answer([FAULT, FAULT])), monkeypatch, 2)) == 3


def test_a_monitor_that_is_gone_for_a_while_is_asked_again(monkeypatch: Any) -> None:
    events = told(Monitor(Answer(RunError("it died")), Answer([FAULT, FAULT])), monkeypatch, 2)
    assert [event for event, _ in events] == ["fault", "fault"]


def test_after_a_signal_a_monitor_that_does_not_answer_leaves_time_for_the_rest(monkeypatch: Any) -> None:
    silent = Answer(*[WaitTimeout("the checkpoint monitor", "tell its events", 10.0)] * 3)
    monkeypatch.setattr(interrupts, "_deadline", time.monotonic() + interrupts.REST_S + 1.0)
    assert told(Monitor(silent), monkeypatch, 2) == []
    assert len(silent.limits) == 3
    assert max(silent.limits) <= 1.0


@pytest.mark.parametrize("event", [{**FAULT, "event": "moved"}, {"event": "fault"}, {"step": 3}, {**FAULT, "event": 3}])
def test_an_event_that_cannot_be_recorded_is_a_fault_and_those_after_it_are_recorded(
    event: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(actors, "_INTERVAL_S", 0.01)
    seen = threading.Event()
    record = Record()

    def note(event: Event) -> None:
        record.event(event)
        if isinstance(event, FaultEvent) and event.where == "retention":
            seen.set()

    fetched = EventRelay(Monitor(Answer([event]), Answer([FAULT])), note)  # type: ignore[arg-type]
    assert seen.wait(30.0), "the thread has ended"
    fetched.close()
    [unknown, after] = record.events
    assert unknown[0] == "fault"
    assert unknown[1]["where"] == "an event of the checkpoint monitor"
    assert str(event) in str(unknown[1]["error"])
    assert after == ("fault", {"where": "retention", "error": "disk"})


def test_what_a_full_disk_refuses_is_recorded_later(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answer([FAULT, {**FAULT, "where": "mirror"}]), Answer([FAULT])]
    events = told(Monitor(*answers), monkeypatch, 2, refusals=1)
    assert [fields["where"] for _, fields in events] == ["retention", "mirror", "retention"]
    assert told(Monitor(Answer([FAULT])), monkeypatch, 1, refusals=9) == []
    assert capsys.readouterr().err == f"not recorded: {FAULT}\n"


def test_a_monitor_that_still_starts_keeps_nobody_waiting_who_was_interrupted(monkeypatch: Any) -> None:
    monkeypatch.setattr(actors, "interrupted", lambda: True)
    asked = Answer([FAULT])
    assert told(Monitor(asked), monkeypatch, times=1) == []
    assert asked.result(0.0) == [FAULT], "it was waited for"
    assert [name for name, _ in told(Monitor(Answer([]), Answer([FAULT])), monkeypatch, times=2)] == ["fault"]
