"""Explorers at their own pace: who goes on while another one is dead, hangs or comes late, and what the trainer sees.

The explorers are threads that do as they are told; real ones are asked in test_pool.py and killed in tests/e2e.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import until
from trinity_sync.actors.calls import DeathError
from trinity_sync.actors.explorer_client import ExplorerClient, LoadError, LoadReport, Production
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.explorer.rollout import LOAD_TRIES, FreeRollout
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import GroupFilter, group_advantages
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.journal import Journal
from trinity_sync.samples.position import GroupId
from trinity_sync.samples.queue import QueueRules
from trinity_sync.samples.record import Prompt, Sample

LIMIT = 30.0
GROUPS, SAMPLES = 4, 2

Work = Sequence[tuple[int, Sequence[Prompt]]]


class Task:
    def prompts(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(index=index, text=f"{step}-{index}") for index in range(count)]


class Pretend:
    """Explorers by name. Each makes what it is asked for, unless `orders` has a function for its next call."""

    def __init__(self, *names: str, restarts: int = 0) -> None:
        self.clients = {name: ExplorerClient(None, name) for name in names}
        self.newest, self.replicas = 0, len(names)
        self.restarts = restarts
        self.orders: dict[str, list[Callable[[], None]]] = {name: [] for name in names}
        self.joining: dict[str, list[Callable[[], None]]] = {name: [] for name in names}
        self.calls: list[tuple[str, Work]] = []
        self.killed: dict[str, threading.Event] = {name: threading.Event() for name in names}
        self.replaced: list[str] = []
        self.freed = threading.Event()
        self.flat: frozenset[str] = frozenset()
        self.held: dict[str, Version | None] = {}  # of those that leave; else that of step 0

    def join(self, name: str) -> None:
        for order in self.joining[name]:
            order()

    def produce(self, name: str, work: Work, samples_per_prompt: int) -> Production:
        version = self.newest
        batch = self._batch(name, work, samples_per_prompt, version)
        report = LoadReport(
            explorer=name, version=Version(0, version), digest=None, bytes_moved=1, total_s=0, paused_s=0, peak_rss=1
        )
        return Production(batch, report)

    def leave(self, name: str) -> Version | None:
        return self.held.get(name, Version(0, 0))

    def go_on(self, name: str, step: int, prompts: Sequence[Prompt], samples_per_prompt: int) -> SampleBatch:
        held = self.leave(name)
        assert held is not None
        return self._batch(name, [(step, prompts)], samples_per_prompt, held.step)

    def _batch(self, name: str, work: Work, samples_per_prompt: int, version: int) -> SampleBatch:
        self.calls.append((name, work))
        if self.orders[name]:
            self.orders[name].pop(0)()
        return SampleBatch.of(
            Sample(
                step=step,
                prompt=prompt.index,
                sample=number,
                prompt_ids=(1,),
                response_ids=(2,),
                log_probs=(-1.0,),
                version=(0, version),
                reward=0.0 if prompt.text in self.flat else float(number),
                exact=None,
                text=f"{name}:{prompt.text}",
                finished=True,
            )
            for step, prompts in work
            for prompt in prompts
            for number in range(samples_per_prompt)
        )

    def replace(self, name: str, why: Exception) -> bool:
        self.replaced.append(name)
        self.restarts -= 1
        return self.restarts >= 0

    def end(self, name: str) -> None:
        self.killed[name].set()

    # -- orders

    def hang(self, name: str) -> Callable[[], None]:
        """Until it is killed, as a stopped process."""

        def order() -> None:
            assert self.killed[name].wait(LIMIT)
            raise DeathError(name, "generate")

        return order


def dies(name: str) -> Callable[[], None]:
    def order() -> None:
        raise DeathError(name, "generate")

    return order


class Runs:
    """Makes rollouts and ends them."""

    def __init__(self) -> None:
        self.made: list[FreeRollout] = []
        self.loads: list[LoadReport] = []
        self.faults: list[tuple[str, str]] = []

    def start(
        self,
        members: Pretend,
        *,
        overdue_s: float = LIMIT,
        timeout_s: float = LIMIT,
        group_filter: GroupFilter | None = None,
        first: int = 1,
        position: Any = None,
        journal: Journal | None = None,
        outlives: bool = False,
        **rules: Any,
    ) -> FreeRollout:
        given = {"groups_per_step": GROUPS, "max_staleness": 1, "wait": True, "max_open": 2 * GROUPS}
        rollout = FreeRollout(
            Task(),
            members,
            QueueRules(**(given | rules), overdue_s=overdue_s),
            samples_per_prompt=SAMPLES,
            judge=group_advantages,
            first=first,
            position=position,
            journal=journal,
            explorer_timeout_s=timeout_s,
            on_load=self.loads.append,
            on_fault=lambda where, error: self.faults.append((where, error)),
            group_filter=group_filter,
            outlives=outlives,
        )
        self.made.append(rollout)
        rollout.start()
        rollout.published(first - 1)
        return rollout


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setattr("trinity_sync.explorer.rollout.GRACE_S", 0.1)
    made = Runs()
    yield made
    for rollout in made.made:
        rollout.close()
    names = {name for rollout in made.made for name in rollout._pool.clients}
    assert not [thread for thread in threading.enumerate() if thread.name in names]


def train(rollout: FreeRollout, members: Pretend, *steps: int) -> list[SampleBatch]:
    batches = []
    for step in steps:
        batches.append(rollout.take(step))
        members.newest = step
        rollout.published(step)
    return batches


def test_every_batch_is_whole_and_sorted_and_every_prompt_is_trained_on_once(runs: Runs) -> None:
    members = Pretend("a", "b", "c")
    rollout = runs.start(members)
    batches = train(rollout, members, *range(1, 21))
    for batch in batches:
        assert len(batch) == GROUPS * SAMPLES
        assert [item.order for item in batch] == sorted(item.order for item in batch)
        assert rollout.advantages(batch).reshape(-1, SAMPLES).sum(axis=1) == pytest.approx(0)
    trained = [(item.step, item.prompt) for batch in batches for item in batch]
    assert len(set(trained)) == len(trained) / SAMPLES == 20 * GROUPS
    assert runs.faults == []
    assert {report.explorer for report in runs.loads} <= {"a", "b", "c"}
    facts = rollout.metrics()
    assert facts["samples/explorers"] == 3
    assert rollout.metrics()["samples/waited_s"] <= facts["samples/waited_s"] + LIMIT


def filtered(*, fill: bool) -> dict[str, Any]:
    made = GroupFilter(wanted=GROUPS, metric="reward", batches=2, fill=fill)
    return {"group_filter": made, "most_made": made.most}


def test_groups_without_a_difference_are_left_out_and_told_of(runs: Runs) -> None:
    members = Pretend("a")
    members.flat = frozenset(f"{step}-{index}" for step in (1, 2) for index in (0, 2))
    rollout = runs.start(members, **filtered(fill=True), max_staleness=0)
    batch, another = train(rollout, members, 1), train(rollout, members, 2)
    trained = {(item.step, item.prompt) for item in batch[0]}
    assert len(trained) == GROUPS
    assert not {f"{step}-{index}" for step, index in trained} & members.flat
    drawn = rollout.drawn()
    assert drawn is not None
    assert len(another[0]) == GROUPS * SAMPLES
    assert drawn.groups == GROUPS + drawn.flat
    assert (drawn.filled, drawn.surplus) == (0, 0)
    assert rollout.position()["waiting"] == []


@pytest.mark.parametrize("fill", [True, False])
def test_a_step_that_finds_too_few_takes_others_or_ends_the_run(runs: Runs, fill: bool) -> None:
    members = Pretend("a", "b")
    members.flat = frozenset(f"{step}-{index}" for step in range(1, 9) for index in range(GROUPS)) - {"2-1"}
    rollout = runs.start(members, **filtered(fill=fill), max_staleness=0)
    if not fill:
        with pytest.raises(RunError, match="answered for step 1, 1 have samples whose reward differs"):
            rollout.take(1)
        return
    batch = rollout.take(1)
    assert (2, 1) in {(item.step, item.prompt) for item in batch}
    assert len(batch) == GROUPS * SAMPLES
    drawn = rollout.drawn()
    assert drawn is not None
    assert (drawn.groups, drawn.flat, drawn.filled) == (2 * GROUPS, 2 * GROUPS - 1, GROUPS - 1)
    assert len(drawn.samples) == 2 * GROUPS * SAMPLES


def test_the_others_go_on_without_a_dead_one_and_make_its_groups_anew(runs: Runs) -> None:
    members = Pretend("a", "b")
    members.orders["a"] = [dies("a")]
    rollout = runs.start(members)
    step = 1
    while not runs.faults:
        train(rollout, members, step)
        step += 1
    assert members.replaced == ["a"]
    ((where, error),) = runs.faults
    assert where == "a"
    assert error.startswith("a died before it could generate; the run goes on with b. See logs/a.log")
    assert rollout.metrics()["samples/explorers"] == 1


def test_a_dead_one_is_started_again_where_that_is_allowed(runs: Runs) -> None:
    members = Pretend("a", restarts=1)
    members.orders["a"] = [dies("a")]
    rollout = runs.start(members)
    train(rollout, members, 1, 2)
    assert (members.replaced, runs.faults) == (["a"], [])  # the pool tells of what it makes good


def test_the_last_one_ends_the_run_and_says_what_would_help(runs: Runs) -> None:
    members = Pretend("a", "b", restarts=0)
    members.orders = {"a": [dies("a")], "b": [dies("b")]}
    rollout = runs.start(members)
    with pytest.raises(RunError, match=r"died before .*no other explorer is left.*explorer\.max_restarts"):
        rollout.take(1)


def test_a_hanging_one_keeps_the_trainer_waiting_for_the_limit_only(runs: Runs) -> None:
    members = Pretend("a", "b")
    members.orders["a"] = [members.hang("a")]
    rollout = runs.start(members, overdue_s=0.05)
    batches = train(rollout, members, 1, 2, 3)
    assert all(item.text.startswith("b:") for batch in batches for item in batch)
    assert runs.faults == []


def test_explorers_answer_for_the_time_in_which_the_trainer_waited_only(runs: Runs) -> None:
    members, waits = Pretend("a"), threading.Event()
    rollout = runs.start(members, max_staleness=0, timeout_s=LIMIT)
    train(rollout, members, 1)
    rollout._progress -= 2 * LIMIT  # so long the trainer took for its step, and nobody could make anything
    members.orders["a"] = [lambda: waits.wait(LIMIT) and None]
    threading.Timer(0.1, waits.set).start()
    assert len(rollout.take(2)) == GROUPS * SAMPLES


def test_one_that_is_still_starting_joins_late_and_nobody_waits_for_it(runs: Runs) -> None:
    members, up = Pretend("a", "b"), threading.Event()
    members.joining["b"] = [lambda: up.wait(LIMIT) and None]  # type: ignore[list-item,func-returns-value]
    rollout = runs.start(members)
    train(rollout, members, 1, 2, 3)
    assert {name for name, _ in members.calls} == {"a"}
    up.set()
    step = 4
    while not any(name == "b" for name, _ in members.calls):
        train(rollout, members, step)
        step += 1
    assert next(report.version.step for report in runs.loads if report.explorer == "b") >= 3


def test_a_load_that_failed_is_repeated_and_told(runs: Runs) -> None:
    def fails() -> None:
        raise LoadError("a could not load the newest version: bucket 3 arrived damaged")

    members = Pretend("a")
    members.orders["a"] = [fails] * (LOAD_TRIES - 1)
    rollout = runs.start(members)
    train(rollout, members, 1)
    assert [where for where, _ in runs.faults] == ["a"] * (LOAD_TRIES - 1)
    assert members.replaced == []
    members.orders["a"] = [fails] * LOAD_TRIES
    with pytest.raises(RunError, match="bucket 3 arrived damaged, and no other explorer is left") as caught:
        train(rollout, members, *range(2, 9))
    assert not isinstance(caught.value, ProcessLoss)


def test_loads_that_fail_for_a_lost_process_end_as_its_loss_which_can_be_healed(runs: Runs) -> None:
    def fails() -> None:
        raise LoadError("a could not load the newest version: the node agent died before it could send", lost=True)

    members = Pretend("a")
    members.orders["a"] = [fails] * LOAD_TRIES
    with pytest.raises(ProcessLoss, match=r"the node agent died before .* and no other explorer is left"):
        train(runs.start(members), members, 1)


def test_an_error_that_no_restart_mends_ends_the_run(runs: Runs) -> None:
    def refuses() -> None:
        raise RunError("my_rewards.broken returned nan for prompt 0 of step 1")

    members = Pretend("a", "b", restarts=9)
    members.orders["a"] = [refuses]
    rollout = runs.start(members)
    with pytest.raises(RunError, match=r"my_rewards\.broken"):
        train(rollout, members, *range(1, 100_000))
    assert members.replaced == []


def test_whoever_waits_for_samples_is_told_who_does_not_make_them(runs: Runs) -> None:
    members = Pretend("a")
    members.orders["a"] = [members.hang("a")]
    rollout = runs.start(members, timeout_s=0.05)
    with pytest.raises(WaitTimeout, match=r"^a did not make the samples of step 1 within 0\.05 s$"):
        rollout.take(1)


def test_a_version_that_cannot_be_published_is_told_to_the_waiting_trainer(runs: Runs) -> None:
    members = Pretend("a")
    rollout = runs.start(members, max_staleness=0)
    train(rollout, members, 1)
    rollout.take(2)
    waiting = threading.Timer(0.05, rollout.fail, (RunError("version 2 could not be staged"),))
    waiting.start()
    with pytest.raises(RunError, match="version 2 could not be staged"):
        rollout.take(3)


def test_a_run_that_ends_while_an_explorer_is_started_again_leaves_nothing_running(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, begun = Pretend("a", "b"), threading.Event()
    members.orders = {"a": [dies("a")], "b": [members.hang("b")]}

    def replace(name: str, why: Exception) -> bool:
        begun.set()
        assert members.killed[name].wait(LIMIT)
        return False

    monkeypatch.setattr(members, "replace", replace)
    rollout = runs.start(members)
    assert begun.wait(LIMIT)
    rollout.close()
    assert runs.faults == []


def test_what_was_dropped_is_counted_in_samples(runs: Runs) -> None:
    members = Pretend("a")
    rollout = runs.start(members, wait=False, max_open=3 * GROUPS)
    while rollout.metrics()["samples/ready"] < 3 * GROUPS * SAMPLES:
        pass
    train(rollout, members, 1, 2)
    train(rollout, members, 3)
    # Also what the explorer began with version 0 while the trainer was about to publish 1.
    assert GROUPS * SAMPLES <= rollout.metrics()["samples/dropped"] <= 3 * GROUPS * SAMPLES


# -- the journal


@pytest.fixture
def journal(tmp_path: Path) -> Callable[[int], Journal]:
    def of(attempt: int) -> Journal:
        return Journal(
            tmp_path / "journal",
            run="run",
            made_with="settings",
            attempt=attempt,
            most_bytes=1 << 24,
            fault=lambda where, error: pytest.fail(error),
        )

    return of


def groups_of(*batches: SampleBatch) -> set[GroupId]:
    return {GroupId(item.step, item.prompt) for batch in batches for item in batch}


def asked(members: Pretend) -> set[GroupId]:
    return {GroupId(step, prompt.index) for _, work in members.calls for step, prompts in work for prompt in prompts}


@pytest.mark.parametrize("flat", [False, True])
def test_a_run_that_goes_on_trains_on_the_same_batches_and_makes_no_finished_group_again(
    runs: Runs, journal: Callable[[int], Journal], flat: bool
) -> None:
    settings: dict[str, Any] = filtered(fill=True) if flat else {}
    never_made = frozenset(f"{step}-{index}" for step in range(1, 9) for index in (0, 2)) if flat else frozenset()
    members = Pretend("a", "b")
    members.flat = never_made
    rollout = runs.start(members, journal=(first := journal(0)), **settings)
    train(rollout, members, 1)
    position = rollout.position()
    before = [list(batch) for batch in train(rollout, members, 2, 3)]
    ends = time.monotonic() + LIMIT
    while not rollout.metrics()["samples/ready"]:
        assert time.monotonic() < ends
        time.sleep(0.01)
    rollout.close()
    first.close()
    finished = {GroupId(*group) for group in rollout._queue._ready}
    assert finished

    again = Pretend("a", "b")
    again.flat, again.newest = never_made, 1
    second = runs.start(again, journal=journal(1), first=2, position=position, **settings)
    repeated = train(second, again, 2, 3)
    assert [list(batch) for batch in repeated] == before
    after = train(second, again, 4, 5, 6)
    assert not asked(again) & (groups_of(*repeated) | finished)
    trained = [group for batch in (*repeated, *after) for group in groups_of(batch)]
    assert len(trained) == len(set(trained)) == 5 * GROUPS


def test_a_position_saved_while_steps_are_repeated_has_the_groups_of_those_to_come(
    runs: Runs, journal: Callable[[int], Journal]
) -> None:
    members = Pretend("a")
    rollout = runs.start(members, journal=(first := journal(0)))
    batches = train(rollout, members, 1, 2, 3)
    rollout.close()
    first.close()
    again = Pretend("a")
    second = runs.start(again, journal=journal(1))
    train(second, again, 1)
    position = second.position()
    waiting = {GroupId(*group) for group in position["waiting"]}
    following = GroupId(*position["next"])
    assert all(group in waiting or group >= following for group in groups_of(*batches[1:]))
    assert not waiting & groups_of(batches[0])


# -- explorers that generate between two attempts


def made_by(rollout: FreeRollout, count: int) -> None:
    """Wait until so many groups were made without the trainer."""
    ends = time.monotonic() + LIMIT
    while rollout.made < count:
        assert time.monotonic() < ends, f"{rollout.made} groups"
        time.sleep(0.01)


def failed(runs: Runs, members: Pretend, journal: Journal | None = None, **rules: Any) -> FreeRollout:
    """A rollout whose trainer fails in step 1; its explorers wait until `freed` sets them free."""
    for name in members.clients:
        members.joining[name] = [lambda: members.freed.wait(LIMIT) and None]
    rollout = runs.start(members, journal=journal, outlives=True, **rules)
    rollout.pause()
    members.freed.set()
    return rollout


def test_what_is_made_after_the_failure_is_within_the_bound_and_not_made_again(
    runs: Runs, journal: Callable[[int], Journal]
) -> None:
    members = Pretend("a", "b")
    rollout = failed(runs, members, first := journal(0))
    rollout.go_on_alone(["a", "b"])
    made_by(rollout, 2 * GROUPS)
    time.sleep(0.1)
    assert rollout.made == 2 * GROUPS, "version 0 serves two steps"
    rollout.close()
    made = asked(members)
    assert len(made) == 2 * GROUPS

    again = Pretend("a", "b")
    second = runs.start(again, journal=journal(1))
    batches = train(second, again, 1, 2, 3)
    assert groups_of(*batches[:2]) == made
    assert not asked(again) & made
    trained = [group for batch in batches for group in groups_of(batch)]
    assert len(trained) == len(set(trained)) == 3 * GROUPS
    assert first is not None


def test_an_explorer_of_an_older_version_makes_what_that_version_may(
    runs: Runs, journal: Callable[[int], Journal]
) -> None:
    members = Pretend("a")
    rollout = runs.start(members, journal=journal(0), outlives=True)
    train(rollout, members, 1)
    rollout.take(2)
    rollout.pause()
    rollout._threads[0].join(LIMIT)
    ahead = rollout._queue.ready
    members.held["a"] = Version(0, 1)
    rollout.go_on_alone(["a"])
    made_by(rollout, GROUPS - ahead)
    rollout.close()
    assert {ready.version_step for ready in rollout._queue._ready.values()} == {1}
    assert rollout._queue.ready == GROUPS, "version 1 serves step 3 only"


def test_a_call_under_way_ends_and_its_groups_are_kept(runs: Runs, journal: Callable[[int], Journal]) -> None:
    members, free = Pretend("a"), threading.Event()
    members.orders["a"] = [lambda: free.wait(LIMIT) and None]
    rollout = runs.start(members, journal=journal(0), outlives=True)
    until(lambda: members.calls)
    rollout.pause()
    rollout.go_on_alone(["a"])
    members.held["a"] = None  # it makes no more
    free.set()
    made_by(rollout, GROUPS)
    rollout.close()
    _, finished = journal(1).go_on(0, lambda group: True)
    assert finished.keys() == asked(members)


def test_an_explorer_that_dies_is_named_and_the_other_makes_its_groups(
    runs: Runs, journal: Callable[[int], Journal]
) -> None:
    members, called = Pretend("a", "b"), threading.Event()
    members.orders["a"] = [lambda: called.set() or dies("a")()]
    members.orders["b"] = [lambda: called.wait(LIMIT) and None]
    rollout = failed(runs, members, journal(0))
    rollout.go_on_alone(["a", "b"])
    made_by(rollout, 2 * GROUPS)
    rollout.close()
    assert rollout.lost == {"a"}
    assert (runs.faults, members.replaced) == ([], [])
    assert {item.text[0] for ready in rollout._queue._ready.values() for item in ready.samples.batch} == {"b"}


def test_an_error_of_a_reward_ends_nothing(runs: Runs, journal: Callable[[int], Journal]) -> None:
    def refuses() -> None:
        raise RunError("my_rewards.broken returned nan for prompt 0 of step 1")

    members = Pretend("a", "b")
    members.orders["a"] = [refuses]
    rollout = failed(runs, members, journal(0))
    rollout.go_on_alone(["a", "b"])
    made_by(rollout, 2 * GROUPS)
    rollout.close()
    assert (rollout.lost, runs.faults) == (set(), [])


def test_nothing_is_written_once_the_next_attempt_has_begun(
    runs: Runs, journal: Callable[[int], Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.explorer.rollout._KILLED_S", 0.1)
    members, free = Pretend("a"), threading.Event()
    rollout = failed(runs, members, journal(0))
    members.orders["a"] = [lambda: free.wait(LIMIT) and None]
    rollout.go_on_alone(["a"])
    until(lambda: members.calls)
    rollout.close(0.1)
    assert members.killed["a"].is_set()
    following = journal(1)
    free.set()
    made_by(rollout, GROUPS)
    assert following.go_on(0, lambda group: True) == ({}, {})
    assert journal(2).go_on(0, lambda group: True) == ({}, {})


def test_an_explorer_that_does_not_live_on_ends(runs: Runs, journal: Callable[[int], Journal]) -> None:
    members, free = Pretend("a", "b"), threading.Event()
    members.orders["a"] = [members.hang("a")]
    members.orders["b"] = [lambda: free.wait(LIMIT) and None]  # else it may make all groups, and a is never called
    rollout = runs.start(members, journal=journal(0), outlives=True)
    until(lambda: any(name == "a" for name, _ in members.calls))
    rollout.pause()
    rollout.go_on_alone(["b"])
    assert members.killed["a"].wait(LIMIT)
    free.set()
    assert not members.killed["b"].is_set()


@pytest.mark.parametrize("outlives", [True, False])
def test_a_failed_trainer_ends_the_generation_where_no_attempt_follows(
    runs: Runs, journal: Callable[[int], Journal], outlives: bool
) -> None:
    rollout = runs.start(Pretend("a"), journal=journal(0), outlives=outlives)
    rollout.pause()
    assert rollout.paused is outlives
    rollout.close()
    assert not rollout.paused
