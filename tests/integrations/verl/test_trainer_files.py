"""What verl's trainer writes itself, at the end of a program, of a monitor in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations.real_engines.ranks import LIMIT
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint.daemon import Lifetime, connect
from trinity_sync.checkpoint.folder.contents import step_dir, write_tracker
from trinity_sync.errors import WaitTimeout
from trinity_sync.integrations.verl import committed_saves
from trinity_sync.integrations.verl.committed_saves import TrainerFiles
from trinity_sync.protocol.parts import FULL

PARTS = ["beside", "beside-data_1.pt"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[MonitorClient]:
    """Of a monitor that awaits what the trainer writes of step 1, and no more."""
    lifetime = Lifetime(first_s=LIMIT, grace_s=0.1)
    handle = connect(tmp_path, program="one", may_start=True, timeout_s=LIMIT, lifetime=lifetime)
    client = MonitorClient(handle)
    client.begin(1, 0, FULL, ["model", *PARTS], {}).result(LIMIT)
    client.notify_finished(1, part="model", attempt=0, files=[]).result(LIMIT)
    step_dir(tmp_path, 1).mkdir()
    yield client
    handle.close()


def of_rank(rank: int, client: MonitorClient, root: Path) -> TrainerFiles:
    made = TrainerFiles(client, 0, root, LIMIT)
    made.begin(1, PARTS, rank)
    return made


def state(client: MonitorClient) -> str:
    return client.status(1).result(LIMIT)["state"]


def test_names_are_of_ranks_whose_trainer_writes_and_of_the_first() -> None:
    assert committed_saves.name_trainer_parts([None, None, "data_0.pt"]) == ["beside", None, "beside-data_0.pt"]


def test_rank_0_tells_of_all_for_the_others_may_be_waiting_for_it(client: MonitorClient, tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 1)
    late = threading.Timer(0.5, lambda: torch.save({"position": 7}, step_dir(tmp_path, 1) / "data_1.pt"))
    late.start()
    of_rank(0, client, tmp_path).settle()
    assert client.wait_committed(1, 0, LIMIT, kind=FULL).result(LIMIT)["step"] == 1


def test_a_file_that_does_not_come_is_left_to_the_monitors_end(
    client: MonitorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_saves, "_OTHERS_S", 0.3)
    write_tracker(tmp_path, FULL, 1)
    told = of_rank(0, client, tmp_path)
    with pytest.raises(WaitTimeout, match=r"verl's trainer did not write what step 1 lacks \(beside-data_1.pt\)"):
        told.settle()
    assert told.is_awaited
    assert state(client) == "open"


def test_for_a_step_that_has_failed_nobody_waits(client: MonitorClient, tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 1)
    told = of_rank(0, client, tmp_path)
    client.fail_step(1, "planted", attempt=0).result(LIMIT)
    write_tracker(tmp_path, FULL, 1)  # which the failure has set back
    told.settle()
    assert not told.is_awaited


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_not_written_fails_the_step(rank: int, client: MonitorClient, tmp_path: Path) -> None:
    of_rank(rank, client, tmp_path).settle()
    assert state(client) == "failed"


def test_a_rank_whose_file_is_whole_tells_of_that(client: MonitorClient, tmp_path: Path) -> None:
    torch.save({"position": 7}, step_dir(tmp_path, 1) / "data_1.pt")
    told = of_rank(1, client, tmp_path)
    told.settle()
    assert client.status(1).result(LIMIT)["awaited"] == ["beside"]
    told.settle()  # there is nothing to tell any more
    of_rank(0, client, tmp_path).went_on()
    assert client.wait_committed(1, 0, LIMIT, kind=FULL).result(LIMIT)["step"] == 1
