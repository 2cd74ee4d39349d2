"""What the driver fetches of the monitor's events."""

from __future__ import annotations

from typing import Any

from trinity_sync.checkpoint import relay
from trinity_sync.checkpoint.relay import EventRelay
from trinity_sync.errors import RunError, WaitTimeout

FAULT = {"event": "fault", "time": 1.0, "attempt": 0, "where": "retention", "error": "disk"}


class Answer:
    """An answer that comes when it has been asked for so many times: in vain, late, or at once."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = list(outcomes)

    def result(self, timeout_s: float) -> Any:
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


def told(monitor: Monitor, monkeypatch: Any, times: int) -> list[tuple[str, dict[str, object]]]:
    monkeypatch.setattr(relay, "_INTERVAL_S", 3600.0)  # the thread fetches nothing by itself
    events: list[tuple[str, dict[str, object]]] = []
    fetched = EventRelay(monitor, lambda event, **fields: events.append((event, fields)))  # type: ignore[arg-type]
    for _ in range(times - 1):
        fetched._fetch()
    fetched.close()
    return events


def test_what_a_slow_monitor_tells_late_is_recorded(monkeypatch: Any) -> None:
    late = Answer(WaitTimeout("the checkpoint monitor", "tell its events", 10.0), [FAULT])
    assert told(Monitor(late), monkeypatch, 2) == [("fault", {"where": "retention", "error": "disk"})]


def test_what_came_after_a_late_answer_is_fetched_at_the_end_too(monkeypatch: Any) -> None:
    late = Answer(WaitTimeout("the checkpoint monitor", "tell its events", 10.0), [FAULT])
    assert len(told(Monitor(late, Answer([FAULT, FAULT])), monkeypatch, 2)) == 3


def test_a_monitor_that_is_gone_for_a_while_is_asked_again(monkeypatch: Any) -> None:
    events = told(Monitor(Answer(RunError("it died")), Answer([FAULT, FAULT])), monkeypatch, 2)
    assert [event for event, _ in events] == ["fault", "fault"]
