"""The synchronizer as the loops of Trinity-RFT call it: by `.remote` and plainly, with its settings and its enums."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.experimental import get_local_object_locations

from tests import local_ray
from tests.patience import until
from tests.sync.helpers import LIMIT, random_weights
from tests.sync.light import Member
from tests.sync.trinity_configs import RunningStatus, SyncMethod, config
from trinity_sync.actors import handles
from trinity_sync.actors.calls import this_process
from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer, SynchronizerConfig, handover
from trinity_sync.sync.settings import synchronizer_config
from trinity_sync.sync.synchronizer import SynchronizerActor

Make = Callable[..., Synchronizer]


@pytest.fixture
def namespace() -> str:
    return local_ray.new_name()


@pytest.fixture
def trinity(cluster: None, namespace: str, tmp_path: Path) -> Iterator[Synchronizer]:
    """The synchronizer of a program of Trinity-RFT, in mode memory."""
    synchronizer = Synchronizer.get_actor(config(namespace, str(tmp_path)))
    yield synchronizer
    ray.kill(synchronizer.actor)


# ---- the handle


def test_each_call_is_made_plainly_or_by_remote_and_awaited(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()

    async def ask() -> tuple[int, bool]:
        await synchronizer.set_trainer_status.remote("running")
        return await synchronizer.get_latest_model_version.remote(), await synchronizer.explorer_requires_sync.remote()

    assert asyncio.run(ask()) == (-1, False)
    assert (synchronizer.get_latest_model_version(), synchronizer.explorer_requires_sync()) == (-1, False)
    assert ray.get(synchronizer.get_trainer_status.remote(), timeout=LIMIT) == "running"


@pytest.mark.all
def test_a_state_dict_goes_in_and_out_by_remote(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    weights = random_weights(1)
    ray.get(synchronizer.set_model_state_dict.remote(weights, 3), timeout=LIMIT)
    found, step = ray.get(synchronizer.get_model_state_dict.remote(), timeout=LIMIT)
    assert step == 3
    one_by_one = dict(ray.get(pair, timeout=LIMIT) for pair in synchronizer.get_model_state_dict_iterator.remote())
    for taken in (found, one_by_one, dict(synchronizer.get_model_state_dict_iterator())):
        assert list(taken) == list(weights)
        assert all(torch.equal(taken[name], tensor) for name, tensor in weights.items())


def test_an_error_comes_by_remote_as_itself(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_model_state_dict({"w": torch.ones(2)}, 3)
    with pytest.raises(RunError, match="version 3 was published with other weights"):
        ray.get(synchronizer.set_model_state_dict.remote({"w": torch.zeros(2)}, 3), timeout=LIMIT)


@pytest.mark.all
def test_what_goes_by_remote_takes_the_room_of_its_tensors(make_synchronizer: Make) -> None:
    """Each tensor of the fifty is a view of one bucket."""
    synchronizer = make_synchronizer()
    weights = {str(number): torch.ones(1000) for number in range(50)}
    synchronizer.set_model_state_dict(weights, 3)
    answers = [synchronizer.get_model_state_dict.remote(), *synchronizer.get_model_state_dict_iterator.remote()]
    assert sum(map(_bytes, answers)) < 3 * 50 * 4000


def _bytes(reference: Any) -> int:
    """How much of the object store an answer takes."""
    return int(get_local_object_locations([reference])[reference]["object_size"])


def test_an_enums_member_that_is_named_goes_as_its_value() -> None:
    asked: list[dict[str, Any]] = []
    client = SimpleNamespace(_call=lambda *what, **kwargs: asked.append(kwargs) or SimpleNamespace(reference=None))
    handle: Any = SimpleNamespace(client=client)
    vars(Synchronizer)["set_trainer_status"].__get__(handle, Synchronizer).remote(status=RunningStatus.STOPPED)
    assert asked == [{"status": "stopped"}]


@pytest.mark.parametrize(
    "limit", [{"args": (9, None, 0.2)}, {"kwargs": {"timeout": 0.2}}, {"kwargs": {"timeout_s": 0.2}}]
)
def test_a_plain_call_waits_for_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any]) -> None:
    monkeypatch.setattr(handles, "ANSWER_S", 0.0)

    def wait(self: object, step: int = 0, attempt: None = None, timeout_s: float = 0, timeout: float = 0) -> None: ...

    assert handles._limit(wait, limit.get("args", ()), limit.get("kwargs", {}), 600.0) == 0.2


@pytest.mark.parametrize("status", [RunningStatus.REQUIRE_SYNC, "require_sync", "requires_sync", "REQUIRE_SYNC"])
@pytest.mark.few(1)
def test_a_status_is_an_enums_member_its_value_or_its_name(make_synchronizer: Make, status: Any) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_trainer_status(status)
    synchronizer.set_explorer_status(status)
    assert synchronizer.get_trainer_status() == "requires_sync"
    assert synchronizer.get_explorer_status_counts()["requires_sync"] == 1
    assert synchronizer.trainer_requires_weight_sync() is True


# ---- its settings


def test_the_settings_of_trinity_rft_are_read_by_their_names(tmp_path: Path) -> None:
    found = synchronizer_config(config("a/run", str(tmp_path), SyncMethod.CHECKPOINT, 7))
    assert found == SynchronizerConfig(
        timeout_s=7.0,
        checkpoint_dir=str(tmp_path),
        follow_commits=True,
        detached=True,
        namespace="a/run",
        trinity=True,
    )
    memory = config("", str(tmp_path), SyncMethod.MEMORY)
    assert (synchronizer_config(memory).follow_commits, synchronizer_config(memory).namespace) == (False, None)


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a dict: pass a SynchronizerConfig, or the Config of a Trinity-RFT"):
        Synchronizer.get_actor({"slots": 2})
    with pytest.raises(ConfigError, match=r"synchronizer\.sync_timeout is '1 h'; it has to be a number of seconds"):
        synchronizer_config(config("a-run", str(tmp_path), timeout_s="1 h"))
    with pytest.raises(ConfigError, match=r"timeout_s is nan; it has to be a number of seconds above 0"):
        Synchronizer.get_actor(timeout_s=float("nan"))
    spread = config("a-run", str(tmp_path))
    spread.synchronizer.explorer_world_size = "two"
    with pytest.raises(ConfigError, match=r"synchronizer\.explorer_world_size is 'two'"):
        synchronizer_config(spread)
    lacking = config("a-run", str(tmp_path))
    del lacking.trainer.name
    with pytest.raises(ConfigError, match=r"has no field trainer\.name"):
        synchronizer_config(lacking)


def test_what_trinity_rft_has_not_filled_in_is_not_known() -> None:
    empty: Any = config("a-run", "")
    empty.checkpoint_job_dir = empty.ray_namespace = None
    assert (synchronizer_config(empty).checkpoint_dir, synchronizer_config(empty).namespace) == (None, None)


@pytest.mark.all
def test_names_alone_make_one(cluster: None, tmp_path: Path) -> None:
    namespace = local_ray.new_name()
    made = Synchronizer.get_actor(namespace=namespace, timeout_s=0.2, checkpoint_dir=tmp_path)
    with pytest.raises(WaitTimeout, match=r"within 0\.2 s"):
        made.wait_new_model_state_dict(0)
    made.set_model_state_dict(random_weights(1), 4)
    assert Synchronizer.get_actor(namespace=namespace).get_latest_model_path() == f"{tmp_path}/global_step_4/actor"
    ray.kill(made.actor)


def test_of_a_synchronizer_that_is_there_its_own_limit_holds(make_synchronizer: Make) -> None:
    namespace = ray.get(make_synchronizer().actor.settings.remote(), timeout=LIMIT).namespace
    assert Synchronizer.get_actor(namespace=namespace, timeout_s=0.2).timeout_s == LIMIT


def test_a_synchronizer_of_another_checkpoint_folder_is_refused(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(ConfigError, match=rf"is that of the run in {tmp_path}, which is not over"):
        Synchronizer.get_actor(config(run.namespace, str(tmp_path / "another")))


@pytest.mark.parametrize("what", ["latest_state_dict_iteration.txt", "global_step_2/manifest.json"])
def test_a_folder_that_cannot_be_read_now_is_not_taken_for_an_empty_one(tmp_path: Path, what: str) -> None:
    (tmp_path / "latest_state_dict_iteration.txt").write_text("2")
    (tmp_path / what).unlink(missing_ok=True)
    (tmp_path / what).mkdir(parents=True)  # reading it is an OSError
    with pytest.raises(RunError, match=f"the newest commit in {tmp_path} cannot be read now"):
        SynchronizerActor(SynchronizerConfig(checkpoint_dir=str(tmp_path)))


# ---- waiting


@pytest.mark.all
def test_before_the_first_version_an_explorer_without_one_is_answered_at_once(make_synchronizer: Make) -> None:
    assert make_synchronizer().wait_new_model_state_dict(-1) == 0


def test_an_explorer_requires_sync_while_it_waits(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_explorer_status("running")
    waiting = synchronizer.wait_new_model_state_dict.remote(current_version=0)
    until(synchronizer.explorer_requires_sync)
    assert synchronizer.get_explorer_status_counts() == {"running": 0, "requires_sync": 1, "stopped": 0}
    synchronizer.set_model_state_dict(random_weights(1), 1)
    assert ray.get(waiting, timeout=LIMIT) == 1
    assert synchronizer.get_explorer_status_counts() == {"running": 1, "requires_sync": 0, "stopped": 0}


def test_those_who_wait_are_woken_once(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    first = synchronizer.wait_new_model_state_dict.remote(0)
    until(synchronizer.explorer_requires_sync)
    synchronizer.notify_no_new_model_state_dict()
    assert ray.get(first, timeout=LIMIT) == 0
    second = synchronizer.wait_new_model_state_dict.remote(0)
    assert ray.wait([second], timeout=0.3) == ([], [second])
    synchronizer.set_trainer_status(RunningStatus.STOPPED)
    assert ray.get(second, timeout=LIMIT) == 0
    assert synchronizer.trainer_requires_weight_sync() is None


@pytest.mark.all
def test_without_a_trainer_trinitys_explorer_does_not_wait(trinity: Synchronizer) -> None:
    assert trinity.wait_new_model_state_dict(0) == 0
    trinity.set_trainer_status(RunningStatus.RUNNING)
    waiting = trinity.wait_new_model_state_dict.remote(0)
    assert ray.wait([waiting], timeout=0.3) == ([], [waiting])
    trinity.set_trainer_status(RunningStatus.STOPPED)
    assert ray.get(waiting, timeout=LIMIT) == 0


def test_an_explorer_that_is_ahead_of_the_trainer_is_told(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_model_state_dict(random_weights(1), 3)
    with pytest.raises(RunError, match="has version 8, and the newest is 3: the trainer has gone back"):
        synchronizer.wait_new_model_state_dict(8)


def test_a_process_that_has_left_ray_and_come_back_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ["first"]
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_worker_id=lambda: worker[0]))
    before = this_process("explorer")
    assert this_process("explorer") == before
    worker[0] = "second"
    assert this_process("explorer") != before


# ---- publishing


@pytest.mark.parametrize("step", ["7", -1, 1.5])
def test_what_is_no_step_names_no_version(step: Any) -> None:
    with pytest.raises(RunError, match=f"trainer_step is {step!r}; it has to be a number of steps"):
        Synchronizer(None, LIMIT).set_model_state_dict({"w": torch.ones(2)}, step)  # type: ignore[arg-type]


def test_a_version_is_published_again_with_the_same_weights_only(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    for _ in range(2):
        synchronizer.set_model_state_dict(random_weights(1), 3)
    with pytest.raises(RunError, match="version 3 was published with other weights; a version never changes"):
        synchronizer.set_model_state_dict(random_weights(2), 3)
    found, step = synchronizer.get_model_state_dict()
    assert step == 3
    assert isinstance(found, dict)
    assert all(torch.equal(found[name], tensor) for name, tensor in random_weights(1).items())


def test_a_trainer_that_goes_back_begins_the_next_attempt(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_model_state_dict(random_weights(1), 5)
    synchronizer.set_model_state_dict(random_weights(2), 3)
    assert synchronizer.get_latest_model_version() == 3
    synchronizer.set_model_state_dict(random_weights(3), 5)
    assert synchronizer.client.newest().result(LIMIT) == Version(1, 5)


@pytest.mark.all
def test_a_version_whose_tensors_are_lost_does_not_change_either(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_model_state_dict(random_weights(1), 5)
    synchronizer.client.state_lost(Version(0, 5)).result(LIMIT)
    assert synchronizer.get_latest_model_version() == -1
    with pytest.raises(RunError, match="version 5 was published with other weights; a version never changes"):
        synchronizer.set_model_state_dict(random_weights(2), 5)
    synchronizer.set_model_state_dict(random_weights(3), 4)
    assert synchronizer.client.newest().result(LIMIT) == Version(1, 4)


@pytest.mark.all
def test_a_path_is_handed_out_as_it_came(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_model_state_dict("tinker://sampler/6", 6)
    assert synchronizer.get_model_state_dict() == ("tinker://sampler/6", 6)
    assert synchronizer.get_state_dict_meta() is None
    with pytest.raises(RunError, match="version 6 was published as the path 'tinker://sampler/6'"):
        list(synchronizer.get_model_state_dict_iterator())


# ---- commits


class Run:
    """The actors of a run, and a coordinator."""

    def __init__(self, folder: Path, method: SyncMethod) -> None:
        self.folder, self.namespace = folder, local_ray.new_name()
        settings = config(self.namespace, str(folder), method)
        self.synchronizer = Synchronizer.get_actor(settings)
        self.monitor = CheckpointMonitor.get_actor(settings)
        self.coordinator = CheckpointCoordinator(self.monitor, timeout_s=LIMIT)

    def save(self, step: int, *, fails: bool = False, after: threading.Event | None = None) -> None:
        def write() -> None:
            assert after is None or after.wait(LIMIT)
            if fails:
                raise OSError("disk full")
            place = step_dir(self.folder, step) / "actor"
            place.mkdir(parents=True)
            (place / "model.safetensors").write_text(f"weights of {step}")

        self.coordinator.save_async("model_state_dict", write, step, is_state_dict=True)
        asyncio.run(self.coordinator.register_and_monitor(step, is_state_dict=True, state_dict_thread_count=1))

    def close(self) -> None:
        for actor in (self.monitor, self.synchronizer.actor):
            ray.kill(actor)


@pytest.fixture
def make_run(cluster: None, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(method: SyncMethod = SyncMethod.CHECKPOINT) -> Run:
        made.append(Run(tmp_path, method))
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_a_commit_announces_itself(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.synchronizer.set_trainer_status("running")
    waiting = run.synchronizer.wait_new_model_state_dict.remote(0)
    run.save(2)
    assert ray.get(waiting, timeout=LIMIT) == 2
    assert run.synchronizer.get_latest_model_path() == str(step_dir(run.folder, 2) / "actor")
    assert run.coordinator.wait_committed(2)["path"] == str(step_dir(run.folder, 2))


@pytest.mark.all
def test_a_synchronizer_begins_with_what_was_committed_before(make_run: Callable[..., Run]) -> None:
    first = make_run()
    first.save(2)
    first.coordinator.wait_committed(2)
    assert make_run().synchronizer.get_latest_model_version() == 2


@pytest.mark.all
def test_a_trainer_that_stops_ends_the_waits_after_the_commit_that_is_under_way(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.synchronizer.set_trainer_status("running")
    waiting = run.synchronizer.wait_new_model_state_dict.remote(0)
    written = threading.Event()
    threading.Timer(1.0, written.set).start()
    run.save(2, after=written)
    run.synchronizer.set_trainer_status("stopped")
    assert ray.get(waiting, timeout=LIMIT) == 2


def test_in_memory_mode_a_commit_is_no_version(make_run: Callable[..., Run]) -> None:
    run = make_run(SyncMethod.MEMORY)
    run.save(2)
    run.coordinator.wait_committed(2)
    assert run.synchronizer.get_latest_model_version() == -1


def test_announcing_right_after_the_save_waits_for_its_commit(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.save(2)
    run.synchronizer.set_model_state_dict(None, 2)
    assert run.synchronizer.get_latest_model_version() == 2


@pytest.mark.all
def test_announcing_an_earlier_commit_late_does_not_go_back(make_run: Callable[..., Run]) -> None:
    run = make_run()
    for step in (1, 2):
        run.save(step)
    until(lambda: run.synchronizer.get_latest_model_version() == 2)
    run.synchronizer.set_model_state_dict(None, 1)
    assert run.synchronizer.get_latest_model_version() == 2


@pytest.mark.all
def test_a_step_that_is_saved_again_is_announced_when_that_is_committed(make_run: Callable[..., Run]) -> None:
    first = make_run()
    first.save(2)
    first.coordinator.wait_committed(2)
    local_ray.kill(first.monitor)
    again = make_run()
    asyncio.run(again.coordinator.register_and_monitor(2, is_state_dict=True, state_dict_thread_count=1))
    announced = again.synchronizer.set_model_state_dict.remote(None, 2)
    assert ray.wait([announced], timeout=0.5) == ([], [announced])
    again.coordinator.save_sync(lambda: None, 2, is_state_dict=True)
    ray.get(announced, timeout=LIMIT)


class Told:
    """In a synchronizer's place, notes what it is told."""

    def __init__(self) -> None:
        self._commits: list[Any] = []

    def follow(self, version: Version, location: str) -> None:
        self._commits.append((tuple(version), location))

    def commits(self) -> list[Any]:
        return self._commits


@pytest.mark.all
def test_a_monitor_that_died_at_its_commit_tells_of_it_when_it_is_back(cluster: None, tmp_path: Path) -> None:
    namespace = local_ray.new_name()
    monitor = CheckpointMonitor.get_actor(config(namespace, str(tmp_path), SyncMethod.CHECKPOINT))
    coordinator = CheckpointCoordinator(monitor, timeout_s=LIMIT)
    (step_dir(tmp_path, 2) / "actor").mkdir(parents=True)
    coordinator.save_sync(lambda: None, 2, is_state_dict=True)
    asyncio.run(coordinator.register_and_monitor(2, is_state_dict=True, state_dict_thread_count=1))
    coordinator.wait_committed(2, is_state_dict=True)
    told = ray.remote(Told).options(name="synchronizer", namespace=namespace, num_cpus=0).remote()
    assert ray.get(told.commits.remote(), timeout=LIMIT) == []
    os.kill(monitor.describe()["pid"], signal.SIGKILL)
    until(lambda: ray.get(told.commits.remote(), timeout=LIMIT) == [((0, 2), str(step_dir(tmp_path, 2)))])
    ray.kill(monitor)


def test_announcing_a_save_that_failed_says_why(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.save(2, fails=True)
    with pytest.raises(RunError, match=r"the checkpoint of step 2 failed: .*disk full"):
        run.synchronizer.set_model_state_dict(None, 2)


@pytest.mark.all
def test_a_monitors_calls_are_made_plainly_as_well(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.monitor.describe()["save_strategy"] == "unrestricted"
    assert ray.get(run.monitor.describe.remote(), timeout=LIMIT) == run.monitor.describe()
    assert run.monitor.status(9)["state"] == "unknown"
    with pytest.raises(WaitTimeout, match="checkpoint step 9"):
        run.monitor.wait_committed(9, timeout_s=0.1)


@pytest.mark.all
def test_a_synchronizer_that_is_not_ours_is_told_nothing_and_the_mirror_goes_on(cluster: None, tmp_path: Path) -> None:
    namespace, here, there = local_ray.new_name(), tmp_path / "here", tmp_path / "there"
    theirs = ray.remote(Peer).options(name="synchronizer", namespace=namespace, num_cpus=0).remote()
    monitor = CheckpointMonitor.get_actor(namespace, "unrestricted", str(here), str(there))
    coordinator = CheckpointCoordinator(monitor, timeout_s=LIMIT)
    (step_dir(here, 2) / "actor").mkdir(parents=True)
    coordinator.save_sync(lambda: None, 2, is_state_dict=True)
    asyncio.run(coordinator.register_and_monitor(2, state_dict_thread_count=1))
    coordinator.wait_committed(2)
    assert monitor.wait_mirrored(LIMIT) == {}
    assert step_dir(there, 2).is_dir()
    assert [event for event in monitor.drain_events() if event["event"] == "fault"] == []
    for actor in (monitor, theirs):
        ray.kill(actor)


@pytest.mark.all
def test_a_commit_that_does_not_come_in_time_names_what_is_missing(make_run: Callable[..., Run]) -> None:
    run = make_run()
    asyncio.run(run.coordinator.register_and_monitor(4, is_state_dict=True, state_dict_thread_count=2))
    with pytest.raises(WaitTimeout, match="missing: 2 of 2 counted weights parts"):
        run.coordinator.wait_committed(4, is_state_dict=True, timeout_s=0.1)


# ---- broadcasts


def test_a_broadcasts_version_counts_when_all_are_ready(trinity: Synchronizer) -> None:
    trinity.set_trainer_status("running")
    trinity.set_explorer_status("running")
    explorer = trinity.ready_to_nccl_sync.remote("explorer", 0)
    until(trinity.explorer_requires_sync)
    assert trinity.ready_to_nccl_sync("trainer", 7) == 7
    assert ray.get(explorer, timeout=LIMIT) == 7
    assert trinity.get_latest_model_version() == 7
    trainer = trinity.ready_to_nccl_sync.remote("trainer", 8)
    until(lambda: trinity.trainer_requires_weight_sync() is True)
    assert trinity.ready_to_nccl_sync("explorer", 7) == ray.get(trainer, timeout=LIMIT) == 8
    assert trinity.trainer_requires_weight_sync() is False


def test_an_explorer_that_is_ready_for_a_broadcast_is_counted_once(trinity: Synchronizer) -> None:
    trinity.set_explorer_status("running")
    trinity.ready_to_nccl_sync.remote("explorer", 0)
    until(trinity.explorer_requires_sync)
    assert trinity.get_explorer_status_counts() == {"running": 0, "requires_sync": 1, "stopped": 0}


def test_an_explorer_that_died_has_not_stopped(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    explorer = ray.remote(Maker).options(num_cpus=0).remote()
    synchronizer.setup_weight_sync_group("127.0.0.1", 29500, explorers=1)
    ray.get(explorer.join.remote(synchronizer), timeout=LIMIT)
    explorer.die.remote()
    until(lambda: synchronizer.get_explorer_status_counts()["running"] == 0)
    with pytest.raises(RunError, match="explorer died, so its weight sync group is over"):
        synchronizer.ready_to_nccl_sync("trainer", 7)


def test_a_trainer_that_stops_ends_the_wait_for_a_group(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    waiting = synchronizer.join_weight_sync_group.remote("explorer")
    synchronizer.set_trainer_status("stopped")
    with pytest.raises(RunError, match="the trainer has stopped, and does not set up a weight sync group for explorer"):
        ray.get(waiting, timeout=LIMIT)


def test_nobody_comes_to_a_broadcast_whose_other_side_has_stopped(make_synchronizer: Make) -> None:
    synchronizer = make_synchronizer()
    synchronizer.set_explorer_status("running")
    trainer = synchronizer.ready_to_nccl_sync.remote("trainer", 7)
    until(lambda: synchronizer.trainer_requires_weight_sync() is True)
    synchronizer.set_explorer_status("stopped", "running")
    assert ray.get(trainer, timeout=LIMIT) is None
    explorer = synchronizer.ready_to_nccl_sync.remote("explorer", 7)
    until(synchronizer.explorer_requires_sync)
    synchronizer.set_trainer_status("stopped")
    assert ray.get(explorer, timeout=LIMIT) is None


def test_trinitys_trainer_is_answered_where_no_explorer_comes(trinity: Synchronizer) -> None:
    assert trinity.ready_to_nccl_sync("trainer", 7, timeout_s=0.1) is None
    assert trinity.get_latest_model_version() == -1


class Peer:
    """An actor of the program's own that notes who calls it."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []

    def get_weight_sync_info(self) -> tuple[str, int, list[Any]]:
        return "10.0.0.1", 29500, [("w", "bfloat16", (2,))]

    def setup_weight_sync_group(self, *args: Any) -> None:
        self._calls.append(("enter", *args))

    def set_state_dict_meta(self, meta: list[Any]) -> None:
        self._calls.append(("meta", meta))

    def teardown_weight_sync_group(self) -> None:
        self._calls.append(("leave",))

    def calls(self) -> list[tuple[Any, ...]]:
        return self._calls


def test_trainer_and_explorer_are_led_into_a_group_and_out_of_it(trinity: Synchronizer, namespace: str) -> None:
    with pytest.raises(RunError, match="there is no actor 'trainer' in Ray namespace"):
        trinity.coordinate_weight_sync_setup()
    peers = {
        name: ray.remote(Peer).options(name=name, namespace=namespace, num_cpus=0).remote()
        for name in ("trainer", "explorer")
    }
    trinity.coordinate_weight_sync_setup()
    assert trinity.get_state_dict_meta() == [("w", "bfloat16", (2,))]
    ray.kill(peers["trainer"])
    trinity.coordinate_weight_sync_teardown()
    assert ray.get(peers["explorer"].calls.remote(), timeout=LIMIT) == [
        ("enter", "10.0.0.1", 29500, 2, "rollout_weight_sync", 30.0),
        ("meta", [("w", "bfloat16", (2,))]),
        ("leave",),
    ]


class Failing(Peer):
    """Fails, or dies, when it is to enter the group."""

    def setup_weight_sync_group(self, *args: Any) -> None:
        raise TimeoutError("the store does not answer")


class Dying(Peer):
    def setup_weight_sync_group(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (Failing, "could not answer setup_weight_sync_group: .*the store does not"),
        (Dying, "died before it could answer"),
    ],
)
@pytest.mark.few(1)
def test_one_that_cannot_enter_the_group_is_told(trinity: Synchronizer, namespace: str, peer: type, why: str) -> None:
    peers = [
        ray.remote(peer).options(name=name, namespace=namespace, num_cpus=0).remote()
        for name in ("trainer", "explorer")
    ]
    with pytest.raises(RunError, match=f"^(trainer|explorer) {why}"):
        trinity.coordinate_weight_sync_setup(timeout=LIMIT)
    del peers


# ---- whom it serves


@pytest.mark.all
def test_it_stays_until_the_last_module_is_gone(cluster: None) -> None:
    namespace = local_ray.new_name()
    user = ray.remote(Maker).options(num_cpus=0).remote()
    module = ray.remote(Member).options(num_cpus=0).remote()
    ray.get(user.make.remote(namespace, module), timeout=LIMIT)
    actor = ray.get_actor("synchronizer", namespace=namespace)
    waiting = actor.lifeline.remote()
    user.die.remote()
    assert ray.wait([waiting], timeout=1.0) == ([], [waiting])
    ray.kill(module)
    with pytest.raises(RayActorError):
        ray.get(waiting, timeout=LIMIT)


class Maker:
    """A process that makes a synchronizer."""

    def make(self, namespace: str, module: Any) -> None:
        made = Synchronizer.get_actor(SynchronizerConfig(detached=True), namespace)
        made.add_module(module)
        made.add_module(None)

    def join(self, synchronizer: Synchronizer) -> None:
        synchronizer.set_explorer_status("running")
        synchronizer.join_weight_sync_group("explorer")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_module_that_is_started_again_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_ALIVE_S", 0.0)
    answers = iter([ActorUnavailableError("it is started again", None), RayActorError()])

    async def ready() -> None:
        raise next(answers)

    module: Any = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=ready))
    with pytest.raises(RayActorError):
        asyncio.run(handover._dead(module))
    assert list(answers) == []
