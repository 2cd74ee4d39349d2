from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tracking import synthetic
from trinity_sync.tracking.events import Event, LogLine, parse_event
from trinity_sync.tracking.run_state import RunState

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ("event", "time", "attempt", "step", "version", "explorer", "where", "error", "what", "reward/mean", "loss")
EVENTS = st.sampled_from(("phase", "publish", "load", "save", "commit", "fault", "skip"))


def event(name: str, at: float, attempt: int = 0, **fields: Any) -> Event:
    return synthetic.event(name, time=at, attempt=attempt, **fields)


def step(number: int, at: float, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"step": number, "time": at, "attempt": attempt, **fields}


def fed(*lines: LogLine, total: int | None = None) -> RunState:
    state = RunState(total)
    for line in lines:
        state.take(line, 0.0)
    return state


def test_throughput_is_what_was_trained_on_over_the_seconds_that_it_took() -> None:
    state = fed(*(step(n, 10.0 * n, **{"batch/samples": 40.0, "batch/tokens": 120.0}) for n in range(1, 4)), total=10)
    assert (state.samples_per_s, state.tokens_per_s) == (4.0, 12.0)
    assert (state.pace_s, state.left_s) == (10.0, 70.0)


def test_throughput_goes_by_the_last_steps() -> None:
    slow = [step(n, 100.0 * n, **{"batch/samples": 10.0}) for n in range(1, 50)]
    quick = [step(50 + n, 4900.0 + n, **{"batch/samples": 10.0}) for n in range(1, 21)]
    assert fed(*slow, *quick).samples_per_s == pytest.approx(10.0)


def test_an_unknown_throughput_is_none() -> None:
    state = fed(step(1, 1.0), step(2, 2.0))
    assert (state.samples_per_s, state.tokens_per_s) == (None, None)
    assert fed(step(1, 1.0, **{"batch/samples": 5.0})).samples_per_s is None


def test_the_first_step_of_an_attempt_is_no_measure() -> None:
    state = fed(step(1, 1.0), step(2, 3.0), event("phase", 100.0, 1, what="starting Ray"), step(3, 150.0, 1))
    assert state.pace_s is None


def test_explorers_are_behind_the_newest_version() -> None:
    state = fed(
        *(event("publish", float(n), version=n) for n in range(8)),
        event("load", 7.0, version=7, explorer="explorer-0"),
        event("load", 7.0, version=4, explorer="explorer-1"),
    )
    assert {name: state.behind(version) for name, version in state.held.items()} == {"explorer-0": 0, "explorer-1": 3}


def test_a_new_attempt_begins_afresh_but_keeps_what_was_learned_and_saved() -> None:
    state = fed(
        event("load", 1.0, version=1, explorer="explorer-0"),
        step(1, 1.0, **{"reward/mean": 0.1}),
        event("commit", 2.0, step=1),
        event("fault", 3.0, where="explorer-0", error="died"),
        event("phase", 50.0, 1, what="starting Ray"),
    )
    assert (state.attempt, state.began, state.faults, state.held, state.stepped) == (1, 50.0, 0, {}, None)
    assert (state.rewards, state.committed.step, state.busy) == ([0.1], 1, "starting Ray")


def test_lines_of_an_attempt_that_is_over_change_nothing() -> None:
    state = fed(step(5, 10.0, 1), event("fault", 3.0, 0, where="a", error="b"), step(9, 3.0, 0))
    assert (state.step, state.faults) == (5, 0)


def test_the_newest_fault_is_told_with_how_many_there_were() -> None:
    state = fed(*(event("fault", float(n), where=f"explorer-{n}", error="died") for n in range(3)))
    assert state.faults == 3
    assert state.fault is not None
    assert (str(state.fault), state.fault.at) == ("explorer-2: died", 2.0)


def test_who_failed_is_not_said_twice() -> None:
    state = fed(event("fault", 1.0, where="explorer-1", error="explorer-1 died before it could generate"))
    assert str(state.fault) == "explorer-1 died before it could generate"


def test_a_save_is_under_way_until_it_is_committed_or_a_later_one_is() -> None:
    state = fed(event("save", 1.0, step=10))
    assert state.saving == 10
    state.take(event("commit", 2.0, step=20), 0.0)
    assert state.saving is None


def test_weights_that_are_committed_are_no_checkpoint_to_go_on_from() -> None:
    state = fed(event("commit", 1.0, step=10, kind="full"), event("commit", 2.0, step=11, kind="state_dict"))
    assert state.committed.step == 10


def test_a_run_is_busy_until_its_next_step() -> None:
    state = fed(event("phase", 1.0, what="starting Ray"))
    assert state.busy == "starting Ray"
    state.take(step(1, 2.0), 0.0)
    assert state.busy is None
    state.take(event("phase", 3.0, what="copying checkpoints"), 0.0)
    assert state.busy == "copying checkpoints"


def test_a_run_that_has_done_all_steps_does_not_stand_still() -> None:
    state = fed(*(step(n, float(n)) for n in range(1, 11)), total=10)
    assert state.stalled_s(1000.0) is None


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JSON | EVENTS), max_size=8))
def test_no_line_whatever_is_in_it_raises(lines: list[dict[str, Any]]) -> None:
    state = fed(*(parse_event(line) if "event" in line else line for line in lines), total=5)
    assert state.pace_s is None or state.pace_s >= 0
