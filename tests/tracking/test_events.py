"""Events as lines of events.jsonl, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tracking.test_recorder import EXAMPLES
from trinity_sync.tracking.events import EVENTS, CommitEvent, LoadEvent, OtherEvent, event_line, parse_event

HEAD = {"time": 1.5, "attempt": 2}


@pytest.mark.parametrize("name", EVENTS)
def test_a_line_is_the_same_after_it_was_read(name: str) -> None:
    line = {"event": name, **HEAD, **EXAMPLES[name]}
    event = parse_event(line)
    assert type(event) is EVENTS[name]
    assert event_line(event) == line


def test_keys_stand_in_the_order_of_the_declaration_and_those_without_a_value_are_left_out() -> None:
    commit = CommitEvent(step=1, kind="full", digest=None, bytes=5, total_s=2.0, began=1.0)
    assert list(event_line(commit)) == [
        "event",
        "time",
        "attempt",
        "step",
        "kind",
        "digest",
        "bytes",
        "total_s",
        "began",
    ]


def test_keys_of_a_newer_release_are_kept() -> None:
    line = {"event": "load", **HEAD, **EXAMPLES["load"], "colour": [1, 2]}
    event = parse_event(line)
    assert isinstance(event, LoadEvent)
    assert event_line(event) == line


def test_an_event_of_a_newer_release_is_kept() -> None:
    line = {"event": "dance", **HEAD, "step": 3}
    event = parse_event(line)
    assert isinstance(event, OtherEvent)
    assert event_line(event) == line


@pytest.mark.parametrize("wrong", [{"version": "1"}, {"version": True}, {"version": None}, {"explorer": 5}])
def test_an_event_without_what_it_is_about_is_none_of_its_kind(wrong: dict[str, Any]) -> None:
    assert isinstance(parse_event({"event": "load", **EXAMPLES["load"], **wrong}), OtherEvent)


@pytest.mark.parametrize("value", ["soon", [], True, float("nan"), 10**400])
def test_a_number_that_is_none_costs_only_itself(value: object) -> None:
    event = parse_event({"event": "load", **EXAMPLES["load"], "time": value, "paused_s": value})
    assert isinstance(event, LoadEvent)
    assert (event.time, event.paused_s, event.version) == (None, None, 1)


def test_a_count_of_bytes_stays_whole() -> None:
    event = parse_event({"event": "load", **EXAMPLES["load"], "bytes": 7})
    assert event_line(event)["bytes"] == 7
    assert isinstance(event_line(event)["bytes"], int)
