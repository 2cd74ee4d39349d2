"""Room for the slots and the checkpoints of a run, before it starts."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.bad_inputs import make_files, model
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError
from trinity_sync.launch import machine
from trinity_sync.launch.machine import check_room
from trinity_sync.protocol.retention import KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast, Policy, most_at_once

PARAMETERS = 320 * 32
SLOTS = 2 * 2 * PARAMETERS
CHECKPOINT = 3 * 4 * PARAMETERS
"""Weights and two averages in fp32."""


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Free bytes by folder, and a model in the current one."""
    make_files(tmp_path, model())
    monkeypatch.chdir(tmp_path)
    found = {"/dev/shm": 1e9, "run": 1e9, "saved": 1e9}
    monkeypatch.setattr(machine, "_free", lambda folder: found[str(folder)])
    return found


def warnings(*overrides: str) -> list[str]:
    cfg = typed(compose(["model.path=m", "trainer.steps=10", "checkpoint.interval=2", *overrides]))
    return list(check_room(cfg, Path("run"), Path("saved")))


@pytest.mark.parametrize("where", [{"/dev/shm": SLOTS}, {"saved": 4 * CHECKPOINT * machine._TIGHT}])
def test_nothing_is_said_where_there_is_room(free: dict[str, float], where: Mapping[str, float]) -> None:
    free |= where
    assert warnings("retention.policies.keep_last.n=3") == []


def test_slots_that_fit_the_disk_alone_are_a_warning(free: dict[str, float]) -> None:
    free["/dev/shm"] = SLOTS - 1
    (found,) = warnings()
    assert found.startswith("sync.slots=2 need ")
    assert "/dev/shm (sync.shm_dir) has " in found
    assert "--shm-size" in found


def test_states_in_memory_need_room_beside_the_slots(free: dict[str, float]) -> None:
    free["/dev/shm"] = SLOTS + 2 * CHECKPOINT
    assert warnings("checkpoint.memory_interval=1") == []
    free["/dev/shm"] -= 1
    (found,) = warnings("checkpoint.memory_interval=1")
    assert found.startswith("sync.slots=2 need ")
    free["/dev/shm"] = 2 * CHECKPOINT - 1
    with pytest.raises(ConfigError, match=r"^checkpoint\.memory_interval: /dev/shm .* for 2 states of at least "):
        warnings("checkpoint.memory_interval=1")


def test_slots_without_any_room_are_refused(free: dict[str, float]) -> None:
    free |= {"/dev/shm": SLOTS - 1, "run": SLOTS - 1}
    with pytest.raises(ConfigError, match=r"^sync\.slots=2 need .* or lower sync\.slots"):
        warnings()


def test_a_disk_for_fewer_checkpoints_than_retention_keeps_is_a_warning(free: dict[str, float]) -> None:
    free["saved"] = 2 * CHECKPOINT
    assert warnings("retention.policies.keep_last.n=3")[0].startswith("checkpoint.dir: 4 checkpoints")
    assert warnings("retention=keep_all", "trainer.steps=1000000000")[0].startswith("checkpoint.dir: 201 checkpoints")


def test_a_disk_that_cannot_hold_the_first_two_checkpoints_is_refused(free: dict[str, float]) -> None:
    free["saved"] = 2 * CHECKPOINT - 1
    with pytest.raises(ConfigError, match=r"^checkpoint\.dir: 2 checkpoints of at least .* need .*saved has "):
        warnings("retention.policies.keep_last.n=3")


def test_the_checkpoints_of_a_run_that_begins_at_a_later_step_are_those_after_it(free: dict[str, float]) -> None:
    free["saved"] = 1.5 * CHECKPOINT
    cfg = typed(compose(["model.path=m", "trainer.steps=10", "checkpoint.interval=2"]))
    assert list(check_room(cfg, Path("run"), Path("saved"), start=8)) == []


def test_the_slots_of_killed_runs_count_as_free(free: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    free["/dev/shm"] = SLOTS - 1
    monkeypatch.setattr(machine, "remove_stale", lambda root: free.update({root: SLOTS}))
    assert warnings() == []


def test_a_model_of_which_a_part_is_not_trained_is_not_judged(free: dict[str, float]) -> None:
    free |= {"/dev/shm": 0, "run": 0, "saved": 0}
    config = Path("m/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "text_config": {}}))
    assert warnings() == []


@pytest.mark.parametrize("elsewhere", ["cluster.address=10.0.0.1:6379", "model.lora.rank=4"])
def test_the_room_of_other_machines_and_of_adapters_is_not_judged(free: dict[str, float], elsewhere: str) -> None:
    free |= {"/dev/shm": 0, "run": 0, "saved": 0}
    assert warnings(elsewhere) == []


@pytest.mark.parametrize(
    ("policies", "number"),
    [
        ([KeepLast(3)], 4),
        ([KeepLast(20)], 10),
        ([KeepAll()], 10),
        ([KeepEvery(4)], 6),
        ([KeepFor(60.0)], 2),
        ([KeepBest("reward/mean", 2)], 3),
        ([], 2),
    ],
)
def test_one_checkpoint_more_than_stay_is_there_at_a_time(policies: list[Policy], number: int) -> None:
    assert most_at_once(policies, range(2, 22, 2), 1) == number


def test_the_free_bytes_are_those_of_the_nearest_folder(tmp_path: Path) -> None:
    assert machine._free(tmp_path / "not" / "there") > 0


def test_a_file_system_that_does_not_answer_now_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(folder: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("shutil.disk_usage", stale)
    assert machine._free("/") == math.inf
