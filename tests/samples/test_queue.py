"""The queue: what is admitted, what the trainer gets, what is dropped, and where a resumed run goes on."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trinity_sync.samples.position import GroupId
from trinity_sync.samples.queue import GroupQueue, QueueRules

GROUPS = 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rules(**changes: Any) -> QueueRules:
    given = {"groups_per_step": GROUPS, "max_staleness": 1, "wait": True, "max_open": 2 * GROUPS, "overdue_s": 60.0}
    return QueueRules(**(given | changes))


def queue(clock: Clock | None = None, **changes: Any) -> GroupQueue[str]:
    made: GroupQueue[str] = GroupQueue(rules(**changes), 1, clock or Clock())
    made.publish(0)
    return made


def step_of(groups: list[GroupId]) -> list[int]:
    return [group.step for group in groups]


def make(made: GroupQueue[str], version: int, most: int = 100, explorer: str = "a") -> list[GroupId]:
    """Hand out and deliver at once."""
    groups = made.hand_out(explorer, most)
    for group in groups:
        made.deliver(group, version, f"{group}")
    return groups


def test_nothing_is_handed_out_before_the_first_version() -> None:
    made: GroupQueue[str] = GroupQueue(rules(), 1, Clock())
    assert made.hand_out("a", 10) == []
    made.publish(0)
    assert made.hand_out("a", 2) == [(1, 0), (1, 1)]


@pytest.mark.parametrize(("bound", "steps"), [(0, [1]), (1, [1, 2]), (2, [1, 2, 3])])
def test_explorers_run_as_far_ahead_as_the_bound_allows_and_then_wait(bound: int, steps: list[int]) -> None:
    made = queue(max_staleness=bound, max_open=10 * GROUPS)
    assert step_of(make(made, 0)) == [step for step in steps for _ in range(GROUPS)]
    assert made.hand_out("a", 1) == []
    assert made.take() is not None
    assert made.hand_out("a", 1) == []  # the version that the trainer works on comes first
    made.publish(1)
    assert step_of(make(made, 1)) == [steps[-1] + 1] * GROUPS
    for update in steps[1:]:
        made.publish(update - 1)
        assert made.take() is not None
    assert made.dropped == 0


def test_an_explorer_of_an_older_version_gets_no_more_than_that_version_may_make() -> None:
    made = queue(max_staleness=1, max_open=10 * GROUPS)
    assert len(made.hand_out("a", 100)) == 2 * GROUPS
    made.give_back("a")
    make(made, 0, most=GROUPS)
    assert made.take() is not None
    made.publish(1)
    assert step_of(made.hand_out("behind", 100, 0)) == [2] * GROUPS
    assert step_of(made.hand_out("a", 100)) == [3] * GROUPS


def test_room_bounds_what_is_out_and_ready() -> None:
    made = queue(max_staleness=5, max_open=GROUPS + 1)
    assert len(made.hand_out("a", 100)) == GROUPS + 1
    for places in ("max_open", "most_made"):
        with pytest.raises(ValueError, match="room for 2 groups, but an update takes 3"):
            rules(**{places: 2})


def test_dropping_begins_more_than_can_be_used_and_makes_what_turned_over_stale_anew() -> None:
    made = queue(wait=False, max_staleness=1, max_open=3 * GROUPS)
    assert len(make(made, 0)) == 3 * GROUPS
    for update in (1, 2):
        taken = made.take()
        assert taken is not None
        assert {ready.group.step for ready in taken.groups} == {update}
        made.publish(update)
    assert made.take() is None  # version 0 is two steps behind update 3
    assert made.dropped == GROUPS
    assert step_of(make(made, 2, most=GROUPS)) == [3] * GROUPS
    taken = made.take()
    assert taken is not None
    assert {ready.version_step for ready in taken.groups} == {2}


def test_what_arrives_over_stale_is_dropped_though_explorers_wait() -> None:
    """A slow explorer, overtaken by another one."""
    made = queue(max_staleness=1, max_open=10 * GROUPS)
    (slow,) = made.hand_out("slow", 1)
    for update in (1, 2):
        while made.take() is None:
            assert make(made, update - 1, explorer="fast")
        made.publish(update)
    assert not made.deliver(slow, 0, "late")
    assert made.dropped == 1
    assert made.hand_out("fast", 1) == [slow]


def test_the_oldest_versions_are_trained_on_first_and_groups_stay_in_order() -> None:
    made = queue(max_staleness=3, max_open=10 * GROUPS)
    first = made.hand_out("a", 2 * GROUPS)
    made.publish(0)
    for group in reversed(first):
        made.deliver(group, 0, "")
    taken = made.take()
    assert taken is not None
    assert [ready.group for ready in taken.groups] == first[:GROUPS]


def test_flat_groups_are_laid_aside_and_done_with() -> None:
    made = queue(max_staleness=0, most_made=3 * GROUPS)
    flat = made.hand_out("a", GROUPS)
    for group in flat:
        assert made.deliver(group, 0, "flat", flat=True)
    assert made.take() is None
    others = make(made, 0)
    assert not {*flat} & {*others}
    taken = made.take()
    assert taken is not None
    assert [ready.group for ready in taken.groups] == others
    assert [ready.group for ready in taken.left_out] == flat
    assert taken.filled == made.aside == []
    assert made.position()["waiting"] == []


def test_an_update_that_finds_too_few_others_takes_flat_groups_and_no_more_are_made_for_it() -> None:
    made = queue(max_staleness=0, most_made=2 * GROUPS)
    good, *flat = made.hand_out("a", GROUPS)
    made.deliver(good, 0, "")
    for group in flat:
        made.deliver(group, 0, "flat", flat=True)
    while made.take() is None:
        (more,) = made.hand_out("a", 1)
        made.deliver(more, 0, "flat", flat=True)
        flat.append(more)
        assert len(flat) < 2 * GROUPS
        last = made.hand_out("a", 0)
    assert last == []
    assert len(flat) == 2 * GROUPS - 1
    assert made.step == 2


def test_explorers_do_not_make_flat_groups_without_end_while_the_trainer_trains() -> None:
    made = queue(max_staleness=3, max_open=2 * GROUPS, most_made=3 * GROUPS)
    make(made, 0, most=GROUPS)
    handed = 0
    while handed < 10 * GROUPS and (groups := made.hand_out("a", 1)):
        made.deliver(groups[0], 0, "flat", flat=True)
        handed += 1
    assert handed == 2 * GROUPS


def test_what_a_lost_explorer_was_to_make_goes_to_the_others_at_once() -> None:
    made = queue()
    lost = made.hand_out("a", GROUPS)
    made.give_back("a")
    assert made.explorers_out() == []
    assert made.hand_out("b", GROUPS) == lost


def test_a_hanging_explorer_keeps_the_trainer_waiting_for_the_limit_and_no_longer() -> None:
    clock = Clock()
    made = queue(clock, overdue_s=60.0)
    hanging = made.hand_out("a", 1)
    clock.now = 1000.0
    make(made, 0, explorer="b", most=GROUPS - 1)
    assert made.overdue_in() is None  # nobody waits for it yet
    assert made.take() is None
    assert made.overdue_in() == 60.0
    clock.now += 59.0
    assert hanging[0] not in made.hand_out("b", 1)
    clock.now += 1.0
    assert made.overdue_in() == 0.0
    assert made.hand_out("b", 1) == hanging
    # Who is first counts, and once.
    assert made.deliver(hanging[0], 0, "by a")
    assert not made.deliver(hanging[0], 0, "by b")
    taken = made.take()
    assert taken is not None
    assert "by a" in [ready.samples for ready in taken.groups]


def test_a_run_goes_on_with_the_groups_that_were_not_trained_on() -> None:
    made = queue(max_staleness=1)
    left = make(made, 0, most=1)
    out = made.hand_out("slow", 1)
    while made.take() is None:
        make(made, 0, most=1)
    position = json.loads(json.dumps(made.position()))
    again: GroupQueue[str] = GroupQueue(rules(), 2, Clock(), position)
    again.publish(1)
    assert left[0] not in again.hand_out("a", 0)
    assert again.hand_out("a", GROUPS) == [out[0], (2, 1), (2, 2)]
    # In batches of another size the same prompts come, under other names.
    for size in (2, 5):
        changed: GroupQueue[str] = GroupQueue(rules(groups_per_step=size, max_open=6), 2, Clock(), position)
        changed.publish(1)
        names = changed.hand_out("a", GROUPS)
        assert [changed.numbering.number(name) for name in names] == [
            again.numbering.number(name) for name in (out[0], GroupId(2, 1), GroupId(2, 2))
        ]
        assert min(names) == (2, 0), "the step that comes has the oldest first"


class Runs(RuleBasedStateMachine):
    """Explorers of any speed that die, hang and come back, and a trainer that takes and publishes."""

    @initialize(
        groups=st.integers(1, 4),
        bound=st.integers(0, 3),
        wait=st.booleans(),
        more=st.integers(0, 6),
        made=st.none() | st.integers(0, 9),
    )
    def begin(self, groups: int, bound: int, wait: bool, more: int, made: int | None) -> None:
        self.clock = Clock()
        self.bound, self.groups = bound, groups
        self.rules = QueueRules(
            groups_per_step=groups,
            max_staleness=bound,
            wait=wait,
            max_open=groups + more,
            overdue_s=10.0,
            most_made=None if made is None else groups + made,
        )
        self.queue: GroupQueue[GroupId] = GroupQueue(self.rules, 1, self.clock)
        self.trained: Counter[GroupId] = Counter()
        self.left_out: set[GroupId] = set()
        self.working: dict[str, tuple[int, list[GroupId]]] = {}
        self.published = 0
        self.queue.publish(0)

    @rule(name=st.sampled_from("abc"), most=st.integers(1, 5))
    def ask(self, name: str, most: int) -> None:
        if name not in self.working:
            groups = self.queue.hand_out(name, most)
            assert len(set(groups)) == len(groups) <= most
            if groups:
                self.working[name] = (self.published, groups)

    @rule(name=st.sampled_from("abc"), flat=st.booleans())
    def bring(self, name: str, flat: bool) -> None:
        version, groups = self.working.pop(name, (0, []))
        for group in groups:
            self.queue.deliver(group, version, group, flat=flat and self.rules.most_made is not None)

    @rule(name=st.sampled_from("abc"))
    def die(self, name: str) -> None:
        self.working.pop(name, None)
        self.queue.give_back(name)

    @rule(seconds=st.floats(0.0, 20.0))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def train(self) -> None:
        update = self.queue.step
        taken = self.queue.take()
        if taken is None:
            return
        trained = [*taken.groups, *taken.filled]
        assert len(trained) == self.groups
        assert all(0 <= update - 1 - ready.version_step <= self.bound for ready in trained)
        self.trained.update(ready.group for ready in trained)
        self.left_out.update(ready.group for ready in taken.left_out)
        assert self.queue.aside == []

    @precondition(lambda self: hasattr(self, "queue") and self.published < self.queue.step - 1)
    @rule()
    def publish(self) -> None:
        self.published = self.queue.step - 1
        self.queue.publish(self.published)

    @precondition(lambda self: hasattr(self, "queue"))
    @rule()
    def resume(self) -> None:
        self.left_out.update(ready.group for ready in self.queue.aside)
        self.queue = GroupQueue(self.rules, self.queue.step, self.clock, json.loads(json.dumps(self.queue.position())))
        self.working.clear()
        self.published = self.queue.step - 1
        self.queue.publish(self.published)

    @invariant()
    def every_group_is_trained_on_at_most_once_or_was_flat_and_none_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert all(count == 1 for count in self.trained.values())
        position = self.queue.position()
        known = {*self.trained, *(GroupId(*group) for group in position["waiting"])}
        following = GroupId(*position["next"])
        assert not self.left_out & known
        known |= self.left_out | {ready.group for ready in self.queue.aside}
        assert len(known) == (following.step - 1) * self.groups + following.prompt
        assert self.queue.ready <= self.rules.max_open
        assert len(self.queue.aside) <= max(self.rules.max_open, self.rules.most_made or 0)

    def teardown(self) -> None:
        """Whatever happened, one explorer that works is enough for the next update."""
        if not hasattr(self, "queue"):
            return
        for name in list(self.working):
            self.die(name)
        self.queue.publish(self.queue.step - 1)
        while self.queue.take() is None:
            groups = self.queue.hand_out("a", 100)
            assert groups, "nothing is admitted, and nothing is on its way"
            for group in groups:
                self.queue.deliver(group, self.queue.step - 1, group, flat=self.rules.most_made is not None)


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
