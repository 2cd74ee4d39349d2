"""Validation while explorers go at their own pace: who does it, and what becomes of it where one dies.

The explorers are threads that do as they are told, as in test_free_rollout.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.explorer.test_free_rollout import GROUPS, LIMIT, SAMPLES, Pretend, Task, dies
from tests.samples.helpers import sample
from trinity_sync.actors.explorer_client import LOAD_TRIES, LoadReport
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.explorer.rollout import FreeRollout
from trinity_sync.explorer.validation import ValidationSettings, VersionValidations
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import group_advantages
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import ValidationTimes
from trinity_sync.samples.queue import QueueRules
from trinity_sync.samples.record import Drawing, Prompt

PROMPTS = [Prompt(index=index, text=f"val-{index}") for index in range(5)]


class Explorers(Pretend):
    """They validate, too. `answering` has what happens at the next answers, `gone` the versions that are no more."""

    def __init__(self, *names: str, restarts: int = 0) -> None:
        super().__init__(*names, restarts=restarts)
        self.held: dict[str, int] = {}
        self.taken: list[tuple[str, int]] = []
        self.answering: list[Callable[[str], None]] = []
        self.gone: set[int] = set()

    def take(self, name: str, version: Version) -> LoadReport:
        self.taken.append((name, version.step))
        if version.step in self.gone:
            raise RunError(f"{name} cannot load: version {version} is not available")
        self.held[name] = version.step
        return LoadReport(explorer=name, version=version, digest=None, bytes_moved=1, total_s=0, paused_s=0, peak_rss=1)

    def answer(
        self, name: str, version: Version, prompts: Sequence[Prompt], samples_per_prompt: int, drawing: Drawing
    ) -> SampleBatch:
        if self.answering:
            self.answering.pop(0)(name)
        return SampleBatch.of(
            sample(version.step, prompt.index, number, version=(0, self.held[name]), reward=0.5)
            for prompt in prompts
            for number in range(samples_per_prompt)
        )


class Slots(SynchronizerClient):
    """Notes which versions are leased."""

    def __init__(self) -> None:
        super().__init__(None, LIMIT)
        self.leased: dict[int, int] = {}
        self._ids = itertools.count()

    def _call(self, what: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(result=lambda limit: getattr(self, f"do_{method}")(*args))

    def do_lease(self, reader: object, version: Version) -> Any:
        number = next(self._ids)
        self.leased[number] = version.step
        return SimpleNamespace(id=number)

    def do_release(self, number: int) -> bool:
        return self.leased.pop(number, None) is not None


class World:
    def __init__(self) -> None:
        self.slots = Slots()
        self.loads: list[LoadReport] = []
        self.faults: list[tuple[str, str]] = []
        self.rollouts: list[FreeRollout] = []

    def start(
        self, members: Explorers, *, timeout_s: float = LIMIT, keep: bool = False, at_start: bool = False
    ) -> tuple[FreeRollout, VersionValidations]:
        times = ValidationTimes(interval=2, last=5, at_start=at_start)
        validations = VersionValidations(
            PROMPTS,
            members,
            ValidationSettings(times=times, samples_per_prompt=2, temperature=1.0, at_a_time=4),
            begins_with=0,
            attempt=0,
            synchronizer=self.slots,
            keep=keep,
            explorer_timeout_s=timeout_s,
            on_load=self.loads.append,
            on_fault=lambda where, error: self.faults.append((where, error)),
        )
        rollout = FreeRollout(
            Task(),
            members,
            QueueRules(groups_per_step=GROUPS, max_staleness=9, wait=True, max_open=2 * GROUPS, overdue_s=LIMIT),
            samples_per_prompt=SAMPLES,
            judge=group_advantages,
            first=1,
            position=None,
            explorer_timeout_s=LIMIT,
            on_load=self.loads.append,
            on_fault=lambda where, error: self.faults.append((where, error)),
            validations=validations,
        )
        self.rollouts.append(rollout)
        rollout.published(0)
        rollout.start()
        return rollout, validations

    def publish(self, rollout: FreeRollout, members: Explorers, *steps: int) -> None:
        for step in steps:
            members.newest = step
            rollout.published(step)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("trinity_sync.explorer.rollout.GRACE_S", 0.1)
    made = World()
    yield made
    for rollout in made.rollouts:
        rollout.close()


def steps(validations: VersionValidations) -> list[int]:
    return [done.step for done in validations.taken()]


@pytest.mark.parametrize("at_start", [False, True])
def test_the_versions_that_are_due_are_validated(world: World, at_start: bool) -> None:
    members = Explorers("a")
    rollout, validations = world.start(members, at_start=at_start)
    for step in (1, 2, 3, 4):
        assert len(rollout.take(step)) == GROUPS * SAMPLES
        world.publish(rollout, members, step)
    validations.wait()
    done = {one.step: one for one in validations.taken()}
    assert list(done) == ([0, 2, 4] if at_start else [2, 4])
    assert all((one.metrics["val/samples"], one.metrics["val/reward/mean"]) == (10, 0.5) for one in done.values())
    assert {line["version"] for line in done[2].excerpt(9)} == {2}
    assert world.slots.leased == {}
    assert not validations.open(99)


def test_a_version_is_held_until_an_explorer_has_it_and_the_others_make_samples_meanwhile(world: World) -> None:
    members, answers, asked = Explorers("a", "b"), threading.Event(), threading.Event()

    def slowly(name: str) -> None:
        asked.set()
        assert answers.wait(LIMIT)

    members.answering = [slowly]
    rollout, validations = world.start(members, at_start=True)
    assert list(world.slots.leased.values()) == [0] or asked.wait(LIMIT)
    assert asked.wait(LIMIT)
    assert world.slots.leased == {}, "the slot is free for the next version"
    assert validations.open(0)
    for step in (1, 2, 3):
        assert len(rollout.take(step)) == GROUPS * SAMPLES
        world.publish(rollout, members, step)
    assert {name for name, _ in members.calls} == {({"a", "b"} - {members.taken[0][0]}).pop()}
    answers.set()
    validations.wait()
    assert sorted(steps(validations)) == [0, 2]


def test_another_one_begins_anew_where_the_one_that_validates_dies(world: World) -> None:
    members = Explorers("a", "b")
    members.answering = [lambda name: None, lambda name: dies(name)()]
    _, validations = world.start(members, at_start=True)
    validations.wait()
    (done,) = validations.taken()
    assert done.metrics["val/samples"] == 10
    (first, _), (second, _) = members.taken
    assert first != second
    assert world.faults[0] == (first, f"version 0 is to be validated once more: {first} died before it could generate")


def test_it_is_lost_and_told_where_its_version_is_gone_and_nobody_waits_for_it(world: World) -> None:
    members = Explorers("a", restarts=1)
    members.answering = [lambda name: members.gone.add(0) or dies(name)()]  # type: ignore[func-returns-value]
    rollout, validations = world.start(members, at_start=True)
    validations.wait()
    assert steps(validations) == []
    assert world.faults[-1] == (
        "validation of version 0",
        "it is not validated: a cannot load: version 0 is not available",
    )
    assert len(members.taken) == 1 + LOAD_TRIES
    assert len(rollout.take(1)) == GROUPS * SAMPLES


def test_the_loss_of_a_process_during_the_load_of_a_validation_ends_the_attempt_as_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(name: str, version: Version) -> LoadReport:
        raise ProcessLoss("pid 7 does not reach Ray's raylet on its node any more")

    members = Explorers("a")
    monkeypatch.setattr(members, "take", take)
    rollout, validations = world.start(members, at_start=True)
    for wait in (validations.wait, lambda: rollout.take(1)):
        with pytest.raises(ProcessLoss, match="does not reach Ray's raylet"):
            wait()
    assert world.faults == []


def test_with_slots_enough_a_version_is_held_until_it_is_validated(world: World) -> None:
    members, held = Explorers("a"), []
    members.answering = [lambda name: held.extend(world.slots.leased.values())]
    _, validations = world.start(members, keep=True, at_start=True)
    validations.wait()
    assert (held, world.slots.leased) == ([0], {})


def test_what_ends_the_run_is_told_to_whoever_waits_for_a_validation(world: World) -> None:
    def refuses(name: str) -> None:
        raise RunError("the reward function f failed")

    members = Explorers("a")
    members.answering = [refuses]
    rollout, validations = world.start(members, at_start=True)
    with pytest.raises(RunError, match="the reward function f failed"):
        validations.wait()
    with pytest.raises(RunError, match="the reward function f failed"):
        rollout.take(1)


def test_the_wait_has_a_limit_and_says_who_validates_what(world: World) -> None:
    members, ends = Explorers("a"), threading.Event()
    members.answering = [lambda name: ends.wait(LIMIT) and None]  # type: ignore[list-item,func-returns-value]
    _, validations = world.start(members, timeout_s=0.2, at_start=True)
    with pytest.raises(WaitTimeout, match=r"^(a|the explorers) did not validate version 0 within 0\.2 s$"):
        validations.wait()
    validations.give_up("the run was stopped")
    assert not validations.open(0)
    assert world.faults == [("validation of version 0", "it is not validated: the run was stopped")]
    ends.set()
