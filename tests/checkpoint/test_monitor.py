"""The monitor actor, as a driver and writers of the seed see it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from tests import local_ray
from tests.checkpoint.helpers import commit, names
from tests.checkpoint.mirror_places import OWNER
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import (
    file_entry,
    read_committed,
    read_manifest,
    read_tracker,
    staging_dir,
    step_dir,
    tracker_path,
    write_tracker,
)
from trinity_sync.checkpoint.folder.leases import lease_checkpoint
from trinity_sync.checkpoint.folder.lock import locked
from trinity_sync.checkpoint.folder.owner import MARK
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.launch import job
from trinity_sync.launch.row_scan import NOTHING
from trinity_sync.launch.start import run_mirror
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import CheckpointFacts, Policy

LIMIT = 30.0


def call(monitor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    return ray.get(getattr(monitor, method).remote(*args, **kwargs), timeout=LIMIT)


def begin(monitor: Any, step: int, parts: list[str], kind: str = FULL, **meta: Any) -> Path:
    return Path(call(monitor, "begin", step, None, kind, parts, meta))


def write_part(monitor: Any, step: int, folder: Path, part: str, **options: Any) -> None:
    (folder / f"{part}.pt").write_text(f"{part} of {step}")
    call(monitor, "notify_finished", step, part=part, files=[file_entry(folder, f"{part}.pt")], **options)


def save(monitor: Any, step: int, parts: tuple[str, ...] = ("a",), kind: str = FULL, **meta: Any) -> dict[str, Any]:
    folder = begin(monitor, step, list(parts), kind, **meta)
    for part in parts:
        write_part(monitor, step, folder, part)
    return call(monitor, "wait_committed", step, None, LIMIT)


def tracked(root: Path) -> tuple[int | None, int | None]:
    return read_tracker(root, FULL).step, read_tracker(root, STATE_DICT).step


def faults(monitor: Any) -> list[str]:
    return [event["error"] for event in call(monitor, "drain_events") if event["event"] == "fault"]


# ---- a save from begin to commit


def test_a_save_from_begin_to_commit(actor: Any, root: Path) -> None:
    folder = begin(actor, 20, ["r0", "r1", "digest"], backend="fsdp", world_size=2, metrics={"reward/mean": 0.5})
    assert folder == staging_dir(root, 20, 0)
    for part in ("r0", "r1"):
        write_part(actor, 20, folder, part)
    call(actor, "notify_finished", 20, part="digest", digest="ab")
    result = call(actor, "wait_committed", 20, 0, LIMIT)
    assert 0 <= result.pop("written_s") <= result.pop("total_s")
    assert result == {
        **{"step": 20, "attempt": 0, "kind": FULL, "digest": "ab", "bytes": 16},
        **{"path": str(step_dir(root, 20)), "beside": False, "pruned": [], "base": None},
    }
    manifest = read_manifest(step_dir(root, 20))
    assert (manifest.backend, manifest.world_size, manifest.metrics) == ("fsdp", 2, {"reward/mean": 0.5})
    assert catalog.verify(step_dir(root, 20)).ok
    assert tracked(root) == (20, 20)
    assert names(root / ".staging") == set()


def test_a_commit_is_told_to_whoever_waits_for_it_and_to_nobody_else(monitor: Any) -> None:
    save(monitor, 20)
    assert call(monitor, "drain_events") == []


def test_what_happened_beside_the_saves_is_told_once(monitor: Any) -> None:
    save(monitor, 20)
    save(monitor, 30)
    call(monitor, "prune", 1)
    events = call(monitor, "drain_events")
    assert [(event["event"], event["step"], event["attempt"]) for event in events] == [("prune", 20, 0)]
    assert set(events[0]) >= {"time", "reason", "freed_bytes"}
    assert call(monitor, "drain_events") == []


def test_weights_and_full_checkpoint_of_one_step(monitor: Any, root: Path) -> None:
    result = save(monitor, 20, ("weights",), STATE_DICT)
    assert (result["kind"], tracked(root)) == (STATE_DICT, (None, 20))
    result = save(monitor, 20, ("optim",))
    assert (result["kind"], tracked(root)) == (FULL, (20, 20))
    assert names(step_dir(root, 20)) == {"weights.pt", "optim.pt", "manifest.json"}
    assert catalog.verify(step_dir(root, 20)).ok


def test_weights_are_visible_while_the_optimizer_is_still_being_written(monitor: Any, root: Path) -> None:
    folder = begin(monitor, 20, ["optim"])
    begin(monitor, 20, ["weights"], STATE_DICT)
    (folder / "half.pt").write_text("being written")
    write_part(monitor, 20, folder, "weights")
    assert call(monitor, "wait_committed", 20, None, LIMIT, kind=STATE_DICT)["kind"] == STATE_DICT
    assert names(step_dir(root, 20)) == {"weights.pt", "manifest.json"}
    assert tracked(root) == (None, 20)
    write_part(monitor, 20, folder, "optim")
    assert call(monitor, "wait_committed", 20, None, LIMIT)["kind"] == FULL
    assert names(step_dir(root, 20)) == {"weights.pt", "optim.pt", "half.pt", "manifest.json"}


def test_a_wait_that_is_too_long_names_what_is_missing(monitor: Any) -> None:
    begin(monitor, 20, ["r0", "r1"])
    call(monitor, "notify_finished", 20, part="r0")
    with pytest.raises(WaitTimeout, match=r"step 20 .*part 'r1'.*within 0.1 s") as caught:
        call(monitor, "wait_committed", 20, 0, 0.1)
    assert "'r0'" not in str(caught.value.cause)


def test_silence_fails_a_step(make_monitor: Callable[..., Any], root: Path) -> None:
    monitor = make_monitor(timeout_s=0.2)
    begin(monitor, 20, ["r0"])
    with pytest.raises(RunError, match="nothing was heard of it"):
        call(monitor, "wait_committed", 20, 0, LIMIT)
    call(monitor, "wait_idle", LIMIT)
    assert names(root) == {".staging/failed-0.json"}


def test_a_call_for_another_attempt_is_refused(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor(attempt=1)
    with pytest.raises(RunError, match="attempt 0"):
        call(monitor, "notify_finished", 20, part="a", attempt=0)


# ---- failures


def test_a_failed_part_fails_the_step_and_cleans_up(monitor: Any, root: Path) -> None:
    folder = begin(monitor, 20, ["r0", "r1"])
    write_part(monitor, 20, folder, "r0")
    call(monitor, "notify_failed", 20, "r1", "disk full")
    with pytest.raises(RunError, match="disk full"):
        call(monitor, "wait_committed", 20, 0, LIMIT)
    call(monitor, "notify_finished", 20, part="r1")
    call(monitor, "wait_idle", LIMIT)
    assert catalog.scan(root) == []
    assert not folder.exists()
    assert tracked(root) == (None, None)
    assert call(monitor, "status", 20)["error"] == "part 'r1' failed: disk full"
    assert save(monitor, 30)["step"] == 30


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_step_that_fails_on_a_full_disk_is_cleaned_up_and_stays_failed(
    make_actor: Callable[..., Any], small_disk: Path
) -> None:
    monitor = make_actor(folder=small_disk)
    folder = begin(monitor, 20, ["r0"])
    with pytest.raises(OSError, match="No space left"):
        (folder / "r0.pt").write_bytes(b"x" * 100_000)
    error = "disk full " * 1000  # its note needs more room than the journal leaves
    call(monitor, "notify_failed", 20, "r0", error)
    call(monitor, "wait_idle", LIMIT)
    assert not folder.exists()
    assert not list(small_disk.rglob("*.tmp"))
    assert call(monitor, "status", 20)["error"] == f"part 'r0' failed: {error}"
    ray.kill(monitor, no_restart=False)
    with pytest.raises(RunError, match="disk full"):
        call(monitor, "wait_committed", 20, 0, LIMIT)
    assert save(monitor, 30)["step"] == 30


def test_a_commit_whose_files_are_not_as_reported_fails_the_step(monitor: Any, root: Path) -> None:
    begin(monitor, 20, ["a"])
    call(monitor, "notify_finished", 20, part="a", files=[("a.pt", 5, "00")])
    with pytest.raises(RunError, match=r"a\.pt was reported with 5 bytes"):
        call(monitor, "wait_committed", 20, 0, LIMIT)
    assert tracked(root) == (None, None)


def test_saving_without_a_folder_is_refused(make_monitor: Callable[..., Any]) -> None:
    with pytest.raises(RunError, match="without a checkpoint folder"):
        begin(make_monitor(folder=None), 20, ["a"])


@pytest.mark.parametrize(
    ("strategy", "policies", "named"),
    [("all_at_once", {}, "save_strategy"), (None, {"keep_last": {"n": 0}}, r"keep_last\.n")],
)
def test_wrong_settings_are_told_before_anything_starts(
    make_actor: Callable[..., Any], strategy: str | None, policies: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_actor(strategy, policies=policies)


# ---- a monitor of one's own


class Telling(CheckpointMonitor):
    """Tells of each commit in a file; what it is given beside what all have is where."""

    def __init__(self, *args: Any, told: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told = told

    async def wait_committed(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, and tell."""
        committed = await super().wait_committed(*args, **kwargs)
        self._told.write_text(f"step {committed['step']}")
        return committed


def test_a_monitor_of_ones_own_gets_what_is_its_own_and_commits(cluster: None, root: Path, tmp_path: Path) -> None:
    own = {"told": tmp_path / "told"}
    monitor = Telling.get_actor("telling", None, str(root), config=MonitorConfig(timeout_s=LIMIT), own=own)
    try:
        assert save(monitor, 20)["step"] == 20
        assert own["told"].read_text() == "step 20"
    finally:
        ray.kill(monitor)


# ---- retention


def test_a_limit_that_comes_with_a_save_is_enforced_when_asked(make_monitor: Callable[..., Any], root: Path) -> None:
    monitor = make_monitor()
    for step in (10, 20, 30):
        save(monitor, step)
    assert [info.step for info in catalog.scan(root)] == [10, 20, 30]
    pruned = call(monitor, "prune", 2)
    assert [(gone["step"], gone["reason"]) for gone in pruned] == [(10, "not kept by keep_last")]
    assert [info.step for info in catalog.scan(root)] == [20, 30]
    assert call(monitor, "prune", 2) == call(monitor, "prune") == []
    assert [event["step"] for event in call(monitor, "drain_events") if event["event"] == "prune"] == [10]


@pytest.mark.parametrize(
    ("policies", "limit", "stay"),
    [
        ({"keep_every": {"steps": 4}}, {"keep_last": 3}, [4, 5, 6]),
        ({"keep_every": {"steps": 2}}, {"keep_last": 1}, [2, 4, 6]),
        ({"keep_every": {"steps": 4}}, {}, [4, 6]),
        ({}, {"keep_last": 2}, [5, 6]),
        ({}, {}, [1, 2, 3, 4, 5, 6]),
    ],
)
@pytest.mark.few(2)
def test_a_commit_leaves_what_its_limit_or_a_policy_keeps(
    make_monitor: Callable[..., Any], root: Path, policies: dict[str, Any], limit: dict[str, int], stay: list[int]
) -> None:
    pruned = []
    for step in range(1, 7):
        monitor = make_monitor(policies=policies, attempt=step)  # each commit is the first after a resume
        pruned += [gone["step"] for gone in save(monitor, step, **limit)["pruned"]]
        call(monitor, "wait_idle", LIMIT)
    assert [info.step for info in catalog.scan(root)] == stay
    assert sorted(pruned) == sorted({*range(1, 7)} - {*stay})
    assert "keep_last" not in (step_dir(root, 6) / "manifest.json").read_text()


def test_old_checkpoints_go_after_the_new_one_is_committed(make_monitor: Callable[..., Any], root: Path) -> None:
    monitor = make_monitor(policies={"keep_last": {"n": 1}})
    save(monitor, 10)
    begin(monitor, 20, ["a"])
    assert [info.step for info in catalog.scan(root)] == [10]
    write_part(monitor, 20, staging_dir(root, 20, 0), "a")
    result = call(monitor, "wait_committed", 20, 0, LIMIT)
    assert [(gone["step"], gone["freed_bytes"]) for gone in result["pruned"]] == [(10, 7)]
    assert [info.step for info in catalog.scan(root)] == [20]


def test_saving_a_step_again_with_a_limit_of_one_does_not_delete_it(
    make_monitor: Callable[..., Any], root: Path
) -> None:
    monitor = make_monitor(policies={"keep_last": {"n": 1}})
    save(monitor, 10)
    with pytest.raises(RunError, match="already committed"):
        begin(monitor, 10, ["a"])
    assert catalog.verify(step_dir(root, 10)).ok


def test_a_step_that_failed_deletes_nothing(make_monitor: Callable[..., Any], root: Path) -> None:
    monitor = make_monitor(policies={"keep_last": {"n": 1}})
    save(monitor, 10)
    begin(monitor, 20, ["a"])
    call(monitor, "notify_failed", 20, "a", "boom")
    call(monitor, "wait_idle", LIMIT)
    assert [info.step for info in catalog.scan(root)] == [10]


def test_a_budget_that_cannot_be_met_is_told_once(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor(policies={"keep_within_budget": {"bytes": 1}})
    for step in (10, 20):
        save(monitor, step)
    assert len(faults(monitor)) == 1


@dataclass(frozen=True)
class Broken(Policy):
    """Somebody's policy with a mistake."""

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        raise ZeroDivisionError("of theirs")


def test_a_policy_that_raises_is_a_fault_with_its_place_and_traceback(
    make_monitor: Callable[..., Any], root: Path
) -> None:
    monitor = make_monitor(policies=(Broken(),))
    save(monitor, 10)
    (fault,) = call(monitor, "drain_events")
    place = re.match(r"ZeroDivisionError: of theirs \((.*test_monitor\.py):\d+\)$", fault["error"])
    assert place is not None, fault
    assert fault["traceback"].startswith(f'Traceback (most recent call last):\n  File "{place[1]}", line ')
    assert [info.step for info in catalog.scan(root)] == [10]


# ---- the seed's calls


def test_counted_parts_move_the_two_trackers(monitor: Any, root: Path) -> None:
    call(monitor, "register_thread_count", 7, state_dict_thread_count=1, checkpoint_thread_count=1)
    call(monitor, "monitor_step", 7, True)
    call(monitor, "notify_finished", 7, True)
    call(monitor, "wait_committed", 7, None, LIMIT, kind=STATE_DICT)
    assert tracked(root) == (None, 7)
    call(monitor, "monitor_step", 7)
    call(monitor, "notify_finished", 7)
    call(monitor, "wait_committed", 7, None, LIMIT)
    assert tracked(root) == (7, 7)


def test_steps_that_finish_out_of_order_leave_the_newest_in_the_trackers(monitor: Any, root: Path) -> None:
    for step in (1, 2):
        call(monitor, "register_thread_count", step, checkpoint_thread_count=1)
        call(monitor, "monitor_step", step)
    for step in (2, 1):
        call(monitor, "notify_started", "node", "job")
        call(monitor, "notify_finished", step)
        call(monitor, "wait_committed", step, None, LIMIT)
    assert tracked(root) == (2, 2)


@pytest.mark.parametrize("later", ["open", "failed", "unknown"])
def test_a_commit_leaves_the_tracker_to_a_later_step_only_while_that_is_being_saved(
    monitor: Any, root: Path, later: str
) -> None:
    folder = begin(monitor, 1, ["a"])
    if later != "unknown":
        begin(monitor, 2, ["a"])
    write_tracker(root, FULL, 2)  # verl's trainer, in advance
    if later == "failed":
        call(monitor, "notify_failed", 2, "a", "boom")
    write_part(monitor, 1, folder, "a")
    call(monitor, "wait_committed", 1, None, LIMIT)
    assert tracked(root) == ((2, 1) if later == "open" else (1, 1))
    assert read_committed(root) == 1
    if later == "open":
        call(monitor, "notify_failed", 2, "a", "boom")
        call(monitor, "wait_idle", LIMIT)
        assert tracked(root) == (1, 1)


def test_files_in_verls_own_place_are_committed_there(monitor: Any, root: Path) -> None:
    (root / "global_step_5/actor").mkdir(parents=True)
    (root / "global_step_5/actor/model_world_size_1_rank_0.pt").write_text("w")
    call(monitor, "register_thread_count", 5, checkpoint_thread_count=1)
    call(monitor, "notify_finished", 5)
    call(monitor, "monitor_step", 5)
    call(monitor, "wait_committed", 5, None, LIMIT)
    report = catalog.verify(step_dir(root, 5))
    assert (report.ok, report.files) == (True, 1)


def test_without_a_folder_parts_are_counted_and_nothing_is_written(
    make_monitor: Callable[..., Any], root: Path
) -> None:
    monitor = make_monitor(folder=None)
    call(monitor, "register_thread_count", 5, checkpoint_thread_count=1)
    call(monitor, "monitor_step", 5)
    call(monitor, "notify_finished", 5)
    assert call(monitor, "wait_committed", 5, None, LIMIT)["kind"] == FULL
    assert not root.exists()


def test_one_thread_writes_at_a_time_if_so_wished(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor("single_thread")
    call(monitor, "notify_started", "node", "first")
    second = monitor.notify_started.remote("node", "second")
    assert ray.wait([second], timeout=0.2)[0] == []
    call(monitor, "notify_finished", 1)
    ray.get(second, timeout=LIMIT)


def test_a_turn_that_does_not_come_is_a_timeout_and_is_forgotten(make_monitor: Callable[..., Any]) -> None:
    monitor = make_monitor("single_thread")
    call(monitor, "notify_started", "node", "first")
    with pytest.raises(WaitTimeout, match=r"second.*turn"):
        call(monitor, "notify_started", "node", "second", timeout_s=0.1)
    third = monitor.notify_started.remote("node", "third")
    call(monitor, "notify_finished", 1)
    ray.get(third, timeout=LIMIT)


# ---- starts and restarts


def test_the_actor_of_a_run_is_there_once(cluster: None, root: Path) -> None:
    first = CheckpointMonitor.get_actor("same", default_local_dir=str(root))
    assert CheckpointMonitor.get_actor("same")._actor_id == first._actor_id
    assert CheckpointMonitor.get_actor("other")._actor_id != first._actor_id


def test_an_actor_that_is_killed_goes_on_where_it_was(actor: Any, root: Path) -> None:
    save(actor, 10)
    folder = begin(actor, 20, ["r0", "r1"], world_size=2)
    write_part(actor, 20, folder, "r0")
    waiting = actor.wait_committed.remote(20, 0, LIMIT)
    ray.kill(actor, no_restart=False)
    write_part(actor, 20, folder, "r1")
    assert ray.get(waiting, timeout=LIMIT)["bytes"] == 16
    assert read_manifest(step_dir(root, 20)).world_size == 2
    assert tracked(root) == (20, 20)
    assert call(actor, "wait_committed", 10, 0, LIMIT)["path"] == str(step_dir(root, 10))


@pytest.mark.all
def test_who_asks_after_a_restart_for_what_retention_took_hears_that_it_was_committed(
    make_actor: Callable[..., Any],
) -> None:
    monitor = make_actor(policies={"keep_last": {"n": 1}})
    told = [save(monitor, step) for step in (10, 20)]
    ray.kill(monitor, no_restart=False)
    again = call(monitor, "wait_committed", 10, 0, LIMIT / 3, kind=FULL)
    times = {"written_s": 0.0, "total_s": 0.0}
    assert again | times == told[0] | times
    with pytest.raises(WaitTimeout):
        call(monitor, "wait_committed", 30, 0, 0.1)


def test_a_step_that_failed_stays_failed_after_a_restart(actor: Any) -> None:
    begin(actor, 20, ["r0", "r1"])
    call(actor, "notify_failed", 20, "r0", "disk full")
    call(actor, "wait_idle", LIMIT)
    ray.kill(actor, no_restart=False)
    with pytest.raises(RunError, match="disk full"):
        call(actor, "wait_committed", 20, 0, LIMIT)
    with pytest.raises(RunError, match="disk full"):
        begin(actor, 20, ["r0", "r1"])


def test_a_killed_actor_forgets_no_turn(make_actor: Callable[..., Any]) -> None:
    monitor = make_actor("single_thread")
    begin(monitor, 20, ["a", "b"])
    call(monitor, "notify_started", "node", "first", step=20, part="a", ticket="t1")
    second = monitor.notify_started.remote("node", "second", step=20, part="b", ticket="t2")
    ray.kill(monitor, no_restart=False)
    assert call(monitor, "status", 20)["state"] == "open"
    assert ray.wait([second], timeout=0.2)[0] == []
    call(monitor, "notify_finished", 20, part="a", ticket="t1")
    ray.get(second, timeout=LIMIT)


def test_a_start_repairs_trackers_and_says_what_was_wrong(make_monitor: Callable[..., Any], root: Path) -> None:
    commit(root, 20)
    tracker_path(root, FULL).write_text("")
    write_tracker(root, STATE_DICT, 99)
    monitor = make_monitor(attempt=1)
    call(monitor, "describe")
    assert tracked(root) == (20, 20)
    assert len(faults(monitor)) == 1


def test_a_start_leaves_the_checkpoints_of_another_program_alone(make_monitor: Callable[..., Any], root: Path) -> None:
    step_dir(root, 20).mkdir(parents=True)
    write_tracker(root, FULL, 20)
    call(make_monitor(), "describe")
    assert read_tracker(root, FULL).step == 20


def test_a_monitor_that_starts_again_after_another_run_took_over_leaves_the_folder_alone(
    make_actor: Callable[..., Any], root: Path
) -> None:
    with locked(root, Path("first")):
        monitor = make_actor()
        pid = call(monitor, "describe")["pid"]
    (root / ".lock").write_text("another run\n1234")  # as `locked` does, which would wait for the monitor's end
    kept = staging_dir(root, 20, 0)
    kept.mkdir(parents=True)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError, match="has been taken over by another run"):
        call(monitor, "describe")
    assert kept.is_dir()


@pytest.mark.all
def test_a_resumed_run_that_publishes_the_step_it_began_with_leaves_its_checkpoint(
    make_actor: Callable[..., Any], root: Path
) -> None:
    full = commit(root, 20, {"actor/model.pt": "w", "actor/optim.pt": "o"})
    monitor = make_actor(attempt=1)
    result = save(monitor, 20, ("weights",), STATE_DICT)
    assert (result["kind"], result["attempt"], result["beside"]) == (STATE_DICT, 1, True)
    assert read_manifest(step_dir(root, 20)) == full
    assert tracked(root) == (20, 20)
    assert call(monitor, "drain_events") == [], "it is no checkpoint of the run"
    os.kill(call(monitor, "describe")["pid"], signal.SIGKILL)
    again = call(monitor, "wait_committed", 20, 1, LIMIT, kind=STATE_DICT)
    times = {"written_s": 0.0, "total_s": 0.0}
    assert again | times == result | times
    with lease_checkpoint(Path(again["path"]).parent, 20, reader="explorer-0", seconds=60) as lease:
        assert names(lease.path) == {"weights.pt", "manifest.json"}


def test_a_new_attempt_clears_what_the_last_had_staged(make_monitor: Callable[..., Any], root: Path) -> None:
    begin(make_monitor(), 20, ["a"])
    call(make_monitor(attempt=1), "describe")
    assert names(root) == set()
    assert not staging_dir(root, 20, 0).exists()


# ---- weight and place


def test_the_actor_is_light(make_actor: Callable[..., Any]) -> None:
    with local_ray.alone():
        actor = make_actor()
    save(actor, 10)
    loaded = ray.get(
        actor.__ray_call__.remote(lambda _: [name for name, module in sys.modules.items() if module is not None]),
        timeout=LIMIT,
    )
    assert not {"torch", "verl", "transformers", "pyarrow"} & set(loaded)
    assert call(actor, "memory")["peak_rss"] < 120e6


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    code = "import sys, trinity_sync.checkpoint; assert not {'torch', 'ray'} & set(sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


@pytest.mark.all
def test_a_copy_that_fails_is_told_and_takes_nothing_back(make_actor: Callable[..., Any], root: Path) -> None:
    monitor = make_actor(default_hdfs_dir="/dev/null/nowhere", mirror=MirrorSettings(tries=2, backoff_s=0.01))
    save(monitor, 10)
    assert list(call(monitor, "wait_mirrored", LIMIT)) == [10]
    call(monitor, "wait_idle", LIMIT)
    told = call(monitor, "drain_events")
    assert [(event["event"], event["where"]) for event in told] == [
        ("fault", "copy of step 10 to /dev/null/nowhere")
    ] * 2
    assert tracked(root) == (10, 10)


@pytest.mark.all
def test_a_resumed_run_copies_what_the_mirror_lacks(make_actor: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "far"
    place.write_text("a file where the folder should be")
    monitor = make_actor(default_hdfs_dir=str(place), mirror=MirrorSettings(tries=1))
    save(monitor, 10)
    assert list(call(monitor, "wait_mirrored", LIMIT)) == [10]
    place.unlink()
    assert call(make_actor(default_hdfs_dir=str(place), attempt=1), "wait_mirrored", LIMIT) == {}
    assert catalog.verify(step_dir(place, 10)).ok


@pytest.mark.all
def test_the_first_copy_marks_a_named_mirror_that_the_driver_has_not_reached(
    make_actor: Callable[..., Any], tmp_path: Path
) -> None:
    settings = MirrorSettings(tries=1, named=True)
    monitor = make_actor(default_hdfs_dir=str(tmp_path / "far"), mirror=settings, owner=OWNER)
    save(monitor, 10)
    assert call(monitor, "wait_mirrored", LIMIT) == {}
    assert (tmp_path / "far" / MARK).read_text() == OWNER.to_text()


def test_a_copy_that_hangs_holds_nothing_up(make_actor: Callable[..., Any], root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = f"sftp://tester@127.0.0.1:{port}/far"
        monitor = make_actor(
            default_hdfs_dir=place, policies={"keep_last": {"n": 1}}, mirror=MirrorSettings(timeout_s=60.0)
        )
        save(monitor, 10)
        assert save(monitor, 20)["step"] == 20
        assert 10 in [info.step for info in catalog.scan(root)], "what is being copied was deleted"
        assert faults(monitor) == []
        left = call(monitor, "wait_mirrored", 0.01)
        assert list(left) == [10, 20], "what is not copied in time is named"


def test_committed_checkpoints_are_copied_on_and_what_was_kept_for_that_goes_afterwards(
    make_actor: Callable[..., Any], root: Path, tmp_path: Path
) -> None:
    monitor = make_actor(default_hdfs_dir=str(tmp_path / "far"), policies={"keep_last": {"n": 1}})
    for step in (10, 20):
        save(monitor, step)
    assert call(monitor, "wait_mirrored", LIMIT) == {}
    call(monitor, "wait_idle", LIMIT)
    for place in (root, tmp_path / "far"):
        assert [info.step for info in catalog.scan(place)] == [20]
        assert catalog.verify(step_dir(place, 20)).ok


@pytest.mark.all
def test_a_mirror_that_keeps_all_keeps_what_retention_removes_here(
    make_actor: Callable[..., Any], root: Path, tmp_path: Path
) -> None:
    cfg = compose(["checkpoint.mirror_keep=all", f"checkpoint.mirror={tmp_path / 'far'}"])
    mirror = run_mirror(typed(cfg), OWNER)
    assert mirror is not None
    monitor = make_actor(default_hdfs_dir=mirror.place, policies={"keep_last": {"n": 1}}, mirror=mirror.settings)
    for step in (10, 20):
        save(monitor, step)
        assert call(monitor, "wait_mirrored", LIMIT) == {}
    call(monitor, "wait_idle", LIMIT)
    assert [info.step for info in catalog.scan(root)] == [20]
    assert [info.step for info in catalog.scan(tmp_path / "far")] == [10, 20]
    assert all(catalog.verify(info.path).ok for info in catalog.scan(tmp_path / "far"))


@pytest.mark.parametrize(("stopped", "waited"), [(True, "0.2"), (False, "0.4")])
@pytest.mark.few(1)
def test_the_end_of_a_run_waits_for_copies_so_long_and_names_what_is_not_there(
    make_actor: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stopped: bool,
    waited: str,
) -> None:
    monkeypatch.setattr(job, "_SETTLE_S", 0.2)
    told: list[tuple[str, str]] = []
    recorder = SimpleNamespace(phase=lambda what: None, fault=lambda where, error: told.append((where, error)))
    start = SimpleNamespace(weights_only=False)
    folder = SimpleNamespace(logs=Path(), model=Path())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"sftp://tester@127.0.0.1:{silent.getsockname()[1]}/far"
        cfg = compose([f"checkpoint.mirror={place}", "checkpoint.mirror_wait_s=0.4"])
        made_of: Any = SimpleNamespace(
            cfg=typed(cfg),
            scanned=NOTHING,
            folder=folder,
            start=start,
            recorder=recorder,
            cluster=None,
            run_key="run",
            use_gpu=False,
            last_step=1,
            stop=None,
            owner=None,
            mirror=run_mirror(typed(cfg), OWNER),
            store=None,
            kept=None,
            states=None,
            heals=False,
        )
        run: Any = job.Job(made_of)
        monitor = make_actor(default_hdfs_dir=place, mirror=made_of.mirror.settings)
        run.actors.monitor = MonitorClient(monitor)
        for step in (10, 20):
            save(monitor, step)
        run._finish_copies(at_once=stopped)
    left = "step 10 (still waiting or under way); step 20 (still waiting or under way)"
    assert capsys.readouterr().err == f"not copied to {place} within {waited} s: {left}\n"
    assert told == [(f"mirror {place}", f"not copied at the end of the run: {left}")]


def test_an_interrupt_in_the_wait_for_copies_does_not_hide_what_is_missing() -> None:
    mirror, store = Mock(), Mock()
    run: Any = object.__new__(job.Job)
    run._cfg, run._setup = typed(compose([])), SimpleNamespace(mirror=mirror, store=store)
    run._recorder, run.actors = Mock(), Mock()
    run._copies = Mock(finish=Mock(side_effect=[KeyboardInterrupt, {3: "still under way"}]))
    with pytest.raises(KeyboardInterrupt):
        run._finish_copies(at_once=False)
    assert store.report_missing.call_args.args[0] == {3: "still under way"}
    mirror.finish.assert_called_once()
