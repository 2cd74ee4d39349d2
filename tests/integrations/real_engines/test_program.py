"""What names a program to its checkpoint monitor, and where that listens. A rank is a group of its own here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch.distributed as dist

from tests.integrations.real_engines.ranks import LIMIT
from trinity_sync.checkpoint.daemon import connect
from trinity_sync.checkpoint.folder.lock import has_no_monitor
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import local_run
from trinity_sync.integrations.verl.local_run import RunMonitor, this_program


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests of this process are of a cluster
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def others(monkeypatch: pytest.MonkeyPatch, *said: tuple[str, str, str, str | None]) -> None:
    """Let there be other ranks: their words, machines, hosts and jobs, rank 0 first; this one is the last."""
    monkeypatch.setattr(local_run, "together", lambda what, work: [*said, work()])


def test_a_group_on_one_machine_has_one_word_and_a_loopback(group: None) -> None:
    one = this_program()
    assert one == this_program()
    assert len(one.word) == 32
    assert one.address == "127.0.0.1"


def test_the_word_is_that_of_rank_0(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, ("drawn elsewhere", local_run._machine(), "here", None))
    assert this_program().word == "drawn elsewhere"


def test_a_rank_that_uses_ray_for_something_of_its_own_is_in_the_group_still(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    others(monkeypatch, ("drawn elsewhere", local_run._machine(), "here", "a job"))
    assert this_program().word == "drawn elsewhere"


def test_a_process_of_no_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match="belongs to no program"):
        this_program()


class Routes:
    """Stands for a socket that looks which way packets would go."""

    def __init__(self, ways: dict[str, str]) -> None:
        self._ways = ways

    def __call__(self, *args: object) -> Routes:
        return self

    def __enter__(self) -> Routes:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def connect(self, place: tuple[str, int]) -> None:
        if place[0] not in self._ways:
            raise OSError("Network is unreachable")
        self._from = self._ways[place[0]]

    def getsockname(self) -> tuple[str, int]:
        return self._from, 0


def test_a_group_on_several_machines_listens_where_they_get_to(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master's name may be this machine's own, by a loopback; then what the others are reached from counts."""
    others(monkeypatch, ("word", "another machine", "203.0.113.9", None))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "socket", Routes({"127.0.0.1": "127.0.0.1", "203.0.113.9": "203.0.113.1"}))
    assert this_program().address == "203.0.113.1"
    monkeypatch.setattr(socket, "socket", Routes({"127.0.0.1": "127.0.0.1"}))
    with pytest.raises(
        RunError, match=r"no address is known at which 127\.0\.0\.1, 203\.0\.113\.9 reach .* MASTER_ADDR"
    ):
        this_program()


def test_under_ray_the_job_is_the_program(ranks: list[Any]) -> None:
    found = ray.get([rank.program.remote() for rank in ranks], timeout=LIMIT)
    context = ray.get_runtime_context()
    assert {one.word for one in found} == {f"{context.get_session_name()}-{context.get_job_id()}"}
    assert this_program() in found  # the driver, which is in no group
    assert {one.address for one in found} == {ray.util.get_node_ip_address()}


def test_the_ranks_of_a_program_open_a_folder_by_themselves(ranks: list[Any], tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for found in ends(ranks, "join_run", str(root), 7):
        with pytest.raises(RunError, match=r"rank 0: .*global_step_7 is not a committed full checkpoint"):
            ray.get(found, timeout=LIMIT / 2)
    joined = ray.get(ends(ranks, "join_run", str(root), 0), timeout=LIMIT)
    assert len(set(joined)) == 1
    ray.get(ends(ranks, "leave_run"), timeout=LIMIT)
    assert has_no_monitor(root, LIMIT)
    assert {attempt for _, attempt in joined} == {0}


def test_a_checkpoint_folder_that_the_ranks_do_not_share_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other ranks would look for the monitor of rank 0 until their timeout."""
    from trinity_sync.integrations.verl import local_run

    def connect(root: Path, **given: Any) -> str:
        root.mkdir(exist_ok=True)
        return "handle"

    def run(rank: int, root: Path, seen: str) -> list[str]:
        done = []

        def together(what: str, work: Any) -> list[Any]:
            done.append(what)
            return [work() if rank == 0 else [seen, work()][0]]

        monkeypatch.setattr(local_run, "together", together)
        monkeypatch.setattr(local_run.dist, "get_rank", lambda: rank)
        local_run.join_run(root, resume_step=0, timeout_s=LIMIT)
        return done

    monkeypatch.setattr(local_run, "this_program", lambda: SimpleNamespace(word="program", address=""))
    monkeypatch.setattr(local_run, "connect", connect)
    monkeypatch.setattr(local_run.RunMonitor, "of", lambda handle, timeout_s: handle)
    monkeypatch.setattr(local_run, "_SHARED_S", 0.2)
    root = tmp_path / "checkpoints"
    assert run(0, root, "")[-1] == "find the checkpoint monitor"
    assert list(root.iterdir()) == []
    (root / ".shared-1").touch()
    assert run(1, root, ".shared-1")[-1] == "find the checkpoint monitor"
    with pytest.raises(ConfigError, match=f"{tmp_path}/other on .* is not the checkpoint folder of rank 0"):
        run(1, tmp_path / "other", ".shared-1")
    monkeypatch.setattr(Path, "unlink", refused)
    assert run(0, root, "")[-1] == "find the checkpoint monitor", "the other ranks wait for it"


def refused(path: Path, **given: Any) -> None:
    raise OSError(5, "a disk that does not answer")


def ends(ranks: list[Any], method: str, *args: object) -> list[Any]:
    return [getattr(rank, method).remote(*args) for rank in ranks]


def test_a_manager_is_told_the_same_of_either_monitor(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "ray", roles=("actor",))
    of_ray = RunMonitor.in_namespace(run.namespace, LIMIT)
    handle = connect(tmp_path / "local", program="one", may_start=True, timeout_s=LIMIT)
    local = RunMonitor.of(handle, LIMIT)
    assert (of_ray.root, local.root) == (tmp_path / "ray", tmp_path / "local")
    assert (of_ray.attempt, of_ray.durable, list(of_ray.roles)) == (local.attempt, local.durable, ["actor"])
    assert list(local.roles) == []
    for monitor in (of_ray, local):
        assert monitor.client.status(1).result(LIMIT)["state"] == "unknown"
    handle.close()
    with pytest.raises(RunError, match="there is no 'checkpoint_monitor' in Ray namespace 'nowhere'"):
        RunMonitor.in_namespace("nowhere", LIMIT)


def test_a_folder_that_was_loaded_by_another_path_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the checkpoint that was loaded would be set aside as one of another start."""
    from trinity_sync.integrations.verl import local_run

    told = {}
    monkeypatch.setattr(local_run, "join_run", lambda root, **given: told.update(given, root=root))
    (tmp_path / "root/global_step_4/actor").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    monkeypatch.chdir(tmp_path)
    local_run.open_monitor("root/global_step_6/actor", str(tmp_path / "link/global_step_4/actor"), 1.0)
    assert (told["root"], told["resume_step"]) == (tmp_path / "root", 4)
    local_run.open_monitor("root/global_step_6", str(tmp_path / "other/global_step_4"), 1.0)
    assert told["resume_step"] == 0
    local_run.open_monitor("root/global_step_6", None, 1.0)
    assert told["resume_step"] == 0
    with pytest.raises(ConfigError, match="in no folder global_step_N"):
        local_run.open_monitor("root/somewhere", None, 1.0)
