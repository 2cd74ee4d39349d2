"""The free loop: what it waits for and what it does not, with ranks, versions and samples that are pretended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.samples.helpers import sample
from tests.trainer.ranks import Asked
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.actors.synchronizer_client import SealedVersion, SynchronizerClient
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import DrawnGroups
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import Sample
from trinity_sync.tracking.events import Event, event_name, event_step
from trinity_sync.trainer.free_loop import FreeLoop
from trinity_sync.trainer.steps import LoopSettings, Steps

LIMIT = 30.0


def settings(**changes: Any) -> LoopSettings:
    given: dict[str, Any] = {"steps": 4, "first": 1, "attempt": 0, "mode": "memory", "sync_interval": 1}
    given |= {"max_staleness": 9, "save_interval": 0, "sync_timeout_s": LIMIT, "step_timeout_s": LIMIT}
    return LoopSettings(**(given | changes))


class World:
    """Ranks, synchronizer, sync mode, samples, saves and log in one; `happened` is their common diary.

    Versions below `stuck` are sealed at once; the others when `sealing` is set, by the training of step `seals_at`.
    """

    def __init__(self, *, slots_taken: frozenset[int] = frozenset(), stuck: int = 99, seals_at: int = 0) -> None:
        self.happened: list[Any] = []
        self.sealing = threading.Event()
        self.slots_taken = slots_taken
        self.stuck = stuck
        self.seals_at = seals_at
        self.newest = threading.Condition()
        self.published_steps: list[int] = []
        self.error: BaseException | None = None
        self.unpublishable: int | None = None
        self.dies_in: int | None = None
        self.losses: dict[int, float | None] = {}
        self.skipped: dict[int, int] = {}
        self.drawn_all: DrawnGroups | None = None
        self.unjudged: dict[int, str] = {}
        self.given_up: str | None = None
        self.refused: str | None = None
        self.lines: list[dict[str, Any]] = []
        self.validations: Any = None
        self.late: dict[int, Any] = {}
        self.room_for_states = True

    # the ranks
    def all(self, ask: Callable[[RankClient], Any], timeout_s: float) -> Any:
        method, args = ask(Asked())
        return getattr(self, f"do_{method}")(*args)

    def do_train_step(self, step: int, batch: Any, advantages: Any) -> list[dict[str, float]]:
        self.happened.append(("train", step))
        if step == self.seals_at:
            self.sealing.set()
        if step == self.dies_in:
            raise RunError("trainer rank 0 died")
        loss = self.losses.get(step, 0.5)
        return [{}, {"pg_loss": 0.0} if loss is None else {"loss": loss, "updates/skipped": self.skipped.get(step, 0)}]

    def do_stage(self, version: Version, slot: int, lazily: bool) -> list[float]:
        assert lazily
        self.happened.append(("copy", version.step))
        return [0.1]

    # the synchronizer
    def do_begin(self, version: Version, parts: list[str], limit: float) -> int:
        self.happened.append(("wait for a slot", version.step))
        return 0

    def do_begin_if_free(self, version: Version, parts: list[str]) -> int | None:
        return None if version.step in self.slots_taken else 0

    def do_wait_sealed(self, version: Version, limit: float) -> SealedVersion:
        if version.step >= self.stuck:
            assert self.sealing.wait(LIMIT)
        if self.given_up is not None:
            raise RunError(self.given_up)
        return SealedVersion(version=version, slot=0, digest=f"d{version.step}", parts={})

    def do_failed(self, version: Version, error: str) -> None:
        self.given_up = error
        self.sealing.set()

    # the sync mode
    def publish(self, sealed: SealedVersion) -> None:
        if sealed.version.step == self.unpublishable:
            raise RunError(f"version {sealed.version} could not be written")

    # the samples
    def start(self) -> None:
        self.happened.append("start")

    def published(self, step: int) -> None:
        with self.newest:
            self.published_steps.append(step)
            self.newest.notify_all()

    def take(self, step: int) -> SampleBatch:
        if self.unpublishable is not None:  # this trainer needs each version
            with self.newest:
                assert self.newest.wait_for(lambda: self.error or step - 1 in self.published_steps, LIMIT)
        if self.error is not None:
            raise self.error
        fixed: dict[str, Any] = {"prompt_ids": (1,), "response_ids": (2,), "log_probs": (-1.0,), "exact": None}
        fixed["error"] = self.unjudged.get(step, "")
        return SampleBatch.of(
            [Sample(step=step, prompt=0, sample=0, version=(0, step - 1), reward=1.0, text="", finished=True, **fixed)]
        )

    def drawn(self) -> DrawnGroups | None:
        return self.drawn_all

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        return np.zeros(len(batch))

    def metrics(self, step: int | None = None, values: Any = None) -> Any:
        if step is None:
            return {"samples/dropped": 0.0}
        self.lines.append({"step": step, **values})
        return None

    def excerpt(self, batch: SampleBatch, advantages: Any, groups: int) -> list[dict[str, object]]:
        return [{"for_step": int(batch.steps[0]), "advantage": advantages[0]}] * groups

    def samples(self, step: int, lines: Any) -> None:
        self.happened.append(("samples", step, lines))

    def position(self) -> dict[str, Any]:
        return {"next": [7, 0]}

    def fail(self, error: BaseException) -> None:
        with self.newest:
            self.error = error
            self.newest.notify_all()

    def pause(self) -> None:
        self.happened.append("pause")

    def close(self) -> None:
        self.happened.append("close")

    # saves and log
    def begin(
        self, step: int, digest: str, metrics: dict[str, float], *, state: Any, late: Any, in_memory: bool
    ) -> None:
        self.happened.append(("keep" if in_memory else "save", step, digest, state["data"]))
        self.late[step] = late

    def keeps(self) -> bool:
        return self.room_for_states

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        self.happened.append("finish")

    def event(self, event: Event) -> None:
        step = event_step(event)
        if event_name(event) == self.refused and step:
            raise RunError("events.jsonl cannot be written: No space left on device")
        self.happened.append((event_name(event), step))

    def loop(self, **changes: Any) -> FreeLoop:
        stop = changes.pop("stop", None)
        me: Any = self
        parts = ["rank-00000"]
        steps = Steps(settings(**changes), trainer=me, synchronizer=Meeting(self), parts=parts, log=me)
        return FreeLoop(steps, source=me, mode=me, saves=me, stop=stop, validator=self.validations)

    def times(self, what: str) -> list[int]:
        return [entry[1] for entry in self.happened if isinstance(entry, tuple) and entry[0] == what]


class Meeting(SynchronizerClient):
    """Has the world answer in place of the synchronizer, when the answer is waited for."""

    def __init__(self, world: World) -> None:
        super().__init__(None, LIMIT)
        self._world = world

    def _call(self, what: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(result=lambda limit: getattr(self._world, f"do_{method}")(*args))


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: value)


def test_all_steps_are_trained_and_the_last_version_is_published_and_saved() -> None:
    world = World()
    assert world.loop().run()
    assert world.times("train") == [1, 2, 3, 4]
    assert world.published_steps[0] == 0
    assert world.published_steps[-1] == 4
    assert world.times("publish") == world.published_steps
    assert ("save", 4, "d4", {"next": [7, 0]}) in world.happened
    assert (world.happened[0], world.happened[-2:]) == ("start", ["close", "finish"])
    assert [line["step"] for line in world.lines] == [1, 2, 3, 4]
    assert all({"samples/dropped", "staleness/max", "timing/generate"} <= line.keys() for line in world.lines)


def test_the_trainer_goes_on_while_a_version_is_on_its_way_and_leaves_the_next_ones_out() -> None:
    world = World(stuck=1, seals_at=5)
    assert world.loop(steps=5).run()
    assert world.times("skip") == [2, 3, 4]
    assert world.published_steps == [0, 1, 5]
    assert world.happened.index(("train", 5)) < world.happened.index(("publish", 1))


def test_states_in_memory_are_those_of_published_versions_and_make_none() -> None:
    world = World(slots_taken=frozenset({2}))
    world.loop(steps=5, memory_interval=1, max_staleness=2).run()
    assert world.published_steps == [0, 1, 3, 4, 5]
    assert world.times("keep") == [1, 3, 4]
    assert world.times("save") == [5]
    world = World()
    world.room_for_states = False
    world.loop(memory_interval=1).run()
    assert world.times("keep") == []


def test_samples_of_the_steps_that_are_due_are_written_out() -> None:
    world = World()
    assert world.loop(steps=5, record_interval=2, record_groups=1).run()
    assert [entry for entry in world.happened if entry[0] == "samples"] == [
        ("samples", step, [{"for_step": step, "advantage": 0.0}]) for step in (2, 4)
    ]


def test_a_version_without_a_slot_is_left_out_where_explorers_can_do_without_it() -> None:
    world = World(slots_taken=frozenset({1, 2, 3}))
    world.loop(max_staleness=2).run()
    assert world.times("skip") == [1, 2]  # the samples of update 4 may be no older than version 1
    assert world.times("wait for a slot") == [0, 3, 4]


def test_with_an_interval_every_version_counts_that_the_bound_needs() -> None:
    world = World(slots_taken=frozenset(range(99)))
    world.loop(steps=8, sync_interval=2, max_staleness=4).run()
    # Until step 4 is over, updates take version 0, the last of them with a staleness of 3.
    assert world.times("skip") == [2, 6]
    assert world.times("wait for a slot") == [0, 4, 8]


def test_a_checkpoint_waits_for_its_own_version_whether_or_not_one_is_due() -> None:
    world = World()
    world.loop(sync_interval=4, save_interval=3).run()
    saved = [entry[1:3] for entry in world.happened if entry[0] == "save"]
    assert saved == [(3, "d3"), (4, "d4")]


def test_a_version_that_cannot_be_published_ends_the_run_also_while_it_waits_for_samples() -> None:
    world = World()
    world.unpublishable = 2
    with pytest.raises(RunError, match="version 2 could not be written"):
        world.loop().run()
    assert world.times("train") == [1, 2]
    assert (world.happened[-1], "close" in world.happened) == ("pause", False)  # explorers may outlive the attempt


def test_an_interrupt_closes_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def interrupted(step: int) -> SampleBatch:
        raise KeyboardInterrupt

    monkeypatch.setattr(world, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.loop().run()
    assert (world.happened[-1], "pause" in world.happened) == ("close", False)


def test_a_publication_that_cannot_be_noted_ends_the_run_also_while_it_waits_for_samples() -> None:
    world = World()
    world.unpublishable, world.refused = -1, "publish"
    with pytest.raises(RunError, match="No space left"):
        world.loop().run()


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_nothing_of_its_step_is_published_or_saved(loss: float) -> None:
    world = World()
    world.losses = {3: loss}
    with pytest.raises(RunError, match=rf"^the loss of step 3 is {loss}; the newest checkpoint is unharmed$"):
        world.loop(save_interval=1).run()
    assert world.times("train") == [1, 2, 3]
    assert world.times("save") == [1, 2]
    assert max(world.published_steps) == 2
    assert [line["step"] for line in world.lines] == [1, 2]
    assert world.happened[-1] == "pause"


def test_an_update_that_was_skipped_is_an_event() -> None:
    world = World()
    world.skipped = {2: 1}
    world.loop().run()
    assert world.times("skipped_update") == [2]


def test_responses_that_could_not_be_judged_are_an_event() -> None:
    world = World()
    world.unjudged = {2: "the reward function f failed"}
    world.loop().run()
    assert world.times("failed_rewards") == [2]


def test_a_batch_that_was_filled_is_an_event_and_rewards_are_those_of_all_that_was_drawn() -> None:
    world = World()
    samples = [sample(prompt=prompt, number=number, reward=0.25) for prompt in (0, 1) for number in (0, 1)]
    samples += [sample(prompt=1, number=2, reward=None, error="it raised")]
    world.drawn_all = DrawnGroups(SampleBatch.of(samples), groups=2, flat=2, filled=1, surplus=0)
    world.loop(steps=1).run()
    assert world.times("filled_batch") == world.times("failed_rewards") == [1]
    (line,) = world.lines
    assert (line["reward/mean"], line["batch/samples"], line["filter_groups/filled"]) == (0.25, 1, 1)


def test_a_loss_that_nobody_gives_ends_the_run() -> None:
    world = World()
    world.losses = {2: None}
    with pytest.raises(RunError, match=r"^the loss of step 2 is missing from the ranks' metrics; "):
        world.loop().run()
    assert world.times("train") == [1, 2]


def test_a_run_that_fails_leaves_no_publication_on_its_way() -> None:
    world = World(stuck=1)
    world.dies_in = 2
    with pytest.raises(RunError, match="trainer rank 0 died"):
        world.loop().run()
    assert world.given_up == "the run ended"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publish-")]


def test_a_run_that_is_told_to_stop_saves_the_step_it_is_in() -> None:
    world, stop = World(), threading.Event()
    stop.set()
    assert not world.loop(stop=stop).run()
    assert world.times("train") == world.times("save") == [1]


class Validating:
    """Validates each second version, in the background: `finish` brings what was done by then."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done: list[Any] = []
        self.given_up = ""

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def open(self, step: int) -> bool:
        told = {line["step"] for line in self.world.lines if "val/failed" in line}
        finished = told | {one.step for one in self.done}
        due = {one for one in self.world.published_steps if self.due(one) and one <= step}
        return not self.given_up and bool(due - finished)

    def finish(self, *steps: int, failed: int = 0) -> None:
        for step in steps:
            metrics = {"val/reward/mean": step / 10, "val/failed": float(failed)}
            found = {"step": step, "metrics": metrics, "failure": "f failed", "total_s": 2.0}
            self.done.append(SimpleNamespace(**found, excerpt=lambda groups: [groups]))

    def taken(self) -> list[Any]:
        done, self.done = self.done, []
        return done

    def wait(self) -> None:
        self.world.happened.append("wait for validations")
        self.finish(*(step for step in self.world.published_steps if self.due(step)))

    def give_up(self, why: str) -> None:
        self.given_up = why


def test_what_a_validation_measured_stands_in_a_line_of_its_version_and_nobody_waits_but_the_end() -> None:
    world = World(slots_taken=frozenset({2}))
    world.validations = Validating(world)
    world.validations.finish(0, failed=3)
    assert world.loop(save_interval=4, record_interval=2, record_groups=7).run()
    validated = [line for line in world.lines if "val/reward/mean" in line]
    assert [(line["step"], line["val/reward/mean"], line["val/seconds"]) for line in validated] == [
        (0, 0.0, 2.0),
        (0, 0.0, 2.0),
        (2, 0.2, 2.0),
        (4, 0.4, 2.0),
    ]
    assert world.lines.index(validated[0]) == 1, "after the line of the first step"
    assert world.times("failed_rewards") == [0]
    assert world.happened.index(("train", 4)) < world.happened.index("wait for validations")
    assert ("samples", 2, [7]) in world.happened
    assert 2 in world.published_steps, "a version that is due is not left out, though no slot was free at once"


def test_a_checkpoint_is_told_what_its_validation_measured_once_all_before_it_are_done() -> None:
    world = World()
    world.validations = Validating(world)
    loop = world.loop(save_interval=1)
    waited: list[Any] = []
    world.poll = lambda: waited.append({step: late(step) for step, late in world.late.items()})  # type: ignore[method-assign]
    world.validations.finish(0)
    assert loop.run()
    assert waited == [{1: {}}, {1: {}, 2: None}, {1: {}, 2: None, 3: None}, {1: {}, 2: None, 3: None, 4: None}]
    assert world.late[3](3) == {}
    assert [world.late[step](step)["val/reward/mean"] for step in (2, 4)] == [0.2, 0.4]


def test_a_run_that_is_told_to_stop_waits_for_no_validation() -> None:
    world, stop = World(), threading.Event()
    world.validations = Validating(world)
    stop.set()
    assert not world.loop(stop=stop).run()
    assert world.validations.given_up == "the run was stopped"
    assert "wait for validations" not in world.happened
