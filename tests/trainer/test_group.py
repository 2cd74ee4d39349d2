"""The group of ranks, with ranks that hold no engine; those that do are tested in tests/e2e."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests import local_ray
from tests.trainer.ranks import PretendSpec, PretendWorker
from trinity_sync.actors.calls import Call, DeathError
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.errors import WaitTimeout
from trinity_sync.trainer.group import TrainerGroup

LIMIT = 60.0

cluster = local_ray.cluster


@pytest.fixture(scope="module")
def group(cluster: None) -> TrainerGroup:
    return make_group(2)


def make_group(ranks: int, limit_s: float = LIMIT) -> TrainerGroup:
    spec: Any = PretendSpec("spec")
    return TrainerGroup(spec, process_on_nodes=[ranks], use_gpu=False, start_timeout_s=limit_s, worker=PretendWorker)


def ask(rank: RankClient, method: str, *args: Any, what: str = "add") -> Call[Any]:
    """Begin a call of what only these stand-ins have."""
    return Call(getattr(rank.handle, method).remote(*args), rank.who, what)


def test_results_come_in_rank_order(group: TrainerGroup) -> None:
    assert [(info.rank, info.part) for info in group.initialise()] == [(0, "spec-0"), (1, "spec-1")]
    assert [rank.who for rank in group.ranks] == ["trainer rank 0", "trainer rank 1"]
    assert group.all(lambda rank: ask(rank, "add", 1, 2), LIMIT) == [3, 3]
    assert group.all(lambda rank: ask(rank, "add", *[(1, 2), (3, 4)][rank.rank]), LIMIT) == [3, 7]


def test_ranks_are_told_what_verl_looks_for(group: TrainerGroup) -> None:
    names = ("RANK", "WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "WG_BACKEND", "WG_PREFIX")
    first, second = group.all(lambda rank: ask(rank, "environment", *names), LIMIT)
    assert (first[:4], second[:4]) == (["0", "2", "2", "ray"], ["1", "2", "2", "ray"])
    assert first[4] == second[4]
    other = make_group(1)
    other.initialise()
    assert other.all(lambda rank: ask(rank, "environment", "WG_PREFIX"), LIMIT) != [[first[4]]]


def test_ranks_for_which_there_is_no_room_are_not_waited_for_without_end(cluster: None) -> None:
    with pytest.raises(WaitTimeout, match=r"^Ray did not find a node with a processor for each of 5000 trainer ranks"):
        make_group(5000, limit_s=0.5)


def test_the_driver_needs_no_engine() -> None:
    """Neither for what starts a run nor for what drives it."""
    code = (
        "import sys\n"
        "from trinity_sync.launch import actors, job, launcher\n"
        "from trinity_sync.explorer import pool, rollout\n"
        "from trinity_sync.trainer import free_loop, group, loop, full_saves\n"
        "from trinity_sync.sync import checkpoint, memory, nccl, synchronizer\n"
        "print(*({'torch', 'verl', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert done.stdout.split() == []


def test_a_rank_that_dies_is_named(group: TrainerGroup) -> None:
    os.kill(group.initialise()[1].pid, signal.SIGKILL)
    with pytest.raises(DeathError, match=r"^trainer rank 1 died before it could train step 3 \(Worker .+\)$"):
        group.all(lambda rank: ask(rank, "add", 1, 2, what="train step 3"), LIMIT)
