"""Whole state dicts through the real synchronizer, and the meeting before a broadcast."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import LocalRayletDiedError, ObjectFetchTimedOutError, OutOfDiskError, OwnerDiedError, RayActorError

from tests import local_ray
from tests.sync.helpers import LIMIT, odd_weights, random_weights
from tests.sync.light import Module
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer, state_dicts
from trinity_sync.weights.tensors import state_digest


def start(synchronizer: Synchronizer | None = None) -> Any:
    return ray.remote(Module).options(num_cpus=0).remote(synchronizer)


def meta_of(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()]


@pytest.fixture(scope="module")
def module(synchronizer: Synchronizer) -> Any:
    """Started early; it has to load torch."""
    return start(synchronizer)


def test_a_version_is_handed_out_with_its_tensors(module: Any, make_synchronizer: Callable[..., Synchronizer]) -> None:
    synchronizer = make_synchronizer()
    assert synchronizer.get_model_state_dict() == (None, -1)
    weights = random_weights(1)
    synchronizer.set_model_state_dict(weights, 3)
    synchronizer.set_model_state_dict(iter(random_weights(2).items()), 4, wire_dtype="BF16")
    found, step = synchronizer.get_model_state_dict(copy=True)
    assert step == 4
    assert found is not None
    assert found["embed.weight"].dtype is torch.bfloat16
    assert state_digest(found, "BF16") == state_digest(random_weights(2), "BF16")
    assert synchronizer.get_state_dict_meta() == meta_of(found)
    assert synchronizer.get_latest_model_version() == synchronizer.wait_new_model_state_dict(3) == 4
    with pytest.raises(RunError, match="version 4 was published with other weights; a version never changes"):
        synchronizer.set_model_state_dict(weights, 4)
    with pytest.raises(RunError, match="the state dict is empty"):
        synchronizer.set_model_state_dict({}, 5)
    synchronizer.set_model_state_dict(weights, 1, attempt=1)
    assert synchronizer.get_model_state_dict()[1] == 1


@pytest.mark.parametrize("names", [None, ["nothing"]])
def test_tensors_of_every_kind_are_handed_out(
    make_synchronizer: Callable[..., Synchronizer], names: list[str] | None
) -> None:
    synchronizer = make_synchronizer()
    weights = {name: tensor for name, tensor in odd_weights().items() if names is None or name in names}
    synchronizer.set_model_state_dict(weights, 1)
    found, step = synchronizer.get_model_state_dict()
    assert (list(found or ()), step) == (list(weights), 1)
    assert synchronizer.get_state_dict_meta() == meta_of(weights)
    for name, tensor in weights.items():
        assert found is not None
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())
    with pytest.raises(RunError, match="has twice twice"):
        synchronizer.set_model_state_dict(iter([("twice", torch.ones(1))] * 2), 2)
    assert synchronizer.get_latest_model_version() == 1


@pytest.mark.all
def test_many_tensors_travel_in_few_objects_and_leave_the_actor_small(
    make_synchronizer: Callable[..., Synchronizer],
) -> None:
    with local_ray.alone():
        synchronizer = make_synchronizer()
    weights = {f"layer.{number}": torch.randn(64, 64) for number in range(600)}
    assert len(state_dicts.put(weights, bucket_bytes=1 << 20).buckets) == 10
    for step in range(3):
        synchronizer.set_model_state_dict(weights, step)
    found, _ = synchronizer.get_model_state_dict()
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    memory = synchronizer.client.memory().result(LIMIT)
    assert memory["torch"] is False
    assert memory["peak_rss"] < 120 * 2**20


def test_a_version_on_disk_is_named_by_its_folder(
    make_synchronizer: Callable[..., Synchronizer], tmp_path: Path
) -> None:
    synchronizer = make_synchronizer(checkpoint_dir=str(tmp_path))
    synchronizer.set_model_state_dict(None, 0)
    assert synchronizer.get_model_state_dict() == (None, 0)
    assert synchronizer.get_latest_model_path() is None
    with pytest.raises(RunError, match=r"version 7 cannot be announced: .*global_step_7 is not a committed checkpoint"):
        synchronizer.set_model_state_dict(None, 7)
    (tmp_path / "global_step_7").mkdir()
    (tmp_path / "global_step_7" / "manifest.json").write_text("{}")
    synchronizer.set_model_state_dict(None, 7)
    assert synchronizer.get_latest_model_path() == f"{tmp_path}/global_step_7/actor"
    synchronizer.set_model_state_dict(None, 8, location="/elsewhere")
    assert (synchronizer.get_model_state_dict(), synchronizer.get_latest_model_path()) == (
        (None, 8),
        "/elsewhere/actor",
    )
    assert synchronizer.get_state_dict_meta() is None


def test_damaged_bytes_are_not_handed_out(make_synchronizer: Callable[..., Synchronizer]) -> None:
    synchronizer = make_synchronizer()
    published, other = (state_dicts.put(random_weights(seed)) for seed in (1, 2))
    ray.get(
        synchronizer.actor.put_state.remote(Version(0, 1), replace(published, buckets=other.buckets)), timeout=LIMIT
    )
    with pytest.raises(RunError, match="bucket 0 of version 1 is damaged"):
        synchronizer.get_model_state_dict()


def test_tensors_that_died_with_their_publisher_give_way_to_the_last_checkpoint(
    synchronizer: Synchronizer, module: Any, make_synchronizer: Callable[..., Synchronizer]
) -> None:
    lonely = make_synchronizer()
    other = start(lonely)
    ray.get([module.publish.remote(20), other.publish.remote(3)], timeout=LIMIT)
    synchronizer.set_model_state_dict(None, 18, location="/run/global_step_18")
    for publisher in (module, other):
        publisher.die.remote()
        with pytest.raises(RayActorError):
            ray.get(publisher.pid.remote(), timeout=LIMIT)
    lost = _when_lost(synchronizer)
    assert "the tensors of version 20 are lost" in lost
    assert "the checkpoint of step 18 in /run/global_step_18 serves from now on" in lost
    assert synchronizer.get_model_state_dict() == (None, 18)
    assert synchronizer.get_latest_model_version() == 18
    assert synchronizer.get_latest_model_path() == "/run/global_step_18/actor"
    assert "no checkpoint is known that could serve" in _when_lost(lonely)
    assert lonely.get_model_state_dict() == (None, -1)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (OwnerDiedError("ab", None, ""), True),
        (ObjectFetchTimedOutError("ab", None, ""), False),
        (LocalRayletDiedError(), False),
        (OutOfDiskError("no room to spill"), False),
    ],
)
def test_what_one_reader_cannot_fetch_is_not_lost_for_all(
    monkeypatch: pytest.MonkeyPatch, error: Exception, lost: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "get", fail)
    stored = state_dicts.StoredState(tensors=[], bucket_bytes=1, digests=[], buckets=[])
    with pytest.raises(RunError, match="the tensors of version 20 ") as raised:
        state_dicts.get(Version(0, 20), stored, LIMIT)
    assert isinstance(raised.value, state_dicts.StateLostError) is lost


def test_a_raylet_that_is_gone_is_the_loss_of_a_process_to_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise OSError("Connection reset by peer")

    monkeypatch.setattr(ray, "get", gone)
    stored = state_dicts.StoredState(tensors=[], bucket_bytes=1, digests=[], buckets=[])
    with pytest.raises(ProcessLoss, match="does not reach Ray's raylet"):
        state_dicts.get(Version(0, 20), stored, LIMIT)


def _when_lost(synchronizer: Synchronizer) -> str:
    """What a reader is told once Ray has noticed the owner's death; until then it may still get the bytes."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            synchronizer.get_model_state_dict()
        except RunError as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError("the tensors were never lost")


# ---- the meeting before a broadcast


def test_a_broadcast_begins_when_all_are_ready(make_synchronizer: Callable[..., Synchronizer]) -> None:
    synchronizer = make_synchronizer()
    meta = [("weight", "torch.bfloat16", (2, 3))]
    synchronizer.setup_weight_sync_group("127.0.0.1", 29500, meta, explorers=2)
    assert synchronizer.get_state_dict_meta() == [("weight", "bfloat16", (2, 3))]
    ranks = [synchronizer.join_weight_sync_group(f"explorer-{number}").rank for number in range(2)]
    assert ranks == [1, 2]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda name=name: found.append(synchronizer.ready_to_nccl_sync(name)))
        for name in ("explorer-0", "explorer-1")
    ]
    for thread in threads:
        thread.start()
    assert synchronizer.ready_to_nccl_sync("trainer", 9) == 9
    for thread in threads:
        thread.join(LIMIT)
    assert found == [9, 9]
    # The label moves after the bytes.
    assert synchronizer.get_latest_model_version() == -1
    synchronizer.notify_nccl_sync_done(9)
    assert synchronizer.get_latest_model_version() == 9
    assert synchronizer.get_model_state_dict() == (None, 9)


def test_a_wait_that_times_out_names_who_is_missing_and_leaves_nothing_behind(
    make_synchronizer: Callable[..., Synchronizer],
) -> None:
    synchronizer = make_synchronizer()
    synchronizer.setup_weight_sync_group("127.0.0.1", 29500, explorers=1)
    synchronizer.join_weight_sync_group("explorer-0")
    expected = r"1 of 1 explorer\(s\) \(explorer-0\) did not come to the broadcast that trainer is ready for"
    with pytest.raises(WaitTimeout, match=expected):
        synchronizer.ready_to_nccl_sync("trainer", 3, timeout_s=0.1)
    with pytest.raises(WaitTimeout, match="the trainer did not come"):
        synchronizer.ready_to_nccl_sync("explorer-0", timeout_s=0.1)


def test_a_dead_explorer_ends_the_wait_of_the_others(make_synchronizer: Callable[..., Synchronizer]) -> None:
    synchronizer = make_synchronizer()
    explorer = start(synchronizer)
    synchronizer.setup_weight_sync_group("127.0.0.1", 29500, explorers=2)
    ray.get(explorer.join_group.remote("explorer-1"), timeout=LIMIT)
    os.kill(ray.get(explorer.pid.remote(), timeout=LIMIT), signal.SIGKILL)
    with pytest.raises(RunError, match="explorer-1 died, so its weight sync group is over"):
        synchronizer.ready_to_nccl_sync("trainer", 3, timeout_s=LIMIT)


@pytest.mark.all
def test_an_explorer_that_is_started_again_meets_the_trainer_and_the_one_before_it_does_not(
    make_synchronizer: Callable[..., Synchronizer],
) -> None:
    """The old one hangs, and nobody knows; then it goes on, and then it dies."""
    synchronizer = make_synchronizer()
    old, new = start(synchronizer), start(synchronizer)
    synchronizer.setup_weight_sync_group("127.0.0.1", 29500, explorers=1)
    assert ray.get(old.join_group.remote("explorer-0"), timeout=LIMIT) == 1
    ray.get([old.is_running.remote(), new.is_running.remote()], timeout=LIMIT)
    again = new.join_group.remote("explorer-0")
    with pytest.raises(RunError, match="explorer-0 was restarted, so its weight sync group is over"):
        synchronizer.ready_to_nccl_sync("trainer", 3, timeout_s=LIMIT)
    synchronizer.setup_weight_sync_group("127.0.0.1", 29501, explorers=1)
    assert ray.get(again, timeout=LIMIT) == 2
    with pytest.raises(RunError, match="explorer-0 belongs to a weight sync group that is over"):
        ray.get(old.ready.remote("explorer-0"), timeout=LIMIT)
    with pytest.raises(RunError, match="this explorer-0 is dead or was restarted"):
        ray.get(old.join_group.remote("explorer-0"), timeout=LIMIT)
    assert synchronizer.get_explorer_status_counts()["running"] == 2
    os.kill(ray.get(old.pid.remote(), timeout=LIMIT), signal.SIGKILL)
    deadline = time.monotonic() + LIMIT
    while synchronizer.get_explorer_status_counts()["running"] != 1:
        assert time.monotonic() < deadline, "a dead explorer is still counted"
        time.sleep(0.05)
    waiting = new.ready.remote("explorer-0")
    assert synchronizer.ready_to_nccl_sync("trainer", 4, timeout_s=LIMIT) == 4
    assert ray.get(waiting, timeout=LIMIT) == 4


# ---- its end


def test_the_actor_ends_with_the_last_that_it_serves(cluster: None) -> None:
    namespace = "a-run-that-ends"
    with local_ray.alone():
        first, second = start(), start()
    ray.get(first.make.remote(namespace), timeout=LIMIT)
    ray.get(second.join.remote(namespace), timeout=LIMIT)
    actor = ray.get_actor("synchronizer", namespace=namespace)
    first.die.remote()
    with pytest.raises(RayActorError):
        ray.get(first.pid.remote(), timeout=LIMIT)
    assert ray.get(actor.memory.remote(), timeout=LIMIT)["torch"] is False
    waiting = actor.lifeline.remote()
    second.die.remote()
    with pytest.raises(RayActorError):
        ray.get(waiting, timeout=LIMIT)


def test_nothing_heavy_is_loaded_by_the_actors_modules() -> None:
    import subprocess

    program = "import sys, trinity_sync.sync.synchronizer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
