"""Saves through the coordinator, against the real monitor actor."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from tests import local_ray
from tests.checkpoint.helpers import names
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import file_entry, read_tracker, staging_dir, step_dir
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.threads import piece
from trinity_sync.protocol.parts import FULL, STATE_DICT

LIMIT = 30.0


def call(monitor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    return ray.get(getattr(monitor, method).remote(*args, **kwargs), timeout=LIMIT)


@pytest.fixture
def coordinator(monitor: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator(monitor, timeout_s=LIMIT)


def writer(folder: Path, name: str) -> Callable[[], list[Path]]:
    def write() -> list[Path]:
        (folder / name).write_text(name)
        return [folder / name]

    return write


def boom() -> None:
    raise ValueError("disk full")


def monitor_step(coordinator: CheckpointCoordinator, step: int, *args: Any) -> None:
    asyncio.run(coordinator.register_and_monitor(step, *args))


# ---- saving


def test_weights_that_are_committed_are_not_written_again_and_nobody_waits_for_them(
    monitor: Any, coordinator: CheckpointCoordinator, root: Path
) -> None:
    folder = coordinator.staged(step_dir(root, 20), 20)
    written: list[Path] = []

    def write() -> list[Path]:
        folder.mkdir(parents=True)
        written.append(folder / "model.pt")
        written[-1].write_text("model.pt")
        return written

    for _ in range(2):
        coordinator.save_async("model", write, 20, True, part="model-0")
        monitor_step(coordinator, 20, True, 1)
        coordinator.wait_all()
        call(monitor, "wait_committed", 20, None, LIMIT)
    call(monitor, "wait_idle", LIMIT)
    assert len(written) == 1
    assert not folder.exists()
    assert [coordinator.is_saved(part, 20) for part in ("model-0", "model-1")] == [True, False]
    assert catalog.verify(step_dir(root, 20)).ok


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no class that yields")
def test_the_pieces_of_a_save_yield_until_somebody_waits_for_it(coordinator: CheckpointCoordinator) -> None:
    policies: list[int] = []
    begun, first, hurried = threading.Event(), threading.Event(), threading.Event()

    def write() -> list[Path]:
        assert begun.wait(LIMIT)
        for go_on in (first, hurried):
            policies.append(piece(lambda: os.sched_getscheduler(0)))
            go_on.set()
            while go_on is first and not coordinator._saves["model"].work._hurried:
                assert not hurried.wait(0.01)
        return []

    coordinator.save_async("model", write, 21, True, part="model-0")
    begun.set()
    assert first.wait(LIMIT)
    coordinator.wait_all()
    assert policies == [os.SCHED_IDLE, os.sched_getscheduler(0)]


def test_saves_that_are_waited_for_together_are_hurried_together(
    coordinator: CheckpointCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = threading.Event()

    def write() -> list[Path]:
        assert hurried.wait(LIMIT / 2)
        return []

    for name in ("model", "optimizer"):
        coordinator.save_async(name, write, 22, True, part=name)
    monkeypatch.setattr(coordinator._saves["optimizer"].work, "hurry", hurried.set)
    coordinator.wait_all()


def test_settling_hides_what_saves_failed_of_and_no_interrupt(
    monitor: Any, coordinator: CheckpointCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> None:
        raise SystemExit("of the save's thread")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    call(monitor, "begin", 20, 0, FULL, ["r0"])
    coordinator.save_async("full", leave, 20, part="r0")
    coordinator.settle()
    coordinator.wait_all()
    coordinator.save_async("full", boom, 21, part="r0")
    coordinator._saves["full"].ended.exception(LIMIT)
    monkeypatch.setattr(coordinator, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coordinator.settle()


def test_a_background_save_is_committed_with_digests(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    folder = Path(call(monitor, "begin", 20, 0, FULL, ["r0"]))
    coordinator.save_async("full", writer(folder, "model.pt"), 20, part="r0")
    coordinator.wait_all()
    result = call(monitor, "wait_committed", 20, 0, LIMIT)
    report = catalog.verify(Path(result["path"]))
    assert (report.ok, report.files, report.unlisted) == (True, 1, ())


@pytest.mark.parametrize("given", ["absolute", "relative", "entry", "nothing"])
def test_what_was_written_can_be_named_in_several_ways(
    monitor: Any, coordinator: CheckpointCoordinator, given: str
) -> None:
    folder = Path(call(monitor, "begin", 20, 0, FULL, ["r0"]))

    def save() -> list[Any] | None:
        (folder / "model.pt").write_text("w")
        entry = file_entry(folder, "model.pt")
        return {"absolute": [folder / "model.pt"], "relative": ["model.pt"], "entry": [entry], "nothing": None}[given]

    coordinator.save_sync(save, 20, part="r0")
    result = call(monitor, "wait_committed", 20, 0, LIMIT)
    report = catalog.verify(Path(result["path"]))
    assert (report.ok, report.files) == (True, 1)


def test_a_file_outside_the_step_cannot_be_part_of_it(
    monitor: Any, coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    call(monitor, "begin", 20, 0, FULL, ["r0"])
    with pytest.raises(RunError, match="outside the step's staging folder"):
        coordinator.save_sync(writer(tmp_path, "elsewhere.pt"), 20, part="r0")
    assert call(monitor, "status", 20)["state"] == "failed"


def test_what_is_to_be_found_in_a_step_folder_is_staged_first(
    monitor: Any, coordinator: CheckpointCoordinator, root: Path
) -> None:
    staged = coordinator.staged(step_dir(root, 20) / "actor", 20)
    assert staged == staging_dir(root, 20, 0) / "actor"
    for elsewhere in (step_dir(root, 21) / "actor", root, root.parent):
        with pytest.raises(ConfigError, match=r"cannot be saved as step 20: it has to be .*global_step_20"):
            coordinator.staged(elsewhere, 20)


def test_the_caller_goes_on_while_a_save_runs(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    go = threading.Event()
    call(monitor, "begin", 20, 0, FULL, ["r0"])
    coordinator.save_async("full", lambda: go.wait(LIMIT) and None, 20, part="r0")
    assert call(monitor, "status", 20)["state"] == "open"
    go.set()
    coordinator.wait_all()
    assert call(monitor, "wait_committed", 20, 0, LIMIT)["kind"] == FULL


def test_saves_of_one_name_never_overlap(coordinator: CheckpointCoordinator) -> None:
    running, overlaps = threading.Semaphore(1), []

    def save() -> None:
        free = running.acquire(blocking=False)
        overlaps.append(not free)
        if free:
            running.release()

    for step in range(5):
        coordinator.save_async("model", save, step)
    coordinator.wait_all()
    assert overlaps == [False] * 5


def test_saves_of_different_names_run_side_by_side(coordinator: CheckpointCoordinator) -> None:
    meeting = threading.Barrier(2, timeout=LIMIT)
    for name in ("model", "optim"):
        coordinator.save_async(name, lambda: meeting.wait() and None, 1)
    coordinator.wait_all()


def test_counted_saves_move_the_trackers(monitor: Any, coordinator: CheckpointCoordinator, root: Path) -> None:
    call(monitor, "register_thread_count", 7, state_dict_thread_count=1, checkpoint_thread_count=1)
    coordinator.save_async("optim", lambda: None, 7)
    coordinator.save_async("model", lambda: None, 7, True)
    monitor_step(coordinator, 7)
    coordinator.wait_all()
    call(monitor, "wait_committed", 7, None, LIMIT)
    assert read_tracker(root, FULL).step == 7
    assert read_tracker(root, STATE_DICT).step == 7


def test_a_step_waits_for_every_part_that_was_begun_however_few_are_registered(
    monitor: Any, coordinator: CheckpointCoordinator, root: Path
) -> None:
    second = CheckpointCoordinator(monitor, job_id="rank-1", timeout_s=LIMIT)
    folder = coordinator.staged(step_dir(root, 20), 20)
    folder.mkdir(parents=True)
    go = threading.Event()
    write = writer(folder, "second.pt")
    second.save_async("model", lambda: write() if go.wait(LIMIT) else None, 20, True, part="model-1")
    while call(monitor, "status", 20)["awaited"] != ["model-1"]:
        pass
    monitor_step(coordinator, 20, True, 1)
    coordinator.save_sync(writer(folder, "first.pt"), 20, True, part="model-0")
    assert call(monitor, "status", 20)["state"] == "open"
    go.set()
    second.wait_all()
    call(monitor, "wait_committed", 20, None, LIMIT)
    assert names(step_dir(root, 20)) == {"first.pt", "second.pt", "manifest.json"}


@pytest.mark.parametrize("collective", [True, False])
def test_a_rank_that_saves_after_the_commit_gets_an_error_and_the_step_fails(
    monitor: Any, coordinator: CheckpointCoordinator, root: Path, collective: bool
) -> None:
    folder = coordinator.staged(step_dir(root, 20), 20)
    folder.mkdir(parents=True)
    monitor_step(coordinator, 20, True, 1)
    coordinator.save_sync(writer(folder, "first.pt"), 20, True, part="model-0")
    call(monitor, "wait_committed", 20, None, LIMIT)
    with pytest.raises(RunError, match="'model-1' came after the commit of step 20"):
        coordinator.save_sync(lambda: (), 20, True, part="model-1", queues=not collective)
    assert "came after the commit" in call(monitor, "status", 20)["error"]


def test_parts_that_are_announced_are_waited_for_and_a_rank_that_gives_up_fails_the_step(
    monitor: Any, coordinator: CheckpointCoordinator, root: Path
) -> None:
    folder = coordinator.staged(step_dir(root, 20), 20)
    folder.mkdir(parents=True)
    coordinator.announce(20, ["model-0", "model-1"], is_state_dict=True)
    monitor_step(coordinator, 20, True, 1)
    coordinator.save_sync(writer(folder, "first.pt"), 20, True, part="model-0")
    assert call(monitor, "status", 20)["awaited"] == ["model-1"]
    coordinator.fail(20, None, RunError("rank 1 is gone"))
    with pytest.raises(RunError, match="rank 1 is gone"):
        call(monitor, "wait_committed", 20, None, LIMIT)


def test_parts_may_be_announced_by_any_iterable(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    coordinator.announce(20, (f"model-{rank}" for rank in range(2)), is_state_dict=True)
    assert call(monitor, "status", 20)["awaited"] == ["model-0", "model-1"]


def test_a_part_that_is_handed_over_needs_a_name(coordinator: CheckpointCoordinator) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        coordinator.save_async("full", lambda: None, 20, hands_over=True)


def test_counts_given_with_the_mark_are_added(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    call(monitor, "register_thread_count", 7, state_dict_thread_count=1)
    monitor_step(coordinator, 7, True, 1, 0)
    coordinator.save_sync(lambda: None, 7, True)
    assert call(monitor, "status", 7)["missing"] == ["1 of 2 counted weights parts"]
    coordinator.save_sync(lambda: None, 7, True)
    assert call(monitor, "wait_committed", 7, None, LIMIT)["kind"] == STATE_DICT


def test_marking_a_step_does_not_wait_for_its_parts(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    monitor_step(coordinator, 7, False, 0, 1)
    assert call(monitor, "status", 7)["state"] == "open"


def test_verls_own_place_is_understood(monitor: Any, coordinator: CheckpointCoordinator, root: Path) -> None:
    folder = step_dir(root, 5) / "actor"
    folder.mkdir(parents=True)
    monitor_step(coordinator, 5, False, 0, 1)
    coordinator.save_sync(writer(folder, "model.pt"), 5)
    call(monitor, "wait_committed", 5, None, LIMIT)
    assert catalog.verify(step_dir(root, 5)).ok


# ---- errors


def test_a_save_that_raises_is_told_by_wait_all_and_fails_the_step(
    monitor: Any, coordinator: CheckpointCoordinator, root: Path
) -> None:
    call(monitor, "begin", 20, 0, FULL, ["r0"])
    coordinator.save_async("full", boom, 20, part="r0")
    with pytest.raises(ValueError, match="disk full"):
        coordinator.wait_all()
    with pytest.raises(RunError, match=r"part 'r0' failed: ValueError: disk full"):
        call(monitor, "wait_committed", 20, 0, LIMIT)
    assert catalog.scan(root) == []
    coordinator.wait_all()


def test_a_save_that_raises_is_told_by_the_next_of_its_name_too(
    monitor: Any, coordinator: CheckpointCoordinator
) -> None:
    coordinator.save_async("full", boom, 20, part="r0")
    call(monitor, "begin", 30, 0, FULL, ["r0"])
    with pytest.raises(ValueError, match="disk full"):
        coordinator.save_async("full", lambda: None, 30, part="r0")
    with pytest.raises(ValueError, match="disk full"):
        coordinator.wait_all()
    assert "was not started" in call(monitor, "status", 30)["error"]


def test_after_an_error_was_told_saving_goes_on(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    coordinator.save_async("full", boom, 20, part="r0")
    with pytest.raises(ValueError, match="disk full"):
        coordinator.wait_all()
    folder = Path(call(monitor, "begin", 30, 0, FULL, ["r0"]))
    coordinator.save_async("full", writer(folder, "model.pt"), 30, part="r0")
    coordinator.wait_all()
    assert call(monitor, "wait_committed", 30, 0, LIMIT)["step"] == 30


def test_all_errors_are_told_at_once(coordinator: CheckpointCoordinator) -> None:
    for name in ("model", "optim"):
        coordinator.save_async(name, boom, 20, part=name)
    with pytest.raises((ValueError, RunError)) as caught:
        coordinator.wait_all()
    assert any("another background save failed" in note for note in caught.value.__notes__)


def test_a_synchronous_save_raises_at_once(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    call(monitor, "begin", 20, 0, FULL, ["r0"])
    with pytest.raises(ValueError, match="disk full"):
        coordinator.save_sync(boom, 20, part="r0")
    assert call(monitor, "status", 20)["state"] == "failed"
    coordinator.wait_all()


def test_one_failed_rank_reaches_the_others_before_they_write(monitor: Any, coordinator: CheckpointCoordinator) -> None:
    call(monitor, "begin", 20, 0, FULL, ["r0", "r1"])
    call(monitor, "notify_failed", 20, "r0", "disk full")
    written: list[int] = []
    coordinator.save_async("full", lambda: written.append(1), 20, part="r1")
    with pytest.raises(RunError, match="disk full"):
        coordinator.wait_all()
    assert written == []


def test_an_earlier_save_that_hangs_is_a_timeout(monitor: Any) -> None:
    coordinator = CheckpointCoordinator(monitor, timeout_s=0.2)
    go = threading.Event()
    coordinator.save_async("full", lambda: go.wait(LIMIT) and None, 20)
    with pytest.raises(WaitTimeout, match=r"save 'full' did not finish writing step 20 within 0\.2 s"):
        coordinator.save_async("full", lambda: None, 30)
    with pytest.raises(WaitTimeout, match="step 20"):
        coordinator.wait_all()
    go.set()


def test_a_turn_that_does_not_come_is_a_timeout(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor("single_thread")
    call(monitor, "notify_started", "node", "somebody else")
    coordinator = CheckpointCoordinator(monitor, timeout_s=0.2)
    coordinator.save_async("full", lambda: None, 20)
    for thread in threading.enumerate():
        if thread.name == "save-full-20":
            thread.join(LIMIT)
    with pytest.raises(WaitTimeout, match="turn"):
        coordinator.wait_all()


def test_a_monitor_that_is_gone_is_an_error_and_no_hang(make_actor: Callable[..., Any]) -> None:
    monitor = make_actor()
    coordinator = CheckpointCoordinator(monitor, timeout_s=LIMIT)
    local_ray.kill(monitor)
    with pytest.raises(RunError, match=r"^the checkpoint monitor died before it could give a save of step 20"):
        coordinator.save_sync(lambda: None, 20)
    told = (
        r"^the checkpoint monitor died before it could take step 20 as one to commit \(it was killed by `ray\.kill`\)$"
    )
    with pytest.raises(RunError, match=told):
        monitor_step(coordinator, 20)


# ---- who may write


def test_under_single_thread_nobody_writes_beside_another(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor("single_thread")
    coordinators = [CheckpointCoordinator(monitor, job_id=f"p{i}", timeout_s=LIMIT) for i in range(3)]
    writing, most, lock = 0, 0, threading.Lock()

    def save() -> None:
        nonlocal writing, most
        with lock:
            writing += 1
            most = max(most, writing)
        call(monitor, "describe")
        with lock:
            writing -= 1

    for coordinator in coordinators:
        for name in ("model", "optim"):
            coordinator.save_async(name, save, 20)
    for coordinator in coordinators:
        coordinator.wait_all()
    assert most == 1


def test_saves_that_meet_in_a_barrier_do_not_wait_for_their_turn(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor("single_thread")
    meeting = threading.Barrier(2, timeout=LIMIT)

    def rank(number: int) -> None:
        coordinator = CheckpointCoordinator(monitor, job_id=f"p{number}", timeout_s=LIMIT)
        coordinator.save_sync(lambda: meeting.wait() and None, 20, part=f"r{number}")

    call(monitor, "begin", 20, 0, FULL, ["r0", "r1"])
    ranks = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(LIMIT)
    assert call(monitor, "wait_committed", 20, 0, LIMIT)["step"] == 20


# ---- deaths


@ray.remote(num_cpus=0)
class Rank:
    """A trainer rank whose save never ends."""

    def __init__(self, monitor: Any, name: str) -> None:
        self.coordinator = CheckpointCoordinator(monitor, job_id=name, timeout_s=LIMIT)
        self.started = threading.Event()

    def save(self, step: int, part: str, folder: str) -> int:
        def write() -> None:
            (Path(folder) / "half.pt").write_text("half")
            self.started.set()
            threading.Event().wait()

        self.coordinator.save_async("full", write, step, part=part)
        self.started.wait(LIMIT)
        return os.getpid()


@pytest.mark.parametrize("monitor_restarts", [False, pytest.param(True, marks=pytest.mark.all)])  # waits 10 s
def test_a_rank_that_dies_while_writing_is_noticed(actor: Any, root: Path, monitor_restarts: bool) -> None:
    folder = call(actor, "begin", 20, 0, FULL, ["r0", "r1"])
    rank = Rank.remote(actor, "rank-0")
    pid = ray.get(rank.save.remote(20, "r0", folder), timeout=LIMIT)
    if monitor_restarts:
        ray.kill(actor, no_restart=False)
        assert call(actor, "status", 20)["state"] == "open"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"part 'r0' failed: the writer rank-0 on node \w+ was lost"):
        call(actor, "wait_committed", 20, 0, LIMIT)
    call(actor, "wait_idle", LIMIT)
    assert not staging_dir(root, 20, 0).exists()
    assert names(root) == {".staging/failed-0.json"}
    folder = call(actor, "begin", 30, 0, FULL, ["r0"])
    call(actor, "notify_finished", 30, part="r0")
    assert call(actor, "wait_committed", 30, 0, LIMIT)["step"] == 30


def test_a_rank_that_ends_after_its_saves_fails_nothing(monitor: Any) -> None:
    @ray.remote(num_cpus=0)
    def rank(monitor: Any) -> None:
        CheckpointCoordinator(monitor, timeout_s=LIMIT).save_sync(lambda: None, 20, part="r0")

    call(monitor, "begin", 20, 0, FULL, ["r0", "r1"])
    ray.get(rank.remote(monitor), timeout=LIMIT)
    call(monitor, "notify_finished", 20, part="r1")
    assert call(monitor, "wait_committed", 20, 0, LIMIT)["step"] == 20


def test_a_save_under_way_when_the_monitor_is_killed_is_still_committed(
    actor: Any,
) -> None:
    coordinator = CheckpointCoordinator(actor, timeout_s=LIMIT)
    go = threading.Event()
    folder = Path(call(actor, "begin", 20, 0, FULL, ["r0"]))
    write = writer(folder, "model.pt")
    coordinator.save_async("full", lambda: write() if go.wait(LIMIT) else None, 20, part="r0")
    ray.kill(actor, no_restart=False)
    go.set()
    coordinator.wait_all()
    assert call(actor, "wait_committed", 20, 0, LIMIT)["bytes"] == len("model.pt")
