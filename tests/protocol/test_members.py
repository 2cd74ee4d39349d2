"""The roll: whoever bears a name now counts, and nobody that bore it before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.protocol.rounds import Roll, RoundMember


def lives(name: str, count: int = 2) -> list[RoundMember]:
    return [RoundMember.new(name) for _ in range(count)]


def test_a_process_that_is_started_again_is_another_member_of_the_same_name() -> None:
    first, second = lives("explorer-0")
    assert first != second
    assert str(first) == f"{second}" == "explorer-0"


def test_late_news_of_an_old_death_does_not_concern_the_new_one() -> None:
    roll, (old, new) = Roll(), lives("explorer-0")
    assert roll.present(old)
    assert roll.present(new)
    assert not roll.gone(old)
    assert roll.present(new)
    assert roll.gone(new)


def test_what_an_old_one_said_does_not_count_once_the_new_one_has_spoken() -> None:
    roll, (old, new) = Roll(), lives("explorer-0")
    roll.hear(old)
    roll.hear(new)
    assert roll.present(old)
    assert roll.present(new)
    assert not roll.present(old)
    assert roll.present(new)


def test_neither_words_nor_clocks_order_the_lives_of_a_name() -> None:
    """The old one hangs, so nobody says that it is dead."""
    for old, new in (sorted(lives("explorer-0")), sorted(lives("explorer-0"), reverse=True)):
        roll = Roll()
        assert roll.present(old)
        assert roll.present(new)
        assert not roll.present(old)
        assert not roll.gone(old)


def test_who_is_dead_stays_so_and_the_one_before_it_counts_again() -> None:
    roll, (old, new) = Roll(), lives("explorer-0")
    roll.present(old)
    roll.present(new)
    roll.gone(new)
    assert roll.present(old)
    assert not roll.present(new)
    assert (roll.is_dead(old), roll.is_dead(new)) == (False, True)


def test_names_have_nothing_to_do_with_each_other() -> None:
    roll, (one, _), (other, _) = Roll(), lives("explorer-0"), lives("explorer-1")
    assert roll.present(one)
    assert roll.present(other)
    assert roll.gone(other)
    assert roll.present(one)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["says", "dies"]), st.integers(0, 3)), max_size=30))
def test_messages_in_any_order_as_often_as_they_like(news: list[tuple[str, int]]) -> None:
    """Of four processes that bore one name one after the other; each message late, doubled or lost."""
    roll, members = Roll(), lives("explorer-0", 4)
    for member in members:
        roll.hear(member)
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
