"""Checkpoints as the loop asks for them, against the real monitor, with ranks that write a word each."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests import local_ray
from tests.trainer.ranks import Asked
from trinity_sync.actors.calls import Call
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import read_manifest, read_tracker
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.threads import BackgroundWork, in_background
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.versions import Version
from trinity_sync.tracking.events import Event, event_fields, event_name
from trinity_sync.trainer import full_saves as module
from trinity_sync.trainer.full_saves import FullSaves, SaveSettings, WeightSaves, driver_state
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import write_shard_file
from trinity_sync.weights.shards import whole

LIMIT = 60.0
RANKS = ["rank-00000", "rank-00001"]
META = {"backend": "fsdp2", "world_size": 2, "config_digest": "c0"}

cluster = local_ray.cluster
_namespaces = itertools.count()
_steps = itertools.count(1)


class Log:
    """What was reported."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.faults: list[tuple[str, str]] = []
        self.begun: list[int] = []

    def event(self, event: Event) -> None:
        self.events.append({"event": event_name(event), **event_fields(event)})

    def fault(self, where: str, error: BaseException | str) -> None:
        self.faults.append((where, str(error)))

    def saving(self, step: int) -> None:
        self.begun.append(step)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


class PretendGroup:
    """A trainer group of which nothing is real but its coordinators. Parts in `broken` cannot be written, those in
    `unready` not even begun.
    """

    def __init__(self, monitor: Any) -> None:
        self._coordinators = {
            part: CheckpointCoordinator(monitor, job_id=part, timeout_s=LIMIT, attempt=0) for part in RANKS
        }
        self.broken: set[str] = set()
        self.unready: set[str] = set()
        self.silent: set[str] = set()
        self.may_write = threading.Event()
        self.may_write.set()

    def all(self, ask: Callable[[RankClient], Any], timeout_s: float) -> list[Any]:
        method, args = ask(Asked())
        return getattr(self, method)(*args)

    def begin(self, ask: Callable[[RankClient], Any]) -> Callable[[float], list[Any]]:
        return in_background(lambda: self.all(ask, LIMIT), "asked").result

    def save(self, step: int, folder: str) -> list[float]:
        for part in self.unready:
            self._coordinators[part].fail(step, part, OSError(28, "No room for a copy"))
        for part in sorted(self._coordinators.keys() - self.silent - self.unready):
            self._coordinators[part].settle()  # what failed before is no reason not to save, as in `Saver`
            self._coordinators[part].save_async("full", lambda part=part: self._write(folder, part), step, part=part)
        return [0.25, 0.5]

    def save_blocked(self, step: int) -> list[float]:
        return [0.25, 0.75]

    def _write(self, folder: str, part: str) -> list[Path]:
        assert self.may_write.wait(LIMIT)
        if part in self.broken:
            raise OSError("No space left on device")
        path = Path(folder) / f"{part}.pt"
        path.write_text(part)
        return [path]

    def finish_saves(self) -> list[None]:
        failed = []
        for coordinator in self._coordinators.values():  # each of them, as all ranks are asked side by side
            try:
                coordinator.wait_all()
            except (OSError, RunError) as error:
                failed.append(error)
        for error in failed:
            raise error
        return [None] * len(self._coordinators)


class Run:
    """A run's saves: of whole checkpoints and of weights."""

    def __init__(self, monitor: Any, root: Path, timeout_s: float = LIMIT) -> None:
        settings = SaveSettings(attempt=0, seed=7, meta=META, ranks=RANKS, save_timeout_s=timeout_s)
        self._monitor = monitor
        self.root = root
        self.log = Log()
        self.group = PretendGroup(monitor)
        client = MonitorClient(monitor)
        self.committed: list[int] = []
        self.saves = FullSaves(client, self.group, settings, self.log, committed=self.committed.append)  # type: ignore[arg-type]
        self.weights = WeightSaves(client, settings, self.log, durable=False)

    def wait_no_longer_than(self, timeout_s: float) -> None:
        """From now on."""
        settings = replace(self.saves._settings, save_timeout_s=timeout_s)
        self.saves._settings = self.weights._settings = settings

    def staged(self, step: int) -> list[Path]:
        ray.get(self._monitor.wait_idle.remote(LIMIT), timeout=2 * LIMIT)
        return list((self.root / ".staging").glob(f"{step}-*"))


@pytest.fixture(scope="module")
def start(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, Path]]]:
    """A monitor and its folder: ``start(policies=...)``."""
    made = []

    def make(**config: Any) -> tuple[Any, Path]:
        root = tmp_path_factory.mktemp("checkpoints")
        namespace = f"saves-{next(_namespaces)}"
        made.append(
            CheckpointMonitor.get_actor(namespace, None, str(root), config=MonitorConfig(timeout_s=LIMIT, **config))
        )
        return made[-1], root

    yield make
    for monitor in made:
        ray.kill(monitor)


@pytest.fixture(scope="module")
def shared(start: Callable[..., tuple[Any, Path]]) -> tuple[Any, Path]:
    return start()


@pytest.fixture
def run(shared: tuple[Any, Path]) -> Run:
    return Run(*shared)


@pytest.fixture
def step() -> int:
    """One that no test has used."""
    return next(_steps)


# ---- states in memory


@pytest.fixture
def states(run: Run, start: Callable[..., tuple[Any, Path]]) -> Run:
    """The saves of `run`'s states, as those of a run of their own."""
    states = Run(*start(policies={"keep_last": {"n": 1}}))
    settings, client = states.saves._settings, MonitorClient(states._monitor)
    states.saves = FullSaves(client, states.group, settings, run.log, records=False)  # type: ignore[arg-type]
    run.saves._memory = states.saves
    return states


def test_a_state_in_memory_is_committed_and_is_not_on_record(run: Run, states: Run, step: int) -> None:
    assert run.saves.keeps()
    run.saves.begin(step, "d1", {}, state={"data": {"next": [7, 0]}}, in_memory=True)
    assert not run.saves.keeps()
    run.saves.poll()
    states.saves.finish()
    assert catalog.verify(folder := states.root / f"global_step_{step}").ok
    assert driver_state(folder, "data") == {"next": [7, 0]}
    assert run.saves.keeps()
    assert (run.log.begun, run.log.events, run.committed, run.log.faults) == ([], [], [], [])
    assert not (run.root / folder.name).exists()


def test_no_state_is_kept_while_a_checkpoint_is_saved(run: Run, states: Run, step: int) -> None:
    run.group.may_write.clear()
    run.saves.begin(step, "d1", {})
    assert not run.saves.keeps()
    run.group.may_write.set()
    run.saves.finish()
    assert run.saves.keeps()


def test_a_state_that_fails_is_a_fault_and_no_failed_checkpoint(run: Run, states: Run, step: int) -> None:
    states.group.broken = {RANKS[0]}
    run.saves.begin(step, "d1", {}, in_memory=True)
    run.saves.poll()
    with pytest.raises(RunError):
        states.saves.finish()
    run.saves.finish()
    assert [where for where, _ in run.log.faults] == [f"state in memory of step {step}"]


def test_a_run_that_ends_early_waits_for_its_state_in_memory(run: Run, states: Run, step: int) -> None:
    states.group.may_write.clear()
    run.saves.begin(step, "d1", {}, in_memory=True)
    threading.Timer(0.3, states.group.may_write.set).start()
    run.saves.settle(LIMIT)
    assert catalog.verify(states.root / f"global_step_{step}").ok


# ---- full checkpoints


def test_a_save_is_committed_behind_the_trainers_back_and_recorded(run: Run, step: int) -> None:
    run.group.may_write.clear()
    before = time.time()
    run.saves.begin(step, "d1", {"reward/mean": 0.5})
    run.saves.poll()
    assert (run.log.begun, run.log.events, run.committed) == ([step], [], [])
    run.group.may_write.set()
    run.saves.finish()
    assert run.committed == [step]

    folder = run.root / f"global_step_{step}"
    (event,) = run.log.events
    assert before <= event.pop("began") <= time.time()
    assert 0 <= event.pop("written_s") <= event.pop("total_s")
    assert event == {
        **{"event": "commit", "step": step, "kind": FULL, "digest": "d1", "blocked_s": 0.75},
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"),
    }
    assert run.log.faults == []
    assert catalog.verify(folder).ok
    assert read_tracker(run.root, FULL).step == step


def test_no_step_is_committed_before_it_is_on_record(run: Run, step: int) -> None:
    run.saves.begin(step, "d1", {})
    run.group.finish_saves()
    with pytest.raises(RunError, match=r"missing: part 'driver'\)"):
        ray.get(run._monitor.wait_committed.remote(step, 0, 0.2, kind="full"), timeout=LIMIT)
    run.saves.poll()  # the loop has written the step's metrics
    run.saves.finish()
    assert catalog.verify(run.root / f"global_step_{step}").ok


def test_a_commit_waits_for_what_comes_late_and_so_do_those_after_it(run: Run, step: int) -> None:
    late: dict[int, dict[str, float] | None] = {step: None, step + 1: {}}
    next(_steps)
    for one in late:
        run.saves.begin(one, "d1", {"reward/mean": 0.5}, late=late.get)
        run.group.finish_saves()
        run.saves.poll()
    assert run.log.events == []
    late[step] = {"val/reward/mean": 0.25}
    run.saves.poll()
    run.saves.finish()
    assert [event["step"] for event in run.log.named("commit")] == [step, step + 1]
    metrics = [read_manifest(run.root / f"global_step_{one}").metrics for one in late]
    assert metrics == [{"reward/mean": 0.5, "val/reward/mean": 0.25}, {"reward/mean": 0.5}]


def test_what_never_comes_is_waited_for_half_of_the_limit_only(run: Run, step: int) -> None:
    run.wait_no_longer_than(LIMIT / 300)
    run.saves.begin(step, "d1", {"reward/mean": 0.5}, late=lambda step: None)
    run.wait_no_longer_than(LIMIT)
    run.saves._pending = {}  # its own wait had the short limit
    run.group.finish_saves()
    limit = time.monotonic() + LIMIT
    while not (run.root / f"global_step_{step}").exists() and time.monotonic() < limit:
        run.saves.poll()
    assert read_manifest(run.root / f"global_step_{step}").metrics == {"reward/mean": 0.5}


def test_a_step_that_takes_long_costs_no_checkpoint_that_waits_for_what_comes_late(run: Run, step: int) -> None:
    run.wait_no_longer_than(2.0)
    run.saves.begin(step, "d1", {}, late=lambda step: None)
    run.group.finish_saves()
    run.saves.poll()
    deadline = time.monotonic() + 30.0
    while not (run.root / f"global_step_{step}").exists():  # nobody polls: the next step is under way
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.saves.finish()
    assert [event["step"] for event in run.log.named("commit")] == [step]
    assert run.log.faults == []


def test_what_comes_late_for_a_save_that_has_failed_does_not_end_the_run(run: Run, step: int) -> None:
    late: dict[int, Any] = {}
    run.group.broken = {RANKS[1]}
    run.saves.begin(step, "d1", {}, late=late.get)
    deadline = time.monotonic() + LIMIT
    while not run.log.faults:
        assert time.monotonic() < deadline
        run.saves.poll()
    late[step] = {"val/reward/mean": 1.0}
    run.saves.poll()
    assert [where for where, _ in run.log.faults] == [f"save of step {step}"]


def test_the_end_of_a_run_waits_for_nothing_that_comes_late(run: Run, step: int) -> None:
    run.saves.begin(step, "d1", {}, late=lambda step: None)
    run.saves.finish()
    assert [event["step"] for event in run.log.named("commit")] == [step]


def test_a_checkpoint_says_what_a_resume_needs(run: Run, step: int) -> None:
    run.saves.begin(step, "d2", {"reward/mean": 0.5})
    run.saves.finish()
    folder = run.root / f"global_step_{step}"
    manifest = read_manifest(folder)
    assert (manifest.backend, manifest.world_size, manifest.config_digest) == ("fsdp2", 2, "c0")
    assert (manifest.digest, manifest.metrics) == ("d2", {"reward/mean": 0.5})
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state == {"step": step, "attempt": 0, "seed": 7, "next_data_step": step + 1}
    assert {entry.path for entry in manifest.files} == {"rank-00000.pt", "rank-00001.pt", "trainer_state.json"}


def test_a_part_that_cannot_be_written_is_a_fault_at_once_and_leaves_nothing(run: Run, step: int) -> None:
    run.group.broken = {"rank-00001"}
    run.saves.begin(step, None, {})
    run.saves.settle(LIMIT)
    ((where, fault),) = run.log.faults
    assert where == f"save of step {step}"
    assert "No space left on device" in fault

    assert len(run.log.faults) == 1
    assert run.log.named("commit") == []
    assert not (run.root / f"global_step_{step}").exists()
    assert run.staged(step) == []


def test_a_part_that_cannot_be_begun_is_a_fault_that_says_why_and_no_end_of_the_run(run: Run, step: int) -> None:
    run.group.unready = set(RANKS)
    run.saves.begin(step, None, {})
    run.saves.settle(LIMIT)
    ((where, fault),) = run.log.faults
    assert where == f"save of step {step}"
    assert "No room for a copy" in fault
    run.group.unready = set()
    good = next(_steps)
    run.saves.begin(good, "d3", {})
    run.saves.finish()
    assert [event["step"] for event in run.log.named("commit")] == [good]
    assert len(run.log.faults) == 1


def test_a_part_that_cannot_be_written_fails_the_end_of_the_run(run: Run, step: int) -> None:
    run.group.broken = {"rank-00000"}
    run.saves.begin(step, None, {})
    with pytest.raises(RunError, match="No space left on device"):
        run.saves.finish()
    assert [where for where, _ in run.log.faults] == [f"save of step {step}"]


def test_after_a_failure_saves_go_on_and_the_end_is_good_if_the_newest_was_saved(run: Run, step: int) -> None:
    run.group.broken = {"rank-00001"}
    run.saves.begin(step, None, {})
    run.saves.settle(LIMIT)
    run.group.broken = set()
    good = next(_steps)
    run.saves.begin(good, "d3", {})
    run.saves.finish()
    assert [event["step"] for event in run.log.named("commit")] == [good]
    assert [where for where, _ in run.log.faults] == [f"save of step {step}"]


def test_an_older_failure_that_comes_later_does_not_hide_that_of_the_newest(run: Run, step: int) -> None:
    good, newest = next(_steps), next(_steps)
    run.saves._succeeded = good
    run.saves._fail(newest, RunError("disk full"))
    run.saves._fail(step, RunError("late"))
    run.saves._fail(newest, RunError("disk full, told again"))
    assert [where for where, _ in run.log.faults] == [f"save of step {newest}", f"save of step {step}"]
    with pytest.raises(RunError, match="disk full"):
        run.saves.finish()


def test_a_save_that_cannot_even_begin_is_a_fault_and_not_the_end(run: Run, step: int) -> None:
    run.saves.begin(step, None, {})
    run.saves.settle(LIMIT)
    run.saves.begin(step, None, {})  # all of it is committed already
    ((where, _),) = run.log.faults
    assert where == f"save of step {step}"
    run.saves.begin(next(_steps), None, {})
    run.saves.finish()


def test_a_part_that_never_comes_is_named(shared: tuple[Any, Path], step: int) -> None:
    run = Run(*shared, timeout_s=1.0)
    run.group.silent = {"rank-00001"}
    run.saves.begin(step, None, {})
    with pytest.raises(RunError, match=rf"step {step} .*missing: .*'rank-00001'.* within 1 s"):
        run.saves.finish()
    ray.get(shared[0].fail_step.remote(step, "the test is over"), timeout=LIMIT)  # nobody else has to wait for it


def test_a_monitor_that_hangs_ends_the_run_with_what_it_was_to_do_and_how_long_was_waited(
    start: Callable[..., tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monitor, root = start()
    version, last, next_one, early = Version(0, 1), Run(monitor, root), Run(monitor, root), Run(monitor, root)
    pid = ray.get(monitor.describe.remote(), timeout=LIMIT)["pid"]
    folder = next_one.weights.begin(version, ["node-a"])
    files = write_weights(folder, version)
    last.group.may_write.clear()
    last.saves.begin(2, "d", {})
    last.saves.poll()
    next_one.saves.begin(3, "d", {})
    early.saves.begin(5, "d", {})
    for run in (last, next_one):
        run.wait_no_longer_than(1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        for call, what in (
            (lambda: next_one.weights.begin(Version(0, 4), ["node-a"]), "begin step 4"),
            (lambda: last.saves.begin(6, "d", {}), "begin step 6"),  # else each further save would wait as long
            (lambda: next_one.weights.part_written(version, "node-a", files), "take part 'weights-node-a' of step 1"),
            (next_one.saves.poll, "take part 'driver' of step 3"),
        ):
            with pytest.raises(WaitTimeout, match=f"^the checkpoint monitor did not {what} within 1 s$"):
                call()
        with pytest.raises(RunError, match=r": the checkpoint monitor did not commit step 2 within 1\.5 s$"):
            last.saves.finish()
        with pytest.raises(WaitTimeout, match=r"did not take part 'driver' of step 5 within 0\.5 s$"):
            early.saves.settle(0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
        last.group.may_write.set()


class Answer:
    """An answer of the monitor's, or none."""

    who = "the checkpoint monitor"

    def __init__(self, what: str = "", *, comes: bool = True) -> None:
        self.what, self._comes = what, comes

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return self._comes

    def result(self, timeout_s: float) -> str:
        if not self._comes:
            raise WaitTimeout(self.who, self.what, timeout_s)
        return self.what


class StoppedMonitor:
    """One that stands still from `at` on."""

    def __init__(self, folder: Path, at: str) -> None:
        self._folder, self._at = folder, at

    def begin(self, *_: object, **__: object) -> Answer:
        return Answer(str(self._folder)) if self._at != "begin" else Answer("begin step 1", comes=False)

    def wait_committed(self, *_: object, **__: object) -> Answer:
        return Answer("commit step 1", comes=False)

    def notify_finished(self, *_: object, **__: object) -> Answer:
        return Answer()


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("at", ["begin", "commit"])
def test_a_monitor_that_stands_still_before_or_within_a_save_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, in_memory: bool
) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now[0]))
    settings, log = SaveSettings(attempt=0, seed=7, meta=META, ranks=[], save_timeout_s=LIMIT), Log()
    group: Any = SimpleNamespace(all=lambda ask, limit: [0.0])
    stopped: Any = StoppedMonitor(tmp_path, at)
    memory = FullSaves(stopped, group, settings, log, records=False) if in_memory else None  # type: ignore[arg-type]
    saves = FullSaves(stopped, group, settings, log, memory=memory)  # type: ignore[arg-type]
    if at == "begin":
        with pytest.raises(WaitTimeout, match=f"^the checkpoint monitor did not begin step 1 within {LIMIT:g} s$"):
            saves.begin(1, "d", {}, in_memory=in_memory)
        return
    saves.begin(1, "d", {}, in_memory=in_memory)
    saves.poll()
    now[0] += 2 * LIMIT + 1
    with pytest.raises(WaitTimeout, match=f"^the checkpoint monitor did not commit step 1 within {2 * LIMIT:g} s$"):
        saves.poll()
    assert log.faults == []


@pytest.mark.parametrize("end", ["finish", "settle"])
def test_at_the_end_saves_are_hurried_before_they_are_waited_for(
    run: Run, step: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.group.may_write.clear()
    run.saves.begin(step, "d4", {})
    monkeypatch.setattr(BackgroundWork, "hurry", lambda _: run.group.may_write.set())
    if end == "finish":
        run.saves.finish()
    else:
        run.saves.settle(LIMIT)
    assert [event["step"] for event in run.log.named("commit")] == [step]


def test_a_run_that_ends_early_records_the_saves_that_still_made_it(run: Run, step: int) -> None:
    run.saves.begin(step, "d4", {})
    run.saves.settle(LIMIT)
    assert [event["step"] for event in run.log.named("commit")] == [step]
    run.saves.settle(LIMIT)
    assert len(run.log.events) == 1


def test_a_save_whose_wait_at_the_end_is_interrupted_still_has_its_chance(
    run: Run, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Call.result

    def interrupted(call: Call[Any], timeout_s: float) -> Any:
        if call.what == f"commit step {step}":
            raise KeyboardInterrupt
        return result(call, timeout_s)

    run.saves.begin(step, "d4", {})
    with monkeypatch.context() as patch:
        patch.setattr(Call, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.saves.finish()
    run.saves.settle(LIMIT)
    assert [event["step"] for event in run.log.named("commit")] == [step]


def test_where_the_newest_save_cannot_be_told_of_the_ones_before_are_recorded(
    run: Run, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Call.result

    def late(call: Call[Any], timeout_s: float) -> Any:
        if "part 'driver'" in call.what:
            raise WaitTimeout(call.who, call.what, timeout_s)
        return result(call, timeout_s)

    run.saves.begin(step, "d4", {})
    run.saves.begin(next(_steps), "d5", {})
    monkeypatch.setattr(Call, "result", late)
    with pytest.raises(WaitTimeout, match="part 'driver'"):
        run.saves.settle(2.0)
    assert step in [event["step"] for event in run.log.named("commit")]


def test_what_retention_removes_is_recorded_with_the_reason(start: Callable[..., tuple[Any, Path]]) -> None:
    run = Run(*start(policies={"keep_last": {"n": 1}}))
    for step in (1, 2):
        run.saves.begin(step, None, {})
        run.saves.finish()
    assert [(event["event"], event["step"]) for event in run.log.events] == [
        ("commit", 1),
        ("commit", 2),
        ("prune", 1),
    ]
    pruned = run.log.events[-1]
    assert pruned["reason"]
    assert pruned["freed_bytes"] > 0


def test_a_users_monitor_may_say_more_of_a_removed_checkpoint() -> None:
    pruned: Any = {"step": 1, "reason": "keep_last", "freed_bytes": 5, "place": "scratch"}
    log = Log()
    result: Any = {"beside": True, "pruned": [pruned]}
    module.record_commit(log, result, 0.0, None)
    assert [(event["step"], event["freed_bytes"]) for event in log.named("prune")] == [(1, 5)]


# ---- weights only


def write_weights(folder: Path, version: Version) -> list[tuple[str, int, str]]:
    layout = PartLayout.build("rank-00000", [whole("w", "BF16", (2, 2))], 64)
    (folder / "actor").mkdir(exist_ok=True)
    path = "actor/weights_rank-00000.safetensors"
    nbytes, digest = write_shard_file(folder / path, layout, bytes([version.step] * 8), {}, fsync=False)
    return [(path, nbytes, digest)]


def test_weights_of_a_node_are_committed_with_their_digest(run: Run, step: int) -> None:
    version = Version(0, step)
    folder = run.weights.begin(version, ["node-a"])
    run.weights.part_written(version, "node-a", write_weights(folder, version))
    place = run.weights.commit(version, "d5")
    assert place == run.root / f"global_step_{step}"
    (event,) = run.log.events
    assert (event["event"], event["step"], event["kind"], event["digest"]) == ("commit", step, STATE_DICT, "d5")
    assert catalog.verify(place).ok
    assert read_tracker(run.root, STATE_DICT).step == step


def test_weights_that_were_given_up_leave_nothing_and_the_next_version_is_committed(run: Run, step: int) -> None:
    version, next_version = Version(0, step), Version(0, next(_steps))
    folder = run.weights.begin(version, ["node-a"])
    write_weights(folder, version)
    run.weights.fail(version, "the agent of node-a died")
    with pytest.raises(RunError, match="the agent of node-a died"):
        run.weights.commit(version, "d6")
    folder = run.weights.begin(next_version, ["node-a"])
    run.weights.part_written(next_version, "node-a", write_weights(folder, next_version))
    run.weights.commit(next_version, "d7")
    assert not (run.root / f"global_step_{version.step}").exists()
    assert [event["step"] for event in run.log.named("commit")] == [next_version.step]
    assert run.staged(version.step) == []


def test_a_full_checkpoint_of_a_step_takes_the_place_of_its_weights(run: Run, step: int) -> None:
    version = Version(0, step)
    folder = run.weights.begin(version, ["node-a"])
    run.weights.part_written(version, "node-a", write_weights(folder, version))
    run.weights.commit(version, "d8")
    run.saves.begin(step, "d8", {})
    run.saves.finish()
    assert [event["kind"] for event in run.log.named("commit")] == [STATE_DICT, FULL]
    manifest = read_manifest(run.root / f"global_step_{step}")
    assert manifest.kind == FULL
    assert "actor/weights_rank-00000.safetensors" in {entry.path for entry in manifest.files}
