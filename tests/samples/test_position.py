"""Where a run is in its data, against a list of what it has trained on."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.samples.position import GroupId, Numbering, Position

COUNTS = st.integers(1, 9)


@st.composite
def positions(draw: st.DrawFn) -> Position:
    """Of a run that trains on prompts as they become ready: with `step` to come, some before the next are still to be
    trained on.
    """
    count = draw(COUNTS)
    numbering = Numbering(draw(st.integers(1, 5)), draw(st.integers(0, 30)), count)
    taken = numbering.first_of(numbering.step + draw(st.integers(0, 4))) - numbering.first
    waiting = sorted(draw(st.sets(st.integers(0, taken + 10), max_size=8)))
    following = numbering.first + taken + len(waiting)
    names = [numbering.group(numbering.first + place) for place in waiting if numbering.first + place < following]
    return Position(numbering, numbering.group(following), names)


def to_come(position: Position, most: int) -> list[int]:
    waiting = [position.numbering.number(group) for group in position.waiting]
    following = position.numbering.number(position.next)
    return [*waiting, *range(following, following + most - len(waiting))]


@given(positions())
def test_it_is_read_as_it_was_written(position: Position) -> None:
    assert Position.of_json(json.loads(json.dumps(position.to_json()))) == Position(
        position.numbering, position.next, list(position.waiting)
    )


def test_what_earlier_releases_wrote_counts_from_the_first_step() -> None:
    found = Position.of_json({"groups_per_step": 4, "next": [3, 1], "waiting": [[2, 3]]})
    assert to_come(found, 3) == [7, 9, 10]


@given(positions(), COUNTS)
def test_with_other_steps_the_same_prompts_come(position: Position, count: int) -> None:
    changed = position.with_count(20, count)
    assert to_come(changed, 30) == to_come(position, 30)
    if count != position.numbering.per_step:
        assert min([*changed.waiting, changed.next]) == GroupId(20, 0)


@given(positions(), COUNTS)
def test_in_lockstep_it_says_how_many_are_missed_and_trained_on_twice(position: Position, count: int) -> None:
    old = position.numbering
    following, waiting = old.number(position.next), {old.number(group) for group in position.waiting}
    step = old.group(following - len(waiting)).step  # as many are trained on as were given out and do not wait
    trained = set(range(following)) - waiting
    found, missed, twice = position.in_step(step, count)
    first = found.numbering.first_of(step)
    assert first == old.first_of(step), "the step has the prompts of its own number, whatever their number is"
    assert missed == len(set(range(first)) - trained)
    assert twice == len([number for number in range(first, following) if number in trained])


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 5), st.integers(1, 5))
def test_of_a_run_in_lockstep_none_is_missed_and_none_comes_twice(
    a: int, b: int, c: int, first: int, then: int
) -> None:
    seen: list[int] = []
    position, step = Position.at(1, a), 1
    for count, steps in ((a, first), (b, then), (c, 2)):
        position, missed, twice = position.in_step(step, count)
        assert (missed, twice) == (0, 0)
        for _ in range(steps):
            number = position.numbering.first_of(step)
            seen += range(number, number + count)
            step += 1
        position = Position.of_json(Position(position.numbering, GroupId(step, 0)).to_json())
    assert seen == list(range(len(seen)))
