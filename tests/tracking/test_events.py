"""Events as lines of events.jsonl, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tracking.test_recorder import EXAMPLES
from trinity_sync.tracking.events import (
    EVENTS,
    CommitEvent,
    LoadEvent,
    OtherEvent,
    PublishEvent,
    event_line,
    parse_event,
)

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


def test_what_changed_by_layer_is_read_as_it_was_written() -> None:
    shares = {"embeddings": 0, "0": 1_000_000, "others": 12}
    event = parse_event({"event": "publish", **EXAMPLES["publish"], "changed_ppm": shares})
    assert event_line(event)["changed_ppm"] == shares


@pytest.mark.parametrize("value", [-1, 10**6 + 1, 10**400, 0.5, True, "5", None])
def test_a_share_of_a_layer_that_is_none_costs_only_itself(value: object) -> None:
    event = parse_event({"event": "publish", **EXAMPLES["publish"], "changed_ppm": {"0": 7, "1": value}})
    assert event_line(event)["changed_ppm"] == {"0": 7}


@pytest.mark.parametrize("value", ["soon", [1, 2], 5])
def test_shares_that_have_no_layers_cost_only_themselves(value: object) -> None:
    event = parse_event({"event": "publish", **EXAMPLES["publish"], "changed_ppm": value})
    assert isinstance(event, PublishEvent)
    assert event.changed_ppm is None


def test_the_layers_of_a_large_model_take_about_a_kilobyte() -> None:
    shares = {"embeddings": 1200, **{str(layer): 6900 + layer for layer in range(94)}, "head": 0, "others": 0}
    given = {"event": "publish", **EXAMPLES["publish"]}
    without, line = (json.dumps(event_line(parse_event(one))) for one in (given, {**given, "changed_ppm": shares}))
    assert len(line) - len(without) < 1250


def test_a_count_of_bytes_stays_whole() -> None:
    event = parse_event({"event": "load", **EXAMPLES["load"], "bytes": 7})
    assert event_line(event)["bytes"] == 7
    assert isinstance(event_line(event)["bytes"], int)
