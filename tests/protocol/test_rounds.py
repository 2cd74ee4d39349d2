"""Groups for broadcasts and their rounds, as a book without a cluster."""

from __future__ import annotations

import pytest

from trinity_sync.protocol.rounds import TRAINER, RoundBook, RoundError


def book(explorers: int = 2) -> RoundBook:
    made = RoundBook()
    made.open("host", 29500, [["weight", "torch.bfloat16", [2]]], explorers)
    return made


def test_members_get_their_ranks_once() -> None:
    rounds = book()
    first, second = rounds.join("explorer-0"), rounds.join("explorer-1")
    assert [(group.rank, group.world_size, group.port) for group in (first, second)] == [(1, 3, 29500), (2, 3, 29500)]
    assert rounds.join("explorer-0") == first
    with pytest.raises(RoundError, match=r"explorer-2 cannot join: .* for 2 explorer\(s\), explorer-0, explorer-1"):
        rounds.join("explorer-2")


def test_nobody_joins_what_is_not_there() -> None:
    with pytest.raises(RoundError, match="there is no group for explorer-0"):
        RoundBook().join("explorer-0")
    with pytest.raises(RoundError, match="at least 1 explorer"):
        RoundBook().open("host", 1, None, 0)


def test_a_round_begins_when_all_are_there() -> None:
    rounds = book()
    rounds.join("explorer-0")
    assert rounds.missing() == "the trainer and 2 of 2 explorer(s) (explorer-0)"
    assert rounds.arrive("explorer-0", None) == 1
    assert rounds.arrive(TRAINER, 7) == 1
    assert rounds.missing() == "1 of 2 explorer(s)"
    assert rounds.rounds == 0
    assert rounds.arrive("explorer-1", None) == 1
    assert (rounds.rounds, rounds.step) == (1, 7)
    assert rounds.arrive(TRAINER, 8) == 2


def test_who_withdraws_is_not_counted() -> None:
    rounds = book(1)
    rounds.arrive("explorer-0", None)
    rounds.withdraw("explorer-0")
    rounds.arrive(TRAINER, 7)
    assert rounds.rounds == 0
    assert rounds.missing() == "1 of 1 explorer(s)"


def test_a_trainer_says_what_it_sends() -> None:
    with pytest.raises(RoundError, match="which step"):
        book().arrive(TRAINER, None)


def test_a_member_that_died_takes_the_group_with_it() -> None:
    rounds = book()
    rounds.join("explorer-0")
    rounds.arrive(TRAINER, 7)
    rounds.gone("somebody else")
    assert rounds.failed is None
    rounds.gone("explorer-0")
    with pytest.raises(RoundError, match="explorer-0 died, so its weight sync group is over"):
        rounds.arrive("explorer-1", None)
    rounds.open("host", 29501, None, 1)
    rounds.arrive(TRAINER, 7)
    rounds.arrive("explorer-1", None)
    assert rounds.rounds == 1
