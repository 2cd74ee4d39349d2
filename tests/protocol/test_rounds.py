"""Groups for broadcasts and their rounds, as a book without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinity_sync.protocol.rounds import TRAINER, RoundBook, RoundError, RoundMember, RoundStart

member = RoundMember.new
A, B, C, T = (member(name) for name in ("explorer-0", "explorer-1", "explorer-2", TRAINER))


def book(explorers: int = 2) -> RoundBook:
    made = RoundBook()
    made.open(T, "host", 29500, [["weight", "torch.bfloat16", [2]]], explorers)
    return made


def test_members_get_their_ranks_once() -> None:
    rounds = book()
    first, second = rounds.join(A), rounds.join(B)
    assert [(group.rank, group.world_size, group.port) for group in (first, second)] == [(1, 3, 29500), (2, 3, 29500)]
    assert rounds.join(A) == first
    with pytest.raises(RoundError, match=r"explorer-2 cannot join: .* for 2 explorer\(s\), explorer-0, explorer-1"):
        rounds.join(C)


def test_nobody_joins_what_is_not_there() -> None:
    with pytest.raises(RoundError, match="there is no group for explorer-0"):
        RoundBook().join(A)
    with pytest.raises(RoundError, match="at least 1 explorer"):
        RoundBook().open(T, "host", 1, None, 0)


def test_a_round_begins_when_all_are_there() -> None:
    rounds = book()
    rounds.join(A)
    assert rounds.missing() == "the trainer and 2 of 2 explorer(s) (explorer-0)"
    meeting = rounds.arrive(A, None)
    assert rounds.arrive(T, 7) is meeting
    assert rounds.missing() == "1 of 2 explorer(s)"
    assert not meeting.ended
    assert rounds.arrive(B, None) is meeting
    assert (meeting.step, meeting.failed) == (7, None)
    assert rounds.arrive(T, 8) is not meeting


def test_programs_with_a_group_of_their_own_meet_without_one() -> None:
    rounds = RoundBook()
    rounds.arrive(A, None)
    assert rounds.arrive(T, 7).step == 7


def test_who_withdraws_is_not_counted() -> None:
    rounds = book(1)
    rounds.withdraw(rounds.arrive(A, None), A)
    assert not rounds.arrive(T, 7).ended
    assert rounds.missing() == "1 of 1 explorer(s) (explorer-0)"


def test_a_trainer_says_what_it_sends() -> None:
    with pytest.raises(RoundError, match="which step"):
        book().arrive(T, None)


def test_a_member_that_died_takes_the_group_with_it() -> None:
    rounds = book()
    rounds.join(A)
    meeting = rounds.arrive(T, 7)
    rounds.gone(member("somebody else"))
    assert rounds.failed is None
    rounds.gone(A)
    assert meeting.failed == "explorer-0 died, so its weight sync group is over; set up another one"
    with pytest.raises(RoundError, match="explorer-0 died, so its weight sync group is over"):
        rounds.arrive(B, None)
    rounds.open(T, "host", 29501, None, 1)
    rounds.arrive(T, 7)
    assert rounds.arrive(B, None).step == 7


# ---- members have names, and lives


def test_an_explorer_of_the_group_before_does_not_start_a_round_of_the_new_one() -> None:
    rounds = book(1)
    rounds.join(A)
    rounds.open(T, "host", 29501, None, 1)
    with pytest.raises(
        RoundError, match="explorer-0 belongs to a weight sync group that is over; join the current one"
    ):
        rounds.arrive(A, None)
    assert not rounds.arrive(T, 7).ended
    rounds.join(A)
    assert rounds.arrive(A, None).step == 7


def test_who_waits_in_a_group_is_told_that_another_one_took_its_place() -> None:
    rounds = book(1)
    meeting = rounds.arrive(A, None)
    rounds.open(T, "host", 29501, None, 1)
    assert meeting.failed == "weight sync group 2 took the place of the one before; join that"


def test_late_news_of_an_old_death_leaves_the_group_of_the_new_one_alone() -> None:
    rounds, again = book(1), member("explorer-0")
    rounds.join(A)
    rounds.open(T, "host", 29501, None, 1)
    rounds.join(again)
    rounds.arrive(again, None)
    rounds.gone(A)
    assert rounds.failed is None
    assert rounds.arrive(T, 7).step == 7


def test_an_explorer_that_is_started_again_ends_the_group_of_the_process_before_it() -> None:
    rounds, again = book(1), member("explorer-0")
    rounds.join(A)
    meeting = rounds.arrive(T, 7)
    with pytest.raises(RoundError, match="explorer-0 was restarted, so its weight sync group is over"):
        rounds.join(again)
    assert meeting.failed is not None
    assert not rounds.joinable(0)
    rounds.open(T, "host", 29501, None, 1)
    assert rounds.joinable(1)
    assert rounds.join(again).rank == 1
    for late in (lambda: rounds.join(A), lambda: rounds.arrive(A, None)):
        with pytest.raises(RoundError, match=r"is dead or was restarted|belongs to a weight sync group that is over"):
            late()
    assert rounds.failed is None


def test_a_trainer_of_the_group_before_neither_meets_nor_has_sent_anything() -> None:
    rounds, again = book(1), member(TRAINER)
    rounds.open(again, "host", 29501, None, 1)
    rounds.arrive(A, None)
    with pytest.raises(RoundError, match="trainer belongs to a weight sync group that is over"):
        rounds.arrive(T, 3)
    assert (rounds.sends(T), rounds.sends(again)) == (False, True)
    rounds.gone(T)
    assert rounds.failed is None
    with pytest.raises(RoundError, match="this trainer is dead"):
        rounds.arrive(T, 3)
    assert rounds.arrive(again, 4).step == 4


def test_a_trainer_that_was_started_again_is_not_ousted_by_what_the_one_before_it_said() -> None:
    rounds, again = book(1), member(TRAINER)
    rounds.open(again, "host", 29501, None, 1)
    with pytest.raises(RoundError, match="this trainer is dead or was restarted, so it cannot open a group"):
        rounds.open(T, "host", 29500, None, 1)
    assert rounds.joinable(1)
    rounds.gone(again)
    assert rounds.open(T, "host", 29500, None, 1).id == 3


def test_another_process_than_the_one_that_opened_the_group_may_say_that_the_trainer_is_ready() -> None:
    rounds, driver = book(1), member(TRAINER)
    rounds.arrive(A, None)
    assert rounds.arrive(driver, 7).step == 7
    for opener in (T, member(TRAINER)):
        rounds.open(opener, "host", 29501, None, 1)
        rounds.join(A)
        rounds.arrive(A, None)
        assert rounds.arrive(driver, 8).step == 8
        assert rounds.sends(driver)
    rounds.gone(driver)
    assert rounds.failed is not None


def test_of_two_trainers_the_one_that_came_last_says_what_is_sent() -> None:
    """The one before hangs, and nobody can tell."""
    rounds, hangs = RoundBook(), member(TRAINER)
    for trainer, step in ((T, 14), (hangs, 20), (T, 15)):
        rounds.arrive(trainer, step)
    assert rounds.arrive(A, None).step == 15


NAMES = ("explorer-0", "explorer-1")


class Book(RuleBasedStateMachine):
    """Processes are started again and again under their names, and all that any of them ever says may come late and
    more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounds = RoundBook()
        self.lives: dict[str, list[RoundMember]] = {name: [] for name in (*NAMES, TRAINER)}
        for name in self.lives:
            self.start_again(name)
        self.joined: dict[RoundMember, int] = {}
        self.open_now: RoundStart | None = None
        self.waiting: list[tuple[RoundMember, RoundStart]] = []
        self.dead: set[RoundMember] = set()
        self.step = 0
        self.openers: set[RoundMember] = set()

    def any_life(self, data: st.DataObject, name: str) -> RoundMember:
        return data.draw(st.sampled_from(self.lives[name]))

    @rule(name=st.sampled_from((*NAMES, TRAINER)))
    def start_again(self, name: str) -> None:
        """The one before is dead, or hangs; nobody has been told. The new one has itself heard of."""
        self.lives[name].append(member(name))
        self.rounds.roll.hear(self.lives[name][-1])

    @rule(name=st.sampled_from((*NAMES, TRAINER)), data=st.data())
    def a_death_is_told(self, name: str, data: st.DataObject) -> None:
        gone, group, failed = self.any_life(data, name), self.rounds.group, self.rounds.failed
        if gone == self.lives[name][-1]:
            self.start_again(name)
        self.dead.add(gone)
        self.rounds.gone(gone)
        concerned = group is not None and self.joined.get(gone) == group.id
        assert concerned or self.rounds.failed == failed, "a death that is none of its business failed the group"
        assert not concerned or self.rounds.failed is not None, "a member's death was overlooked"

    @rule(late=st.booleans(), data=st.data())
    def open(self, late: bool, data: st.DataObject) -> None:
        trainer = self.any_life(data, TRAINER) if late else self.lives[TRAINER][-1]
        try:
            group = self.rounds.open(trainer, "host", 1, None, len(NAMES))
        except RoundError:
            assert trainer in self.dead or trainer != self.lives[TRAINER][-1]
            return
        assert trainer not in self.dead
        self.joined[trainer] = group.id
        self.openers.add(trainer)

    @precondition(lambda self: self.rounds.group is not None)
    @rule(name=st.sampled_from(NAMES), data=st.data())
    def join(self, name: str, data: st.DataObject) -> None:
        explorer, usable = self.any_life(data, name), self.rounds.joinable(0)
        try:
            group = self.rounds.join(explorer)
        except RoundError:
            newest = explorer == self.lives[name][-1]
            assert not (newest and usable and self.rounds.joinable(0)), "the process of now was not let in"
            return
        assert explorer not in self.dead
        self.joined[explorer] = group.id

    @rule(name=st.sampled_from((*NAMES, TRAINER)), data=st.data())
    def arrive(self, name: str, data: st.DataObject) -> None:
        one = self.any_life(data, name)
        before = self.joined.get(one)
        self.step += 1
        try:
            meeting = self.rounds.arrive(one, self.step if name == TRAINER else None)
        except RoundError:
            return
        group = self.rounds.group
        assert one not in self.dead
        # A process of the trainer that opens no group may speak for it in each.
        bound = name != TRAINER or one in self.openers
        assert group is None or not bound or before in (None, group.id), "one of an earlier group was counted"
        if group is not None:
            self.joined[one] = group.id
        self.waiting.append((one, meeting))
        if meeting.step is not None:
            here = list(meeting.arrived)
            assert self.dead.isdisjoint(here)
            explorers = [other.name for other in here if other.name != TRAINER]
            assert len(explorers) == len(set(explorers))
            assert len(explorers) == len(NAMES) if group is not None else explorers
            assert group is None or {self.joined[other] for other in here} == {group.id}
            *_, sender = (other for other, _ in self.waiting if other.name == TRAINER and other in here)
            assert meeting.step == meeting.arrived[sender]

    @rule(data=st.data())
    @precondition(lambda self: bool(self.waiting))
    def withdraw(self, data: st.DataObject) -> None:
        one, meeting = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        if not meeting.ended:
            self.rounds.withdraw(meeting, one)

    @invariant()
    def nobody_waits_for_what_cannot_begin(self) -> None:
        for one, meeting in self.waiting:
            if not meeting.ended and one not in self.dead and one in meeting.arrived:
                assert meeting is self.rounds._meeting, f"{one} waits for a round that is over"


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
