"""A commit has every announced part: what writers have begun counts, however few parts were registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.protocol.test_commit import Clock, commit_all, make_book, only, restart
from trinity_sync.errors import RunError
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import FULL, STATE_DICT, Abort, Commit, Decision, FileTuple, Kind, missing_rank_files

RANKS = ("model-rank-00000", "model-rank-00001")


def start(book: CommitBook, part: str | None, step: int = 2, *, weights: bool | None = True, **options: object) -> None:
    ticket = f"t-{part}"
    book.started(ticket, "n", f"p-{part}", step=step, part=part, weights=weights, **options)  # type: ignore[arg-type]


def finish(book: CommitBook, part: str | None, step: int = 2, *, weights: bool = True) -> list[Decision]:
    ticket = f"t-{part}"
    files = [(f"{part}.bin", 1, "x")]
    return book.finished(step, part=part, weights=weights, ticket=ticket, report=ticket, files=files)


def committed_parts(decisions: list[Decision]) -> list[set[str]]:
    return [{path.removesuffix(".bin") for path, *_ in commit.files} for commit in only(decisions, Commit)]


def undercounted() -> CommitBook:
    """As a Trinity program has it, of which only rank 0 reports."""
    book = make_book()
    book.register(2, weights=1)
    book.mark(2, STATE_DICT)
    return book


# ---- parts in flight


@pytest.mark.parametrize(
    "order", [order for order in itertools.permutations(range(4)) if order.index(2) < order.index(3)]
)
def test_parts_that_were_begun_are_in_the_commit_though_fewer_are_registered(order: tuple[int, ...]) -> None:
    book = make_book()
    for rank in RANKS:
        start(book, rank)
    calls: list[Callable[[], list[Decision]]] = [
        lambda: book.register(2, weights=1),
        lambda: book.mark(2, STATE_DICT),
        lambda: finish(book, RANKS[0]),
        lambda: finish(book, RANKS[1]),
    ]
    decisions = commit_all(book, [decision for index in order for decision in calls[index]()])
    assert committed_parts(decisions) == [set(RANKS)]
    assert book.status(2).state == "committed"


@pytest.mark.parametrize("count", [1, 2])
def test_a_commit_waits_for_a_part_that_is_begun_after_another_was_written(count: int) -> None:
    book = make_book()
    start(book, RANKS[0])
    finish(book, RANKS[0])
    start(book, RANKS[1])
    book.register(2, weights=count)
    assert only(book.mark(2, STATE_DICT), Commit) == []
    assert "part 'model-rank-00001'" in book.status(2).missing
    assert committed_parts(finish(book, RANKS[1])) == [set(RANKS)]


def test_more_parts_than_those_that_were_begun_are_waited_for() -> None:
    book = make_book()
    book.register(2, weights=3)
    book.mark(2, STATE_DICT)
    for rank in RANKS:
        start(book, rank)
    assert [only(finish(book, rank), Commit) for rank in RANKS] == [[], []]
    assert book.status(2).missing == ("1 of 3 counted weights parts",)


def test_parts_that_are_announced_before_they_begin_are_waited_for() -> None:
    book = undercounted()
    book.announce(2, RANKS, weights=True)
    start(book, RANKS[0])
    assert only(finish(book, RANKS[0]), Commit) == []
    assert book.awaited(2) == [RANKS[1]]
    start(book, RANKS[1])
    assert committed_parts(finish(book, RANKS[1])) == [set(RANKS)]


def test_a_part_without_a_name_is_waited_for_when_it_was_begun() -> None:
    book = undercounted()
    start(book, None)
    start(book, RANKS[0])
    assert only(finish(book, RANKS[0]), Commit) == []
    assert book.status(2).missing == ("a part without a name",)


def test_weights_do_not_wait_for_an_optimizer_that_is_being_written_and_leave_it_its_folder() -> None:
    book = undercounted()
    start(book, "optim", weights=False)
    start(book, RANKS[0])
    (commit,) = only(finish(book, RANKS[0]), Commit)
    assert commit.partial


def test_a_part_of_an_unknown_class_is_waited_for_by_weights_too() -> None:
    book = undercounted()
    start(book, "x", weights=None)
    start(book, RANKS[0])
    assert only(finish(book, RANKS[0]), Commit) == []


def test_a_full_commit_waits_for_weights_and_optimizer_that_were_begun() -> None:
    book = make_book()
    book.register(2, checkpoint=1)
    book.mark(2, FULL)
    start(book, "w")
    start(book, "o0", weights=False)
    start(book, "o1", weights=False)
    finish(book, "o0", weights=False)
    assert book.status(2).missing == ("part 'w'", "part 'o1'")


def test_a_writer_that_dies_before_its_part_is_in_fails_the_step() -> None:
    book = undercounted()
    for rank in RANKS:
        start(book, rank)
    finish(book, RANKS[0])
    (failure,) = only(book.writer_lost("n", f"p-{RANKS[1]}"), Abort)
    assert RANKS[1] in failure.error


def test_an_announced_part_that_never_begins_fails_the_step_by_its_name() -> None:
    book = undercounted()
    book.announce(2, RANKS, weights=True)
    start(book, RANKS[0])
    finish(book, RANKS[0])
    book._clock.now += 61  # type: ignore[attr-defined]
    (failure,) = only(book.tick(), Abort)
    assert RANKS[1] in failure.error


@pytest.mark.parametrize("strategy", ["unrestricted", "single_thread"])
def test_a_part_that_was_begun_is_waited_for_after_a_restart_of_the_monitor(strategy: str) -> None:
    book = make_book(strategy=strategy)
    book.register(2, weights=1)
    for rank in RANKS:  # with one thread at a time, the second only waits for its turn
        start(book, rank)
    finish(book, RANKS[0])
    book, _ = restart(book, {}, strategy=strategy)
    assert only(book.mark(2, STATE_DICT), Commit) == []
    assert {job for _, job, _ in book.writers()} == {f"p-{RANKS[1]}"}, "whose death would not be noticed"
    assert committed_parts(finish(book, RANKS[1])) == [set(RANKS)]


def test_a_second_save_of_a_committed_step_waits_for_nothing() -> None:
    book = undercounted()
    for again in ("a", "b"):
        book.announce(2, RANKS, weights=True)
        for rank in RANKS:
            book.started(rank + again, "n", "p", step=2, part=rank, weights=True)
        for rank in RANKS:
            commit_all(book, book.finished(2, part=rank, weights=True, ticket=rank + again))
        book.register(2, weights=1)
        assert book.status(2).state == "committed"
    assert book.open_steps() == []


# ---- parts that come too late


def committed_without(kind: Kind = STATE_DICT) -> CommitBook:
    book = make_book()
    book.register(2, weights=1, checkpoint=int(kind == FULL))
    book.mark(2, kind)
    start(book, RANKS[0])
    decisions = finish(book, RANKS[0])
    if kind == FULL:
        start(book, "optim", weights=False)
        decisions = finish(book, "optim", weights=False)
    assert only(commit_all(book, decisions), Commit)
    return book


@pytest.mark.parametrize("kind", [STATE_DICT, FULL])
def test_a_part_that_begins_after_the_commit_is_refused(kind: Kind) -> None:
    book = committed_without(kind)
    with pytest.raises(RunError, match="'model-rank-00001' came after the commit of step 2"):
        start(book, RANKS[1])
    assert book.status(2).state == "committed"


def test_a_part_that_is_reported_after_the_commit_is_refused() -> None:
    with pytest.raises(RunError, match="came after the commit"):
        finish(committed_without(), RANKS[1])


def test_a_part_that_begins_while_the_step_is_committed_is_refused() -> None:
    book = undercounted()
    start(book, RANKS[0])
    assert only(finish(book, RANKS[0]), Commit)
    with pytest.raises(RunError, match="came after the commit"):
        start(book, RANKS[1])


def test_a_late_part_is_refused_after_a_restart_of_the_monitor() -> None:
    book, _ = restart(committed_without(), {2: (0, STATE_DICT)})
    with pytest.raises(RunError, match="came after the commit"):
        start(book, RANKS[1])


def test_a_late_rank_of_a_collective_save_enters_it_and_is_refused_at_its_end() -> None:
    book = committed_without()
    start(book, RANKS[1], collective=True)
    with pytest.raises(RunError, match="came after the commit"):
        finish(book, RANKS[1])


@pytest.mark.parametrize("weights", [False, None])
def test_the_optimizer_may_come_after_the_commit_of_the_weights(weights: bool | None) -> None:
    book = committed_without()
    start(book, "optim", weights=weights)
    finish(book, "optim", weights=False)
    book.register(2, checkpoint=1)
    assert committed_parts(book.mark(2, FULL)) == [{RANKS[0], "optim"}]


@pytest.mark.parametrize("ask", ["register", "announce", "begin"])
def test_a_part_that_was_asked_for_after_the_commit_is_added_by_another_commit(ask: str) -> None:
    book = committed_without()
    {
        "register": lambda: book.register(2, weights=1),
        "announce": lambda: book.announce(2, ["critic"], weights=True),
        "begin": lambda: book.begin(2, STATE_DICT, ["critic"]),
    }[ask]()
    start(book, "critic")
    assert committed_parts(finish(book, "critic")) == [{RANKS[0], "critic"}]


def test_another_attempt_neither_announces_nor_begins_parts() -> None:
    book = undercounted()
    with pytest.raises(RunError, match="attempt 1"):
        start(book, RANKS[0], attempt=1)
    with pytest.raises(RunError, match="attempt 1"):
        book.announce(2, RANKS, weights=True, attempt=1)
    assert book.awaited(2) == []


# ---- the files of a world of ranks


def rank_files(name: str, world: int, *ranks: int) -> list[str]:
    return [f"{name}_world_size_{world}_rank_{rank}.pt" for rank in (ranks or range(world))]


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (rank_files("actor/model", 2), []),
        (rank_files("actor/model", 2, 0), rank_files("actor/model", 2, 1)),
        (rank_files("actor/model", 3, 2), rank_files("actor/model", 3, 0)),
        (rank_files("model", 2, 1), rank_files("model", 2, 0)),
        (rank_files("actor/model", 2) + rank_files("actor/optim", 2, 1), rank_files("actor/optim", 2, 0)),
        (rank_files("actor/model", 2) + rank_files("critic/model", 4, 0, 1, 3), rank_files("critic/model", 4, 2)),
        (rank_files("a/model", 2) + rank_files("a/model", 4, 0), []),  # left by a run of 4 ranks
        (rank_files("a/model", 999999, 0), rank_files("a/model", 999999, 1)),
        (["actor/model_world_size_0_rank_0.pt", "actor/model_world_size_99999999999_rank_0.pt", "x\n{}"], []),
        # a rank that holds a replica publishes nothing
        (["actor/weights_rank-00000.safetensors", "actor/weights_rank-00002.safetensors"], []),
    ],
)
def test_the_files_of_other_ranks_are_known_by_name(files: list[str], missing: list[str]) -> None:
    assert missing_rank_files(files) == missing


def test_a_rank_that_is_not_heard_of_is_missed_by_the_file_of_another() -> None:
    book = undercounted()
    first, second = rank_files("actor/model", 2)
    start(book, RANKS[0])
    assert only(book.finished(2, part=RANKS[0], weights=True, files=[(first, 1, "x")]), Commit) == []
    assert book.status(2).missing == (second,)
    start(book, RANKS[1])
    assert only(book.finished(2, part=RANKS[1], weights=True, files=[(second, 1, "x")]), Commit)


# ---- against a model


@dataclass
class ModelStep:
    """What was said of a step."""

    running: dict[str, str] = field(default_factory=dict)
    """Parts that were begun and are not in, and their tickets."""
    taken: set[str] = field(default_factory=set)
    visible: set[str] = field(default_factory=set)
    """Parts on the disk."""
    failed: bool = False


PARTS = [f"{role}/{name}-{rank}" for role in ("actor", "critic") for name in ("model", "optim") for rank in (0, 1)]


def is_weights(part: str) -> bool:
    return "model" in part


def file_of(part: str) -> FileTuple:
    name, _, rank = part.rpartition("-")
    return (f"{name}_world_size_2_rank_{rank}.pt", 1, "x")


PART_OF = {file_of(part)[0]: part for part in PARTS}


class CountedMachine(RuleBasedStateMachine):
    """Two roles of two ranks, whose driver registers as many parts as it likes."""

    @initialize(strategy=st.sampled_from(["single_thread", "unrestricted"]))
    def begin_run(self, strategy: str) -> None:
        self.clock = Clock()
        self.options = {"strategy": strategy}
        self.book = make_book(clock=self.clock, **self.options)
        self.model = {step: ModelStep() for step in (1, 2)}
        self.kinds: dict[int, tuple[int, Kind]] = {}
        self.pending: list[Commit] = []
        self.count = 0

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Commit):
                model = self.model[decision.step]
                of_kind = {part for part in model.running if decision.kind == FULL or is_weights(part)}
                assert not of_kind - model.taken, "a part that was begun is missing from a commit"
                paths = [path for path, *_ in decision.files]
                assert missing_rank_files([*paths, *(file_of(part)[0] for part in model.visible)]) == []
                self.pending.append(decision)
            elif isinstance(decision, Abort):
                self.model[decision.step].failed = True

    STEPS = st.sampled_from([1, 2])

    @rule(step=STEPS, weights=st.integers(0, 4), checkpoint=st.integers(0, 4))
    def register(self, step: int, weights: int, checkpoint: int) -> None:
        self.take(self.book.register(step, weights=weights, checkpoint=checkpoint))

    @rule(step=STEPS, kind=st.sampled_from([STATE_DICT, FULL]))
    def mark(self, step: int, kind: Kind) -> None:
        self.take(self.book.mark(step, kind))

    @rule(step=STEPS, role=st.sampled_from(["actor", "critic"]), name=st.sampled_from(["model", "optim"]))
    def announce(self, step: int, role: str, name: str) -> None:
        try:
            self.book.announce(step, [f"{role}/{name}-{rank}" for rank in (0, 1)], weights=name == "model")
        except RunError:
            assert self.model[step].failed

    @rule(step=STEPS, part=st.sampled_from(PARTS), told=st.booleans())
    def start_part(self, step: int, part: str, told: bool) -> None:
        self.count += 1
        ticket, weights = f"t{self.count}", is_weights(part) if told else None
        model = self.model[step]
        try:
            decisions = self.book.started(ticket, "n", f"p{part}", step=step, part=part, weights=weights)
        except RunError:
            committing = any(commit.step == step for commit in self.pending)
            assert model.failed or ((model.visible or committing) and part not in model.taken)
            return
        model.running[part] = ticket
        self.take(decisions)

    @precondition(lambda self: any(model.running for model in self.model.values()))
    @rule(data=st.data())
    def finish_part(self, data: st.DataObject) -> None:
        step, part = data.draw(
            st.sampled_from(sorted((step, part) for step in self.model for part in self.model[step].running))
        )
        model = self.model[step]
        ticket = model.running[part]
        if self.book.turn(ticket) is False:
            return
        del model.running[part]
        decisions = self.book.finished(step, part=part, weights=is_weights(part), ticket=ticket, files=[file_of(part)])
        if not model.failed:
            model.taken.add(part)
        self.take(decisions)

    @rule(step=STEPS, part=st.sampled_from(PARTS))
    def die(self, step: int, part: str) -> None:
        self.take(self.book.writer_lost("n", f"p{part}"))
        for model in self.model.values():
            model.running.pop(part, None)

    @precondition(lambda self: self.pending)
    @rule()
    def carry_out(self) -> None:
        commit = self.pending.pop(0)
        self.show(commit)
        self.take(self.book.commit_done(commit.step, commit.kind))

    def show(self, commit: Commit) -> None:
        self.model[commit.step].visible |= {PART_OF[path] for path, *_ in commit.files}
        if self.kinds.get(commit.step) != (0, FULL):
            self.kinds[commit.step] = (0, commit.kind)

    @rule(seen=st.booleans())
    def restart_actor(self, seen: bool) -> None:
        if self.pending and seen:
            return  # the files of what is visible are not handed to `restart`
        self.pending = []
        self.book, decisions = restart(self.book, self.kinds, clock=self.clock, **self.options)
        self.take(decisions)

    @invariant()
    def what_was_taken_of_a_committed_step_is_visible(self) -> None:
        for step, model in getattr(self, "model", {}).items():
            if not model.failed and self.book.status(step).state == "committed":
                assert model.taken <= model.visible, "a part that was taken is in no commit"


CountedMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCountedMachine = CountedMachine.TestCase
