"""The commit book: any order of reports ends in the right decision."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trinity_sync.errors import RunError
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import FULL, STATE_DICT, Abort, Cleanup, Commit, Decision, Grant, Kind, MoveTracker
from trinity_sync.protocol.step import StepStatus


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_book(**options: object) -> CommitBook:
    return CommitBook(**{"clock": Clock(), "step_timeout_s": 60.0, **options})  # type: ignore[arg-type]


def only(decisions: list[Decision], kind: type) -> list:
    return [decision for decision in decisions if isinstance(decision, kind)]


def commit_all(book: CommitBook, decisions: list[Decision]) -> list[Decision]:
    """Carry out every commit at once; returns all decisions, those that follow included."""
    seen, todo = [], list(decisions)
    while todo:
        decision = todo.pop(0)
        seen.append(decision)
        if isinstance(decision, Commit):
            todo += book.commit_done(decision.step, decision.kind)
    return seen


# ---- counts and names, in any order


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_counted_parts_commit_in_any_order_of_registration_mark_and_report(order: tuple[int, ...]) -> None:
    book = make_book()
    calls = [
        lambda: book.register(7, weights=1, checkpoint=1),
        lambda: book.mark(7, FULL),
        lambda: book.finished(7, weights=True, report="w"),
        lambda: book.finished(7, report="o"),
        # A second rank registers nothing more; it only says again that the step is to be committed.
        lambda: book.mark(7, FULL),
    ]
    commits = only([decision for index in order for decision in calls[index]()], Commit)
    assert [(commit.step, commit.kind) for commit in commits] == [(7, FULL)]


def test_several_registrations_add_up() -> None:
    book = make_book()
    book.register(1, checkpoint=1)
    book.register(1, checkpoint=2)
    book.mark(1, FULL)
    assert [only(book.finished(1, report=str(i)), Commit) != [] for i in range(3)] == [False, False, True]


def test_a_doubled_registration_counts_once() -> None:
    book = make_book()
    book.register(1, checkpoint=1, report="call-1")
    book.register(1, checkpoint=1, report="call-1")
    book.mark(1, FULL)
    assert only(book.finished(1, report="a"), Commit)


def test_a_named_part_reported_twice_counts_once() -> None:
    book = make_book()
    book.register(3, checkpoint=2)
    book.mark(3, FULL)
    assert not only(book.finished(3, part="a") + book.finished(3, part="a"), Commit)
    assert only(book.finished(3, part="b"), Commit)


def test_a_doubled_report_of_a_counted_part_counts_once() -> None:
    book = make_book()
    book.register(3, checkpoint=2)
    book.mark(3, FULL)
    assert not only(book.finished(3, report="x") + book.finished(3, report="x"), Commit)
    assert only(book.finished(3, report="y"), Commit)


def test_begin_waits_for_every_named_part_and_hands_on_their_files() -> None:
    book = make_book()
    book.begin(5, FULL, ["r0", "r1"], meta={"backend": "fsdp"})
    book.finished(5, part="r1", files=[("b", 2, "y")])
    (commit,) = only(book.finished(5, part="r0", files=[("a", 1, "x")]), Commit)
    assert commit.files == (("a", 1, "x"), ("b", 2, "y"))
    assert commit.meta == {"backend": "fsdp"}


def test_parts_reported_before_begin_are_not_lost() -> None:
    book = make_book()
    book.finished(5, part="r0")
    assert only(book.begin(5, FULL, ["r0"]), Commit)


def test_the_digest_is_waited_for_only_where_it_was_named() -> None:
    book = make_book()
    book.begin(1, STATE_DICT, ["r0", "digest"])
    assert not only(book.finished(1, part="r0"), Commit)
    (commit,) = only(book.finished(1, part="digest", digest="ab"), Commit)
    assert commit.digest == "ab"
    book.begin(2, STATE_DICT, ["r0"])
    assert only(book.finished(2, part="r0"), Commit)


def test_a_digest_reported_before_begin_is_known_at_the_commit() -> None:
    book = make_book()
    book.finished(1, part="digest", digest="ab")
    book.begin(1, STATE_DICT, ["r0", "digest"])
    (commit,) = only(book.finished(1, part="r0"), Commit)
    assert commit.digest == "ab"


def test_two_different_digests_fail_the_step() -> None:
    book = make_book()
    book.begin(1, STATE_DICT, ["r0", "r1"])
    book.finished(1, part="r0", digest="ab")
    (failure,) = only(book.finished(1, part="r1", digest="cd"), Abort)
    assert "ab" in failure.error
    assert "cd" in failure.error


def test_two_parts_that_wrote_one_file_differently_fail_the_step() -> None:
    book = make_book()
    book.begin(1, FULL, ["r0", "r1"])
    book.finished(1, part="r0", files=[("config.json", 3, "x")])
    (failure,) = only(book.finished(1, part="r1", files=[("config.json", 3, "y")]), Abort)
    assert "config.json" in failure.error


def test_a_step_nobody_asked_to_commit_is_not_committed() -> None:
    book = make_book()
    book.register(1, checkpoint=1)
    assert not only(book.finished(1, report="a"), Commit)
    assert only(book.mark(1, FULL), Commit)


def test_a_mark_without_parts_commits_nothing_and_never_times_out() -> None:
    book = make_book()
    assert book.mark(4, STATE_DICT) == []
    book._clock.now += 1e6  # type: ignore[attr-defined]
    assert book.tick() == []


def test_verls_trainer_has_all_the_time_for_what_it_writes_itself_and_nobody_else_has() -> None:
    book = make_book()
    book.begin(4, FULL, ["actor/model", "actor/beside", "actor/beside-data_1.pt"])
    book._clock.now += 1e6  # type: ignore[attr-defined]
    assert [decision.step for decision in only(book.tick(), Abort)] == [4]
    book.begin(5, FULL, ["actor/model", "actor/beside", "actor/beside-data_1.pt"])
    book.finished(5, part="actor/model", report="a")
    book._clock.now += 1e6  # type: ignore[attr-defined]
    assert book.tick() == []
    book.finished(5, part="actor/beside-data_1.pt", report="b")
    assert only(book.finished(5, part="actor/beside", report="c"), Commit)


# ---- weights first, the rest later


def test_weights_are_committed_while_checkpoint_parts_are_still_out() -> None:
    book = make_book()
    book.register(2, weights=1, checkpoint=1)
    book.mark(2, STATE_DICT)
    book.mark(2, FULL)
    (commit,) = only(book.finished(2, weights=True, part="model", files=[("m", 1, "x")]), Commit)
    assert (commit.kind, commit.partial, commit.files) == (STATE_DICT, True, (("m", 1, "x"),))
    assert book.commit_done(2, STATE_DICT) == [MoveTracker(STATE_DICT, 2)]
    (commit,) = only(book.finished(2, part="optim", files=[("o", 1, "y")]), Commit)
    assert (commit.kind, commit.partial, len(commit.files)) == (FULL, False, 2)
    assert book.commit_done(2, FULL) == [MoveTracker(FULL, 2)]


def test_weights_whose_files_nobody_told_wait_for_the_rest_of_the_step() -> None:
    """Which of the staged files are theirs is not known, and an empty checkpoint would be committed."""
    book = make_book()
    book.register(2, weights=2, checkpoint=1)
    book.mark(2, STATE_DICT)
    book.mark(2, FULL)
    book.finished(2, weights=True, part="r1", files=[])  # it has told that it wrote none
    assert not only(book.finished(2, weights=True, part="r0", files=None), Commit)
    assert book.status(2, STATE_DICT).missing == ("1 of 1 counted checkpoint parts",)
    book, decisions = restart(book, {})
    assert not only(decisions, Commit)
    (commit,) = only(book.finished(2, part="optim", files=[("o", 1, "y")]), Commit)
    assert (commit.kind, commit.partial) == (FULL, False)
    assert book.commit_done(2, FULL) == [MoveTracker(STATE_DICT, 2), MoveTracker(FULL, 2)]


def test_weights_that_are_committed_without_their_files_told_do_not_hold_up_others() -> None:
    book = make_book()
    book.begin(2, STATE_DICT, ["actor"])
    commit_all(book, book.finished(2, part="actor", files=None))
    book.begin(2, FULL, ["critic", "optim"], weights_parts=["critic"])
    (commit,) = only(book.finished(2, part="critic", files=[("c", 1, "x")]), Commit)
    assert (commit.kind, commit.partial, commit.files) == (STATE_DICT, True, (("c", 1, "x"),))


def test_weights_that_stand_alone_take_the_whole_staging_folder() -> None:
    book = make_book()
    book.begin(2, STATE_DICT, ["w"])
    (commit,) = only(book.finished(2, part="w"), Commit)
    assert not commit.partial


def test_a_committed_state_dict_is_upgraded_to_full() -> None:
    clock = Clock()
    book = make_book(clock=clock)
    book.begin(2, STATE_DICT, ["w"])
    weights = commit_all(book, book.finished(2, part="w", files=[("w", 1, "x")]))
    clock.now += 3.0
    book.begin(2, FULL, ["optim"])
    clock.now += 4.0
    (commit,) = only(book.finished(2, part="optim", files=[("o", 1, "y")]), Commit)
    assert (commit.kind, commit.files) == (FULL, (("o", 1, "y"), ("w", 1, "x")))
    assert (only(weights, Commit)[0].opened, commit.opened) == (1000.0, 1003.0), "each save takes its own time"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("weights_first", [False, True])
def test_a_full_commit_is_as_durable_as_it_was_asked_for_whatever_the_weights_are(
    weights_first: bool, restarted: bool
) -> None:
    book = make_book()
    asked = [("state_dict", ["w"], False), ("full", ["w", "o"], None)]
    for kind, parts, durable in asked if weights_first else asked[::-1]:
        book.begin(3, kind, parts, weights_parts=["w"], durable=durable)  # type: ignore[arg-type]
    if restarted:
        dumped = json.loads(json.dumps(book.dump(3)))
        book = make_book()
        book.restore(dumped)
    weights = only(book.finished(3, weights=True, part="w", files=[("w", 1, "x")]), Commit)
    book.commit_done(3, STATE_DICT)
    full = only(book.finished(3, part="o", files=[("o", 1, "x")]), Commit)
    assert [(commit.kind, commit.durable) for commit in (*weights, *full)] == [("state_dict", False), ("full", None)]


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, None), (None, True)])
def test_what_has_to_be_durable_for_one_who_asks_is_durable(order: tuple[bool | None, bool | None]) -> None:
    book = make_book()
    book.begin(3, "full", ["a"], durable=order[0])
    book.begin(3, "full", ["b"], durable=order[1])
    book.finished(3, part="a")
    assert [commit.durable for commit in only(book.finished(3, part="b"), Commit)] == [True]


def test_a_full_commit_is_durable_where_the_weights_are_that_it_takes_the_place_of() -> None:
    book = make_book()
    book.begin(3, "state_dict", ["w"], durable=True)
    commit_all(book, book.finished(3, weights=True, part="w"))
    book.begin(3, "full", ["w", "o"], weights_parts=["w"])
    assert [commit.durable for commit in only(book.finished(3, part="o"), Commit)] == [True]


def test_parts_that_come_after_a_full_commit_are_added_by_another_one() -> None:
    book = make_book()
    book.register(2, checkpoint=1)
    book.mark(2, FULL)
    commit_all(book, book.finished(2, part="a"))
    book.register(2, checkpoint=1)
    (commit,) = only(book.finished(2, part="b", files=[("b", 1, "y")]), Commit)
    assert commit.kind == FULL
    assert book.status(2).committed == FULL


def register_and_save(book: CommitBook, tickets: tuple[str, ...]) -> list[Decision]:
    """As programs with counts do it: two named parts, and who saves them has a ticket."""
    decisions = book.register(2, weights=2, report=tickets[0]) + book.mark(2, STATE_DICT)
    for number, ticket in enumerate(tickets):
        decisions += book.finished(2, part=f"model-{number}", weights=True, ticket=ticket)
    return commit_all(book, decisions)


def test_a_committed_step_that_is_saved_again_waits_for_nothing() -> None:
    book = make_book()
    assert only(register_and_save(book, ("a", "b")), Commit)
    assert [book.has(2, part) for part in ("model-0", "model-1", "model-2")] == [True, True, False]
    assert not only(register_and_save(book, ("c", "d")), Commit)
    assert book.status(2).state == "committed"
    assert book.open_steps() == []
    book._clock.now += 1e6  # type: ignore[attr-defined]
    assert book.tick() == []


def test_a_step_that_is_saved_again_while_it_is_committed_is_neither_written_over_nor_waited_for() -> None:
    book = make_book()
    book.register(2, weights=2)
    book.mark(2, STATE_DICT)
    for part, ticket in (("model-0", "a"), ("model-1", "b")):
        assert not book.has(2, part)
        decisions = book.finished(2, part=part, weights=True, ticket=ticket)
        assert book.has(2, part)
    assert only(decisions, Commit)
    assert not only(register_and_save(book, ("c", "d")), Commit)
    book.commit_done(2, STATE_DICT)
    assert book.status(2).state == "committed"
    assert book.open_steps() == []


def test_a_doubled_report_of_a_committed_part_stands_for_no_other() -> None:
    book = make_book()
    register_and_save(book, ("a", "b"))
    book.register(2, weights=1)
    book.finished(2, part="model-0", weights=True, ticket="a")
    assert book.status(2).missing == ("1 of 3 counted weights parts",)
    restarted, _ = restart(book, {2: (0, STATE_DICT)})
    restarted.finished(2, part="model-0", weights=True, ticket="a")
    assert restarted.status(2).missing == ("1 of 3 counted weights parts",)
    assert only(restarted.finished(2, part="model-2", weights=True, ticket="c"), Commit)


def test_saving_a_committed_step_again_is_refused() -> None:
    book = make_book()
    book.begin(2, FULL, ["a"])
    commit_all(book, book.finished(2, part="a"))
    with pytest.raises(RunError, match="already committed"):
        book.begin(2, FULL, ["a"])


# ---- trackers


def test_a_step_that_was_deleted_can_be_saved_again() -> None:
    book = make_book()
    book.begin(2, FULL, ["a"])
    commit_all(book, book.finished(2, part="a", files=[("a", 1, "x")]))
    book.forget(2)
    assert not book.has(2, "a")
    assert book.status(2, FULL).state == "committed", "for those who ask late"
    book.begin(2, FULL, ["a"])
    assert book.status(2, FULL).state == "open"
    (commit,) = only(book.finished(2, part="a", files=[("a", 1, "y")]), Commit)
    assert commit.files == (("a", 1, "y"),)
    book.commit_done(2, FULL)
    assert book.has(2, "a")
    assert book.open_steps() == []


def test_steps_that_commit_out_of_order_never_move_a_tracker_back() -> None:
    book = make_book()
    for step in (10, 20):
        book.begin(step, FULL, ["a"])
    assert only(commit_all(book, book.finished(20, part="a")), MoveTracker) == [
        MoveTracker(STATE_DICT, 20),
        MoveTracker(FULL, 20),
    ]
    assert only(commit_all(book, book.finished(10, part="a")), MoveTracker) == []
    assert book.trackers == {FULL: 20, STATE_DICT: 20}


def test_trackers_begin_with_what_is_on_the_disk() -> None:
    book = make_book(attempt=1, committed=[(10, 0, FULL), (15, 0, STATE_DICT)])
    assert book.trackers == {FULL: 10, STATE_DICT: 15}


def test_a_step_of_an_earlier_attempt_counts_as_committed_until_it_is_saved_again() -> None:
    book = make_book(attempt=1, committed=[(10, 0, FULL)])
    book.mark(10, STATE_DICT)
    assert book.status(10).state == "committed"
    book.begin(10, FULL, ["a"])
    assert book.status(10).state == "open"


@pytest.mark.parametrize("kind", [FULL, STATE_DICT])
def test_weights_of_a_step_that_another_attempt_has_committed_go_beside_it(kind: Kind) -> None:
    book = make_book(attempt=1, committed=[(10, 0, kind)])
    book.begin(10, STATE_DICT, ["w"])
    (commit,) = only(book.finished(10, part="w", files=[("w", 1, "x")]), Commit)
    assert (commit.kind, commit.attempt, commit.beside) == (STATE_DICT, 1, True)
    assert book.commit_done(10, STATE_DICT) == []
    assert book.status(10, STATE_DICT).state == "committed"
    assert book.open_steps() == []
    assert book.trackers == {FULL: 10 if kind == FULL else None, STATE_DICT: 10}


@pytest.mark.parametrize("attempt", [0, 1])
def test_weights_of_a_step_that_is_full_from_an_earlier_life_go_beside_it(attempt: int) -> None:
    book = make_book(attempt=attempt, committed=[(10, 0, FULL)])
    book.begin(10, STATE_DICT, ["w"])
    (commit,) = only(book.finished(10, part="w"), Commit)
    assert commit.beside
    book.commit_done(10, STATE_DICT)
    assert book.status(10, STATE_DICT).state == "committed"


def test_a_full_commit_is_never_beside_and_takes_in_the_weights_that_are() -> None:
    book = make_book(attempt=1, committed=[(10, 0, FULL)])
    book.begin(10, STATE_DICT, ["w"])
    commit_all(book, book.finished(10, part="w", files=[("w", 1, "x")]))
    book.begin(10, FULL, ["o"])
    (commit,) = only(book.finished(10, part="o", files=[("o", 1, "y")]), Commit)
    assert (commit.beside, commit.files) == (False, (("o", 1, "y"), ("w", 1, "x")))
    book.commit_done(10, FULL)
    assert book.status(10).committed == FULL
    book.begin(10, STATE_DICT, ["v"])
    (commit,) = only(book.finished(10, part="v"), Commit)
    assert commit.kind == FULL, "all of it is in"


def test_weights_beside_are_not_committed_again_after_a_restart() -> None:
    book = make_book(attempt=1, committed=[(10, 0, FULL)])
    book.begin(10, STATE_DICT, ["w"])
    book.finished(10, part="w", files=[("w", 1, "x")])
    dumped = json.loads(json.dumps(book.dump(10)))
    book = make_book(attempt=1, committed=[(10, 0, FULL)])
    book.restore_beside(10)
    assert book.restore(dumped, {"w"}) == []
    assert book.status(10, STATE_DICT) == StepStatus("committed", STATE_DICT, STATE_DICT)
    assert book.dump(10) is None


def test_reports_of_another_attempt_are_refused() -> None:
    book = make_book(attempt=2)
    with pytest.raises(RunError, match="attempt 1"):
        book.finished(5, part="a", attempt=1)


# ---- failures


def test_a_failed_part_fails_the_step_for_good_and_is_reported_once() -> None:
    book = make_book()
    book.begin(9, FULL, ["a", "b"])
    (failure,) = book.failed(9, "a", "disk full")
    assert failure == Abort(9, 0, "part 'a' failed: disk full")
    assert book.failed(9, "b", "me too") == [Cleanup(9, 0)]
    assert book.finished(9, part="b") == [Cleanup(9, 0)]
    assert book.finished(9, part="a") == [Cleanup(9, 0)]
    assert book.status(9).state == "failed"
    with pytest.raises(RunError, match="disk full"):
        book.begin(9, FULL, ["a", "b"])


def test_a_step_that_failed_before_it_was_announced_is_not_committed() -> None:
    book = make_book()
    book.register(9, checkpoint=1)
    book.finished(9, part="a")
    book.failed(9, "b", "disk full")
    assert only(book.mark(9, FULL), Commit) == []


def test_a_failed_step_does_not_hold_up_the_next() -> None:
    book = make_book()
    book.begin(9, FULL, ["a"])
    book.failed(9, "a", "disk full")
    book.begin(10, FULL, ["a"])
    assert only(book.finished(10, part="a"), Commit)


def test_a_failure_after_the_weights_were_committed_leaves_the_weights() -> None:
    book = make_book()
    book.register(2, weights=1, checkpoint=1)
    book.mark(2, STATE_DICT)
    book.mark(2, FULL)
    commit_all(book, book.finished(2, weights=True, part="model"))
    assert only(book.failed(2, "optim", "disk full"), Abort)
    assert book.status(2, STATE_DICT).state == "committed"
    assert book.status(2, FULL).state == "failed"


def test_a_part_that_fails_while_the_weights_are_being_committed() -> None:
    book = make_book()
    book.begin(2, STATE_DICT, ["w"])
    book.finished(2, part="w")
    assert only(book.failed(2, "late", "boom"), Abort)
    assert book.commit_done(2, STATE_DICT) == [MoveTracker(STATE_DICT, 2), Cleanup(2, 0)]


def test_a_commit_that_fails_fails_the_step() -> None:
    book = make_book()
    book.begin(2, FULL, ["a"])
    book.finished(2, part="a")
    (failure,) = book.commit_failed(2, FULL, "read-only file system")
    assert "read-only file system" in failure.error
    assert book.trackers[FULL] is None


def test_silence_fails_a_step_and_names_what_is_missing() -> None:
    book = make_book()
    book.begin(2, FULL, ["rank-00000", "rank-00001"])
    book.finished(2, part="rank-00000")
    book._clock.now += 61  # type: ignore[attr-defined]
    (failure,) = book.tick()
    assert "part 'rank-00001'" in failure.error
    assert "rank-00000'" not in failure.error
    assert book.tick() == []


def test_a_step_whose_parts_are_in_but_was_never_announced_fails_in_time() -> None:
    book = make_book()
    book.register(2, checkpoint=1)
    book.finished(2, report="a")
    book._clock.now += 61  # type: ignore[attr-defined]
    (failure,) = book.tick()
    assert "to be committed" in failure.error


# ---- writers


def test_a_writer_that_dies_fails_what_it_was_writing_and_nothing_else() -> None:
    book = make_book()
    for step in (1, 2):
        book.begin(step, FULL, ["r0", "r1"])
    book.started("t0", "node", "p0", step=1, part="r0")
    book.started("t1", "node", "p1", step=2, part="r1")
    (failure,) = only(book.writer_lost("node", "p0"), Abort)
    assert failure.step == 1
    assert "'r0'" in failure.error
    assert book.status(2).state == "open"


def test_a_writer_that_dies_after_its_report_fails_nothing() -> None:
    book = make_book()
    book.begin(1, FULL, ["r0", "r1"])
    book.started("t0", "node", "p0", step=1, part="r0")
    book.finished(1, part="r0", ticket="t0")
    assert book.writer_lost("node", "p0") == []
    assert only(book.finished(1, part="r1"), Commit)


def test_a_lost_node_fails_all_its_writers() -> None:
    book = make_book()
    for step, job in ((1, "p0"), (2, "p1")):
        book.begin(step, FULL, ["r"])
        book.started(f"t{step}", "node", job, step=step, part="r")
    assert [failure.step for failure in only(book.writer_lost("node"), Abort)] == [1, 2]


def test_the_death_of_an_earlier_life_does_not_touch_the_next() -> None:
    book = make_book()
    book.begin(1, FULL, ["r0"])
    book.started("t", "node", "rank-0", step=1, part="r0", life="new")
    assert book.writer_lost("node", "rank-0", "old") == []


def test_a_lost_writer_that_never_said_what_it_wrote_fails_the_steps_that_wait() -> None:
    book = make_book()
    book.register(1, checkpoint=2)
    book.mark(1, FULL)
    book.started("t", "node", "p0", anonymous=True)
    assert [failure.step for failure in only(book.writer_lost("node", "p0"), Abort)] == [1]


ASKERS = {"A0": ("A", "p0"), "A0b": ("A", "p0"), "A1": ("A", "p1"), "B0": ("B", "p0")}


@pytest.mark.parametrize(
    ("strategy", "first"),
    [
        ("single_thread", {"A0"}),
        ("single_process", {"A0", "A0b"}),
        ("single_node", {"A0", "A0b", "A1"}),
        ("unrestricted", {"A0", "A0b", "A1", "B0"}),
    ],
)
def test_the_save_strategy_decides_who_writes_at_once(strategy: str, first: set[str]) -> None:
    book = make_book(strategy=strategy)
    granted: list[str] = []
    for ticket, (node, job) in ASKERS.items():
        granted += [grant.ticket for grant in only(book.started(ticket, node, job), Grant)]
    assert set(granted) == first
    while len(granted) < len(ASKERS):
        before = len(granted)
        for ticket in granted[:]:
            granted += [grant.ticket for grant in only(book.cancel(ticket), Grant)]
        assert len(granted) > before, "nobody was given the turn that became free"
    assert set(granted) == set(ASKERS)


def test_turns_come_in_the_order_of_asking() -> None:
    book = make_book(strategy="single_process")
    book.started("a", "n", "p0")
    book.started("b", "n", "p1")
    assert only(book.started("c", "n", "p0"), Grant) == [], "c would overtake b"
    assert only(book.cancel("a"), Grant) == [Grant("b")]


def test_collective_saves_do_not_queue() -> None:
    book = make_book(strategy="single_thread")
    book.started("a", "n", "p0")
    assert Grant("b") in book.started("b", "n", "p1", collective=True)


def test_unbalanced_reports_of_the_seeds_writers_do_not_block_the_next() -> None:
    book = make_book(strategy="single_thread")
    book.finished(1, report="never started")
    book.started("a", "n", "p0", anonymous=True)
    book.started("b", "n", "p1", anonymous=True)
    assert Grant("b") in book.finished(1, report="x")


def test_a_writer_in_the_queue_of_a_failed_step_is_let_go() -> None:
    book = make_book(strategy="single_thread")
    book.begin(1, FULL, ["a", "b"])
    book.started("t0", "n", "p0", step=1, part="a")
    book.started("t1", "n", "p1", step=1, part="b")
    book.failed(1, "a", "disk full", ticket="t0")
    assert book.turn("t1") is None
    with pytest.raises(RunError, match="disk full"):
        book.started("t2", "n", "p1", step=1, part="b")


def test_waiting_in_the_queue_is_not_silence() -> None:
    book = make_book(strategy="single_thread")
    for step in (1, 2, 3):
        book.begin(step, FULL, ["a"])
        book.started(f"t{step}", "n", f"p{step}", step=step, part="a")
    for step in (1, 2, 3):
        book._clock.now += 50  # type: ignore[attr-defined]
        assert only(book.tick(), Abort) == []
        assert only(book.finished(step, part="a", ticket=f"t{step}"), Commit)
        book.commit_done(step, FULL)


def test_a_turn_that_never_ends_is_taken_back() -> None:
    book = make_book(strategy="single_thread")
    book.begin(1, FULL, ["a"])
    book.started("t1", "n", "p1", step=1, part="a")
    book.started("t2", "n", "p2")
    book._clock.now += 61  # type: ignore[attr-defined]
    assert Grant("t2") in book.tick()


# ---- restarts


def restart(
    book: CommitBook, committed: dict[int, tuple[int, Kind]], beside: Iterable[int] = (), **options: object
) -> tuple[CommitBook, list]:
    dumps = [book.dump(step) for step in book.open_steps()]
    failures = book.failures
    disk = [(step, attempt, kind) for step, (attempt, kind) in committed.items()]
    fresh = make_book(committed=disk, attempt=book.attempt, **options)
    decisions: list[Decision] = []
    for step in beside:
        fresh.restore_beside(step)
    for step, error in failures.items():
        fresh.restore_failure(step, error)
    for dump in dumps:
        decisions += fresh.restore(json.loads(json.dumps(dump)))
    return fresh, decisions


def test_an_open_step_survives_a_restart() -> None:
    book = make_book(strategy="single_thread")
    book.begin(4, FULL, ["a", "b"], meta={"world_size": 2})
    book.started("t", "n", "p", step=4, part="b")
    book.finished(4, part="a", files=[("a", 1, "x")])
    book, decisions = restart(book, {}, strategy="single_thread")
    assert decisions == []
    assert only(book.started("u", "n", "q"), Grant) == [], "the turn of b's writer was forgotten"
    (commit,) = only(book.finished(4, part="b", ticket="t"), Commit)
    assert (commit.files, commit.meta) == ((("a", 1, "x"),), {"world_size": 2})


def test_a_commit_that_was_under_way_is_carried_out_after_a_restart() -> None:
    book = make_book()
    book.begin(4, FULL, ["a"])
    book.finished(4, part="a")
    _, decisions = restart(book, {})
    assert [decision.kind for decision in decisions] == [FULL]


def test_a_commit_that_had_happened_before_the_restart_is_not_repeated() -> None:
    book = make_book()
    book.begin(4, FULL, ["a"])
    book.finished(4, part="a")
    book, decisions = restart(book, {4: (0, FULL)})
    assert decisions == []
    assert book.status(4).state == "committed"
    assert book.trackers[FULL] == 4


def test_a_failed_step_stays_failed_after_a_restart() -> None:
    book = make_book()
    book.begin(4, FULL, ["a"])
    book.failed(4, "a", "disk full")
    book, _ = restart(book, {})
    book.register(4, checkpoint=1)
    book.mark(4, FULL)
    assert only(book.finished(4, report="x"), Commit) == []
    assert book.status(4).error == "part 'a' failed: disk full"


def test_memory_stays_bounded_over_many_steps() -> None:
    book = make_book()
    for step in range(2000):
        book.begin(step, FULL, ["a"])
        commit_all(book, book.finished(step, part="a"))
        if step >= 5:
            book.forget(step - 5)
    assert len(book._steps) < 300
    assert len(book._committed._visible) < 10


# ---- against a model


@dataclass
class ModelStep:
    """What a step should be: parts per class, and whether anything went wrong with it."""

    weights: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    begun: set[Kind] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    failed: bool = False
    faults: int = 0
    visible: Kind | None = None


STEPS = st.integers(1, 4)
PARTS = st.sampled_from(["w0", "w1", "c0", "c1"])


#: What the attempt before has left, step -> (attempt, kind).
LEFT: dict[int, tuple[int, Kind]] = {1: (0, FULL), 2: (0, STATE_DICT)}


class BookMachine(RuleBasedStateMachine):
    """Random interleavings of steps, doubles, failures, deaths, restarts and slow commits, in a resumed run."""

    @initialize(strategy=st.sampled_from(["single_thread", "single_process", "single_node", "unrestricted"]))
    def start(self, strategy: str) -> None:
        self.options = {"strategy": strategy}
        self.clock = Clock()
        left = [(step, attempt, kind) for step, (attempt, kind) in LEFT.items()]
        self.book = make_book(clock=self.clock, attempt=1, committed=left, **self.options)
        self.model = {step: ModelStep() for step in range(1, 5)}
        self.disk = dict(LEFT)
        self.beside: set[int] = set()
        self.trackers: dict[Kind, int | None] = {FULL: 1, STATE_DICT: 2}
        self.pending: list[Commit] = []
        self.tickets: dict[str, tuple[int, str]] = {}
        self.count = 0

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Commit(step, _, kind):
                    model = self.model[step]
                    assert not model.failed, "a failed step is being committed"
                    needed = model.weights if kind == STATE_DICT else model.weights | model.others
                    assert needed <= model.done, "parts are missing from a commit"
                    assert kind in model.begun
                    assert not [c for c in self.pending if c.step == step], "two commits of a step at once"
                    self.pending.append(decision)
                case Abort(step, _, _):
                    self.model[step].failed = True
                    self.model[step].faults += 1
                case MoveTracker(kind, step):
                    named = self.trackers[kind]
                    assert named is None or step > named, "a tracker went back"
                    self.trackers[kind] = step

    @rule(step=STEPS, kind=st.sampled_from([FULL, STATE_DICT]))
    def begin(self, step: int, kind: Kind) -> None:
        parts = {"w0", "w1"} if kind == STATE_DICT else {"w0", "w1", "c0", "c1"}
        model = self.model[step]
        try:
            decisions = self.book.begin(step, kind, sorted(parts), weights_parts={"w0", "w1"})
        except RunError:
            assert model.failed or model.visible is not None
            return
        model.weights = {"w0", "w1"}
        model.others |= parts - model.weights
        model.begun.add(kind)
        self.take(decisions)

    @rule(step=STEPS, part=PARTS)
    def start_part(self, step: int, part: str) -> None:
        self.count += 1
        ticket = f"t{self.count}"
        try:
            decisions = self.book.started(ticket, f"n{self.count % 2}", f"p{self.count % 3}", step=step, part=part)
        except RunError:
            assert self.model[step].failed
            return
        self.tickets[ticket] = (step, part)
        self.take(decisions)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def finish_part(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        if self.book.turn(ticket) is not True:
            return
        step, part = self.tickets.pop(ticket)
        if not self.model[step].failed:
            self.model[step].done.add(part)
        self.take(self.book.finished(step, part=part, weights=part.startswith("w"), ticket=ticket))

    @rule(step=STEPS, part=PARTS)
    def report_twice(self, step: int, part: str) -> None:
        if part in self.model[step].done:
            self.take(self.book.finished(step, part=part, weights=part.startswith("w")))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def fail_part(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        step, part = self.tickets.pop(ticket)
        self.take(self.book.failed(step, part, "boom", ticket=ticket))
        self.tickets = {t: v for t, v in self.tickets.items() if self.book.turn(t) is not None}

    @rule(node=st.sampled_from(["n0", "n1"]), job=st.sampled_from(["p0", "p1", "p2"]))
    def lose_writer(self, node: str, job: str) -> None:
        self.take(self.book.writer_lost(node, job))
        self.tickets = {t: v for t, v in self.tickets.items() if self.book.turn(t) is not None}

    @precondition(lambda self: self.pending)
    @rule(ok=st.booleans())
    def carry_out(self, ok: bool) -> None:
        commit = self.pending.pop(0)
        if not ok:
            self.take(self.book.commit_failed(commit.step, commit.kind, "disk full"))
            return
        self.make_visible(commit)
        self.take(self.book.commit_done(commit.step, commit.kind))

    def make_visible(self, commit: Commit) -> None:
        by, kind = self.disk.get(commit.step, (1, STATE_DICT))
        if commit.beside:
            assert commit.kind == STATE_DICT
            self.beside.add(commit.step)
        else:
            assert commit.kind == FULL or (by, kind) == (1, STATE_DICT), "less took the place of more, or of another's"
            self.disk[commit.step] = (1, commit.kind)
        model = self.model[commit.step]
        model.visible = FULL if FULL in (model.visible, commit.kind) else STATE_DICT

    @rule(seen=st.booleans())
    def restart_actor(self, seen: bool) -> None:
        if self.pending and seen:
            # The rename had happened, the answer had not.
            self.make_visible(self.pending[0])
        self.pending = []
        self.book, decisions = restart(self.book, self.disk, self.beside, clock=self.clock, **self.options)
        for kind in (FULL, STATE_DICT):
            named = self.book.trackers[kind]
            assert (named or 0) >= (self.trackers[kind] or 0)
            self.trackers[kind] = named
        self.tickets = {t: v for t, v in self.tickets.items() if self.book.turn(t) is not None}
        self.take(decisions)

    @rule()
    def wait_long(self) -> None:
        self.clock.now += 61
        self.take(self.book.tick())
        self.tickets = {t: v for t, v in self.tickets.items() if self.book.turn(t) is not None}
        busy = {commit.step for commit in self.pending}
        assert set(self.book.open_steps()) <= busy, "a step still waits after its time"

    @invariant()
    def trackers_name_committed_steps(self) -> None:
        for kind, step in getattr(self, "trackers", {}).items():
            if step is not None:
                assert step in self.disk
                assert kind == STATE_DICT or self.disk[step][1] == FULL

    @invariant()
    def complete_steps_are_committed_or_on_their_way(self) -> None:
        for step, model in getattr(self, "model", {}).items():
            if model.failed or any(commit.step == step for commit in self.pending):
                continue
            if FULL in model.begun and model.weights | model.others <= model.done:
                assert model.visible == FULL
            elif STATE_DICT in model.begun and model.weights <= model.done:
                assert model.visible is not None

    @invariant()
    def failures_are_reported_once(self) -> None:
        assert all(model.faults <= 1 for model in getattr(self, "model", {}).values())

    def teardown(self) -> None:
        """Whoever asked for a turn and did not lose it gets one when the others end, or at the monitor's next look: a
        restart forgets the turn of a writer whose step has failed.
        """
        if hasattr(self, "book"):
            self.take(self.book.tick())
        for _ in range(len(getattr(self, "tickets", {}))):
            ready = [ticket for ticket in self.tickets if self.book.turn(ticket)]
            assert ready, "writers wait, and nobody writes"
            self.book.cancel(ready[0])
            self.tickets = {t: v for t, v in self.tickets.items() if self.book.turn(t) is not None}
            if not self.tickets:
                break


BookMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBookMachine = BookMachine.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_random_orders_of_two_steps_end_in_the_same_trackers(seed: int) -> None:
    book = make_book()
    calls = [(step, part) for step in (1, 2) for part in (None, "a", "b")]
    random.Random(seed).shuffle(calls)
    for step, part in calls:
        commit_all(book, book.begin(step, FULL, ["a", "b"]) if part is None else book.finished(step, part=part))
    assert book.trackers == {FULL: 2, STATE_DICT: 2}
    assert book.open_steps() == []


def test_a_late_double_of_a_question_gets_no_turn_that_nobody_would_end() -> None:
    book = make_book(strategy="single_thread")
    book.begin(1, FULL, ["a", "b"])
    book.started("first", "node", "job", step=1, part="a")
    book.finished(1, part="a", ticket="first")
    assert book.started("first", "node", "job", step=1, part="a") == []
    assert book.started("second", "node", "job", step=1, part="b") == [Grant("second")]
    commit_all(book, book.finished(1, part="b", ticket="second"))
    assert book.open_steps() == []
