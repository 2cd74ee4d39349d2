from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracking import synthetic
from trinity_sync.report import timeline
from trinity_sync.report.timeline import TimelineSpan
from trinity_sync.tracking.events import Event

AT = 1_700_000_000.0


def event(name: str, at: float = 0.0, **fields: Any) -> Event:
    return synthetic.event(name, time=AT + at, attempt=0, **fields)


def step(number: int, at: float, attempt: int = 0, **seconds: float) -> dict[str, Any]:
    return {"step": number, "time": AT + at, "attempt": attempt, **{f"timing/{k}": v for k, v in seconds.items()}}


def told(*events: Event) -> list[tuple[str, str, float, float]]:
    """Who did what, from when to when."""
    found = timeline.spans((), events)
    return [(one.who, one.what, round(one.begin - AT, 6), round(one.end - AT, 6)) for one in found]


def test_the_parts_of_a_step_follow_each_other_in_their_order() -> None:
    (whole,) = timeline.spans([step(3, 10, generate=1, train=2, load=0.5, save=0, step=4)], ())
    assert (whole.who, whole.what, whole.about, whole.begin - AT, whole.end - AT) == (
        "trainer",
        "step",
        "step 3",
        6,
        10,
    )
    assert [(part.what, part.begin - AT, part.end - AT) for part in whole.parts] == [
        ("wait for samples", 6, 7),
        ("train", 7, 9),
        ("wait for loads", 9, 9.5),
    ]


def test_parts_that_are_longer_than_their_step_end_with_it() -> None:
    (whole,) = timeline.spans([step(1, 10, generate=3, train=3, step=4)], ())
    assert [(part.begin - AT, part.end - AT) for part in whole.parts] == [(6, 9), (9, 10)]


def test_a_step_of_which_only_the_parts_are_known_is_their_sum() -> None:
    (whole,) = timeline.spans([step(1, 10, train=3)], ())
    assert (whole.begin - AT, whole.end - AT) == (7, 10)


def test_what_began_when_is_by_the_driver_whenever_it_was_told() -> None:
    generate = event("generate", 9, step=1, explorer="explorer-1", version=0, began=AT + 1, total_s=2.0)
    load = event("load", 9, version=1, explorer="explorer-1", began=AT + 3, total_s=2.0, paused_s=0.5)
    assert told(generate, load) == [("explorer-1", "generate", 1, 3), ("explorer-1", "load", 3, 5)]
    (span,) = timeline.spans((), [load])
    assert [(part.what, part.begin - AT, part.end - AT) for part in span.parts] == [("pause", 4.5, 5)]


def test_a_save_is_written_and_then_committed() -> None:
    save = event("commit", 20, step=4, began=AT + 10, written_s=1.5, total_s=2.0)
    (span,) = timeline.spans((), [save])
    assert [(part.what, part.begin - AT, part.end - AT) for part in span.parts] == [
        ("write", 10, 11.5),
        ("commit", 11.5, 12),
    ]


def test_a_version_is_digested_before_it_is_published() -> None:
    publish = event("publish", 10, version=1, digest_s=0.5, sealed_s=1.0, total_s=3.0)
    assert told(publish) == [("node agents", "digest", 7.5, 8), ("node agents", "publish", 8, 10)]


def test_what_an_older_run_did_not_note_stands_where_it_was_told() -> None:
    older = [
        event("publish", 10, version=1, total_s=3.0),
        event("load", 12, version=1, explorer="explorer-0", total_s=1.0, paused_s=None),
        event("commit", 14, step=1, total_s=2.0),
    ]
    assert told(*older) == [
        ("node agents", "publish", 7, 10),
        ("explorer-0", "load", 11, 12),
        ("checkpoints", "save", 12, 14),
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"total_s": None}, {"total_s": "long"}, {"time": None}, {"total_s": -1.0}, {"paused_s": 99.0}, {"began": "x"}],
)
def test_damaged_events_make_no_impossible_spans(wrong: dict[str, Any]) -> None:
    fields = {"version": 1, "explorer": "explorer-0", "total_s": 1.0, "paused_s": 0.5}
    load = synthetic.event("load", **{"time": AT + 12, **fields, **wrong})
    for span in timeline.spans((), [load, event("dance", 1)]):
        assert span.begin <= span.end
        for part in span.parts:
            assert span.begin <= part.begin <= part.end <= span.end


def test_lanes_are_in_the_order_of_the_work_and_of_the_explorers_numbers() -> None:
    loads = [event("load", explorer=f"explorer-{n}", version=0, total_s=0.1) for n in (10, 2, 0)]
    saves = [event("commit", step=1, total_s=0.1), event("publish", version=0, total_s=0.1)]
    lanes = timeline.span_lanes(timeline.spans([step(1, 2, train=1)], [*loads, *saves]))
    assert list(lanes) == ["trainer", "node agents", "checkpoints", "explorer-0", "explorer-2", "explorer-10"]


TIMES = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=30)


@given(times=TIMES)
def test_in_a_row_nothing_overlaps_and_nothing_is_lost(times: list[tuple[float, float]]) -> None:
    spans = [TimelineSpan("a", "b", "", begin, begin + took) for begin, took in sorted(times)]
    rows = timeline.span_rows(spans)
    assert sum(map(len, rows)) == len(spans)
    for row in rows:
        for before, after in pairwise(row):
            assert before.end <= after.begin <= after.end


def test_an_overlap_by_the_jitter_of_clocks_needs_no_second_row() -> None:
    first, second = TimelineSpan("a", "b", "", 0, 1.0004), TimelineSpan("a", "b", "", 1.0, 2)
    assert timeline.span_rows([first, second]) == [[first, second._replace(begin=1.0004)]]
    assert len(timeline.span_rows([first, second._replace(begin=0.9)])) == 2


def test_versions_held_are_those_that_were_loaded_when_a_step_began() -> None:
    def load(version: int, end: float, attempt: int = 0, explorer: str = "explorer-0") -> Event:
        late = event("load", 99, version=version, explorer=explorer, began=AT + end - 0.5, total_s=0.5)
        return replace(late, attempt=attempt)

    metrics = [step(1, 2, step=1), step(2, 3, step=1), step(3, 4, step=1), step(3, 12, attempt=1, step=1)]
    events = [load(0, 0.9), load(1, 2.5), load(0, 1.5, explorer="explorer-1"), load(2, 11.5, attempt=1)]
    assert timeline.held_by_step(metrics, events) == {
        "explorer-0": [(1.0, 0.0), (2.0, 0.0), (3.0, 1.0), (3.0, None)],
        "explorer-1": [(1.0, None), (2.0, 0.0), (3.0, 0.0), (3.0, None)],
    }
