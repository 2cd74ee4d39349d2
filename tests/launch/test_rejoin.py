"""A run of an existing cluster that goes on: how long it waits for a lost node, and with how many explorers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests import local_ray
from tests.launch.test_actors import setup
from trinity_sync.config import compose, typed
from trinity_sync.errors import WaitTimeout
from trinity_sync.explorer import pool
from trinity_sync.launch import actors as module
from trinity_sync.launch import launcher
from trinity_sync.launch.actors import Actors
from trinity_sync.launch.cluster import room_for
from trinity_sync.launch.healing import RestartPolicy
from trinity_sync.trainer import group

CPUS = 4
"""Of the Ray of all tests."""
EACH = {"CPU": 1.0}

cluster = local_ray.cluster


def test_room_for_all_is_found_at_once_and_given_back(cluster: None) -> None:
    began = time.monotonic()
    assert [room_for(CPUS, EACH, 60.0) for _ in range(2)] == [CPUS, CPUS]
    assert time.monotonic() - began < 30.0


def test_at_the_limit_there_is_room_for_some(cluster: None) -> None:
    assert room_for(CPUS + 2, EACH, 3.0) == CPUS


def test_what_has_no_room_does_not_keep_later_ones_from_theirs(cluster: None) -> None:
    assert room_for(1, {"CPU": CPUS + 1.0}, 1.0) == 0
    assert room_for(CPUS, EACH, 60.0) == CPUS


def test_room_that_comes_back_in_time_is_found(cluster: None) -> None:
    @ray.remote(num_cpus=1)
    class Holder:
        def here(self) -> bool:
            return True

    holder = Holder.remote()
    ray.get(holder.here.remote(), timeout=60)
    timer = threading.Timer(2.0, ray.kill, [holder])
    timer.start()
    try:
        assert room_for(CPUS, EACH, 60.0) == CPUS
    finally:
        timer.join()


@pytest.mark.parametrize(
    "wait",
    [lambda: room_for(CPUS + 1, EACH, 60.0), lambda: group._reserve([CPUS + 1], False, 60.0)],
    ids=["explorers", "ranks"],
)
def test_a_signal_during_the_wait_ends_it_at_once(cluster: None, wait: Callable[[], object]) -> None:
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert time.monotonic() - began < 20.0
    timer.join()


def test_ranks_without_room_are_waited_for_until_the_limit(cluster: None) -> None:
    with pytest.raises(WaitTimeout, match="a processor for each of 5 trainer ranks"):
        group._reserve([CPUS + 1], False, 1.0)


EXISTING = ("cluster=existing", "cluster.address=10.0.0.1:6379", "backend.ranks=2", "explorer.replicas=3")

ALL = ["explorer-0", "explorer-1", "explorer-2"]


class Attempt:
    """The start of an attempt, as far as the number of its explorers, in a cluster that has room for `found`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: int) -> None:
        self.asked: list[tuple[int, dict[str, float], float]] = []
        self.phases: list[str] = []
        self.faults: list[tuple[str, str]] = []
        self._tmp_path, self._found = tmp_path, found
        monkeypatch.setattr(module, "room_for", self._room_for)

    def _room_for(self, *asked: Any) -> int:
        self.asked.append(asked)
        return self._found

    def explorers(
        self,
        *settings: str,
        heals: bool = True,
        use_gpu: bool = False,
        processes: int = 1,
        servers: Sequence[str] = (),
    ) -> Sequence[str]:
        spec: Any = SimpleNamespace(processes=processes, servers=servers)
        recorder: Any = SimpleNamespace(
            attempt=1, phase=self.phases.append, fault=lambda where, error: self.faults.append((where, error))
        )
        cfg = typed(compose(list(settings or EXISTING)))
        of_run = replace(setup(self._tmp_path, "m"), cfg=cfg, recorder=recorder, use_gpu=use_gpu, heals=heals)
        return Actors(of_run)._explorers_with_room(spec)


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return lambda found: Attempt(monkeypatch, tmp_path, found)


def test_a_first_attempt_and_a_ray_of_the_run_s_own_do_not_wait(attempt: Any) -> None:
    tried = attempt(0)
    assert tried.explorers(heals=False) == ALL
    assert tried.explorers("explorer.replicas=3") == ALL
    assert (tried.asked, tried.phases) == ([], [])


def test_an_attempt_that_heals_waits_for_room_for_all_explorers(attempt: Any) -> None:
    tried = attempt(3)
    assert tried.explorers(*EXISTING, "cluster.rejoin_s=45") == ALL
    assert tried.asked == [(3, {"CPU": 1.0}, 45.0)]
    assert tried.phases == ["waiting at most 45 s for room for 3 explorers (cluster.rejoin_s)"]
    assert tried.faults == []


def test_processes_of_the_ended_attempt_have_time_to_free_theirs(attempt: Any) -> None:
    tried = attempt(3)
    tried.explorers(*EXISTING, "cluster.rejoin_s=0")
    assert [limit_s for _, _, limit_s in tried.asked] == [10.0]


def test_fewer_explorers_are_a_fault_that_says_what_is_missing(attempt: Any) -> None:
    tried = attempt(1)
    assert tried.explorers() == ["explorer-0"]
    told = (
        "it has room for 1 of 3 explorers after 60 s (cluster.rejoin_s): 3 of 5 processors that the run needs. The run "
        "goes on with 1 explorer; if it has to go on once more, it asks for all again"
    )
    assert tried.faults == [("the cluster", told)]


def test_gpus_of_explorers_are_asked_for_and_told(attempt: Any) -> None:
    tried = attempt(2)
    assert tried.explorers(use_gpu=True, processes=4) == ALL[:2]
    assert [bundle for _, bundle, _ in tried.asked] == [{"CPU": 1.0, "GPU": 4.0}]
    ((_, told),) = tried.faults
    assert "4 of 5 processors and 10 of 14 GPUs that the run needs" in told


def test_without_room_for_any_the_start_waits_for_one(attempt: Any) -> None:
    tried = attempt(0)
    assert tried.explorers() == ["explorer-0"]
    ((_, told),) = tried.faults
    assert "goes on with 1 explorer once it has room, within cluster.start_timeout_s=300;" in told


@pytest.mark.parametrize("there", [[0, 2], [2], []])
def test_explorers_of_servers_are_those_whose_server_s_node_is_there(
    attempt: Any, monkeypatch: pytest.MonkeyPatch, there: Sequence[int]
) -> None:
    servers = [f"http://10.0.0.{number}:8000" for number in range(3)]
    monkeypatch.setattr(pool, "has_node", lambda url: servers.index(url) in there)
    monkeypatch.setattr(module, "comes_true", lambda condition, limit_s, poll_s: condition())
    tried = attempt(0)
    if not there:
        with pytest.raises(WaitTimeout, match=r"did not have a node with a server of explorer\.url within 60 s"):
            tried.explorers(servers=servers)
        return
    assert tried.explorers(servers=servers) == [ALL[number] for number in there]
    ((_, told),) = tried.faults
    assert f"it has room for {len(there)} of 3 explorers" in told
    assert f"the nodes of {len(there)} of 3 servers that the run needs" in told
    assert tried.asked == [], "explorers of servers take no processors"


def test_a_run_on_gpus_does_not_go_on_without_them_where_their_nodes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, healing = typed(compose(list(EXISTING))), RestartPolicy(3, 100.0, 25.0)
    used = []
    for there in (True, False):
        monkeypatch.setattr(launcher, "has_gpus", lambda address, there=there: there)
        used.append(launcher._uses_gpu(cfg, healing))
        healing.gpus_per_node = 8
    assert used == [True, True]
    assert not launcher._uses_gpu(cfg, None), "another program begins with what there is"
