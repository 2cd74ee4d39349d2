"""The roll: whoever bears a name now counts, and nobody that bore it before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.protocol.members import Member, Roll


def lives(name: str, count: int = 3) -> list[Member]:
    return [Member(name, (number, f"{number}")) for number in range(count)]


def test_a_process_that_is_started_again_is_another_member_of_the_same_name() -> None:
    first, second = Member.new("explorer-0"), Member.new("explorer-0")
    assert first != second
    assert str(first) == f"{second}" == "explorer-0"
    assert first.life < second.life


def test_late_news_of_an_old_death_does_not_concern_the_new_one() -> None:
    roll, (old, new, _) = Roll(), lives("explorer-0")
    assert roll.present(old)
    assert roll.present(new)
    assert not roll.gone(old)
    assert roll.present(new)
    assert roll.gone(new)


@pytest.mark.parametrize("known", [False, True])
def test_what_an_old_one_said_does_not_count_whether_it_was_known_or_not(known: bool) -> None:
    roll, (old, new, _) = Roll(), lives("explorer-0")
    assert not known or roll.present(old)
    assert roll.present(new)
    assert not roll.present(old)
    assert roll.over(old)
    assert roll.present(new)


def test_a_node_whose_clock_is_behind_can_follow_one_that_is_dead() -> None:
    roll, (behind, ahead, _) = Roll(), lives("explorer-0")
    assert roll.present(ahead)
    assert roll.gone(ahead)
    assert roll.present(behind)


def test_names_have_nothing_to_do_with_each_other() -> None:
    roll, (one, *_), (other, *_) = Roll(), lives("explorer-0"), lives("explorer-1")
    assert roll.present(one)
    assert roll.present(other)
    assert roll.gone(other)
    assert roll.present(one)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["says", "dies"]), st.integers(0, 3)), max_size=30))
def test_messages_in_any_order_as_often_as_they_like(news: list[tuple[str, int]]) -> None:
    """Of four processes that bore one name one after the other; each message late, doubled or lost."""
    roll, members = Roll(), lives("explorer-0", 4)
    alive: set[int] = set()
    dead: set[int] = set()
    for what, number in news:
        latest = all(number >= other for other in alive)
        if what == "says":
            assert roll.present(members[number]) == (number not in dead and latest)
            alive |= {number} - dead
        else:
            assert roll.gone(members[number]) == latest
            dead.add(number)
            alive.discard(number)
