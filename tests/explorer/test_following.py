"""An explorer whose engine takes versions while it generates: the explorer's own body, with an engine made up."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_sync.actors.explorer_client import LoadError, LoadReport
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.explorer.actor import Explorer, ExplorerSpec, Follower
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import Prompt, Sample
from trinity_sync.tasks.copy_digits import CopyDigits

LIMIT = 30.0
TASK = CopyDigits(2, 0)
WORK = [(step, TASK.prompts(step, 2)) for step in (1, 2)]


class Versions:
    """In place of loader and synchronizer. A load does what it is told to, and counts."""

    def __init__(self) -> None:
        self.held: Version | None = None
        self.published = Version(0, 0)
        self.timeout_s = LIMIT
        self.changed = threading.Condition()
        self.loads: list[Callable[[], None]] = []
        self.none_will_come = False

    def publish(self, step: int) -> None:
        with self.changed:
            self.published = Version(0, step)
            self.changed.notify_all()

    def newest(self) -> Any:
        return SimpleNamespace(result=lambda limit: self.published)

    def wait_newer(self, version: Version, timeout_s: float) -> Any:
        def result(limit: float) -> Version | None:
            with self.changed:
                if self.none_will_come:
                    return None
                if not self.changed.wait_for(lambda: self.published > version, timeout_s):
                    raise WaitTimeout("the trainer", "publish", timeout_s)
                return self.published

        return SimpleNamespace(result=result)

    def load(self, version: Version | None, broadcast: Any = None) -> LoadReport:
        if self.loads:
            self.loads.pop(0)()
        self.held = self.published
        sizes: dict[str, Any] = {"bytes_moved": 0, "total_s": 0.0, "paused_s": 0.0, "peak_rss": 0}
        return LoadReport(explorer="explorer-0", version=self.published, digest=None, **sizes)


class Beside(RolloutEngine):
    """Generates when it is told to, and says which version was held then."""

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self.begun: list[int] = []
        self.generating = threading.Event()
        self.go_on = threading.Event()
        self.lost = False

    @property
    def takes_beside(self) -> bool:
        return True

    def give_up(self) -> None:
        self.lost = True
        self.go_on.set()

    def after_load(self) -> None:
        self.lost = False

    def generate(
        self, prompts: Sequence[Prompt], task: Any, *, step: int, samples_per_prompt: int, version: tuple[int, int]
    ) -> SampleBatch:
        assert self.versions.held == version, "a load was under way"
        self.begun.append(step)
        self.generating.set()
        assert self.go_on.wait(LIMIT)
        if self.lost:
            raise RunError("its weights were lost")
        fixed: dict[str, Any] = {"prompt_ids": (1,), "response_ids": (2, 3), "log_probs": (-1.0, -1.0)}
        fixed |= {"reward": 0.0, "exact": None, "text": "", "finished": True}
        spans = ((0, 1, version[1]), (1, 2, self.versions.published.step))
        return SampleBatch.of(
            Sample(step=step, prompt=prompt.index, sample=0, version=tuple(version), spans=spans, **fixed)
            for prompt in prompts
        )


@pytest.fixture
def versions() -> Versions:
    return Versions()


@pytest.fixture
def engine(versions: Versions) -> Beside:
    return Beside(versions)


@pytest.fixture
def explorer(versions: Versions, engine: Beside) -> Explorer:
    fixed: dict[str, Any] = {"engine": {}, "task": {}, "seed": 0, "deterministic": False, "sync": {}, "verify": "full"}
    spec = ExplorerSpec(member=RoundMember.new("explorer-0"), sync_timeout_s=1.0, log_dir=None, **fixed)
    made = Explorer(spec, versions)  # type: ignore[arg-type]
    made._base, made._engine, made._task = None, engine, TASK
    made._loader = versions  # type: ignore[assignment]
    return made


def meanwhile(explorer: Explorer) -> tuple[threading.Thread, list[Any]]:
    """Have it make samples in another thread; what came of it."""
    outcome: list[Any] = []

    def produce() -> None:
        try:
            outcome.append(explorer.produce(WORK, 1))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    return thread, outcome


def test_a_version_that_is_published_while_samples_are_made_is_taken_at_once(
    explorer: Explorer, versions: Versions, engine: Beside
) -> None:
    loaded = threading.Event()
    versions.loads = [lambda: None, loaded.set]
    thread, outcome = meanwhile(explorer)
    assert engine.generating.wait(LIMIT)
    versions.publish(3)
    assert loaded.wait(LIMIT)
    engine.go_on.set()
    thread.join(LIMIT)
    [produced] = outcome
    assert produced.load.version == Version(0, 0)
    [(after, report)] = produced.beside
    assert after >= 0
    assert report.version == Version(0, 3)
    assert [sample.spans for sample in produced.batch] == [((0, 1, 0), (1, 2, 3))] * 2 + [((0, 1, 3), (1, 2, 3))] * 2
    assert produced.batch.version_steps.tolist() == [0, 0, 3, 3]


def test_a_load_that_is_under_way_ends_before_anything_is_begun_and_before_the_samples_are_given(
    explorer: Explorer, versions: Versions, engine: Beside
) -> None:
    loading, load_on = threading.Event(), threading.Event()

    def slow() -> None:
        loading.set()
        assert load_on.wait(LIMIT)

    versions.loads = [lambda: None, slow]
    thread, outcome = meanwhile(explorer)
    assert engine.generating.wait(LIMIT)
    versions.publish(1)
    assert loading.wait(LIMIT)
    engine.go_on.set()
    thread.join(0.2)  # it has nothing to do but to wait
    assert (engine.begun, outcome) == ([1], [])
    load_on.set()
    thread.join(LIMIT)
    assert engine.begun == [1, 2]
    assert outcome[0].batch.version_steps.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", [RunError, ProcessLoss])
def test_a_version_that_cannot_be_taken_ends_what_is_made_and_the_next_one_goes_on(
    explorer: Explorer, versions: Versions, engine: Beside, kind: type[RunError]
) -> None:
    def fails() -> None:
        versions.held = None
        raise kind("the last bucket cannot be read now")

    loaded = threading.Event()
    versions.loads = [lambda: None, loaded.set, fails]
    thread, outcome = meanwhile(explorer)
    assert engine.generating.wait(LIMIT)
    versions.publish(1)
    assert loaded.wait(LIMIT)
    versions.publish(2)
    thread.join(LIMIT)
    [error] = outcome
    assert isinstance(error, LoadError)
    error = pickle.loads(pickle.dumps(error))
    assert error.lost is (kind is ProcessLoss)
    assert str(error) == "explorer-0 could not load the newest version: the last bucket cannot be read now"
    assert error.load.version == Version(0, 0)
    assert [load.version for _, load in error.beside] == [Version(0, 1)]
    assert versions.held is None
    assert engine.begun == [1]
    produced = explorer.produce(WORK, 1)
    assert produced.load is not None
    assert produced.load.version == Version(0, 2)
    assert {sample.version for sample in produced.batch} == {(0, 2)}


def test_a_load_that_fails_before_anything_is_lost_costs_no_sample_and_is_told(
    explorer: Explorer, versions: Versions, engine: Beside
) -> None:
    failing = threading.Event()

    def fails() -> None:
        failing.set()
        raise RunError("there is no such lease")

    versions.loads = [lambda: None, fails]
    thread, outcome = meanwhile(explorer)
    assert engine.generating.wait(LIMIT)
    versions.publish(1)
    assert failing.wait(LIMIT)
    engine.go_on.set()
    thread.join(LIMIT)
    [produced] = outcome
    assert produced.failed == "explorer-0 could not load the newest version: there is no such lease"
    assert engine.begun == [1, 2]
    assert explorer.produce(WORK, 1).load.version == Version(0, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["paused", "end"])
def test_whoever_waits_for_a_load_that_fails_sees_that_it_has(place: str) -> None:
    """However threads take their turns: what is noted within the lock cannot be overtaken."""
    for _ in range(200):
        loading, wait = threading.Event(), threading.Event()

        def load() -> LoadReport:
            loading.set()  # noqa: B023
            assert wait.wait(LIMIT)  # noqa: B023
            raise RunError("no")

        follower = Follower(lambda limit: Version(0, 1), load, lambda: False, lambda: None)

        def body() -> None:
            with follower:  # noqa: B023
                assert loading.wait(LIMIT)  # noqa: B023
                threading.Timer(0.0005, wait.set).start()  # noqa: B023
                if place == "paused":
                    with follower.paused():  # noqa: B023
                        pytest.fail("nothing may begin now")

        with pytest.raises(LoadError, match=r"^no$"):
            body()


def test_where_no_version_will_come_any_more_samples_are_made(
    explorer: Explorer, versions: Versions, engine: Beside
) -> None:
    versions.none_will_come = True
    engine.go_on.set()
    assert explorer.produce(WORK, 1).beside == ()


def test_nobody_follows_when_the_samples_are_there(versions: Versions) -> None:
    before = set(threading.enumerate())
    loads: list[None] = []
    asked, answer = threading.Event(), threading.Event()

    def newer(timeout_s: float) -> Version:
        asked.set()
        assert answer.wait(LIMIT)
        return Version(0, 1)

    with Follower(newer, lambda: loads.append(None), lambda: True, lambda: None):  # type: ignore[func-returns-value, arg-type, return-value]
        assert asked.wait(LIMIT)
    [follower] = set(threading.enumerate()) - before
    answer.set()
    follower.join(LIMIT)
    assert not follower.is_alive()
    assert loads == []


def test_who_can_no_longer_ask_for_versions_says_so(versions: Versions) -> None:
    given_up = threading.Event()

    def newer(timeout_s: float) -> Version:
        raise ProcessLoss("the synchronizer is gone")

    with (
        pytest.raises(LoadError, match=r"^the synchronizer is gone$") as caught,
        Follower(newer, versions.load, lambda: False, given_up.set),  # type: ignore[arg-type]
    ):
        assert given_up.wait(LIMIT)
    assert caught.value.lost
