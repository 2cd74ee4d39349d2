"""The group of ranks as verl starts it, with ranks that hold no engine; those that do are tested in tests/e2e."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests import local_ray
from tests.trainer.ranks import PretendWorker
from trinity_sync.actors.calls import Call, MemberDied
from trinity_sync.actors.rank import RankClient
from trinity_sync.trainer.group import TrainerGroup

LIMIT = 60.0

# Starting verl's worker group takes longer than all other tests of this room together.
pytestmark = pytest.mark.all

cluster = local_ray.cluster


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[TrainerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trinity_sync.trainer.worker.TrinityWorker", PretendWorker)
        yield TrainerGroup(
            "spec",  # type: ignore[arg-type]
            process_on_nodes=[2],
            use_gpu=False,
            on_this_node=True,
            start_timeout_s=LIMIT,
        )


def ask(rank: RankClient, method: str, *args: Any, what: str = "add") -> Call[Any]:
    """Begin a call of what only these stand-ins have."""
    return Call(getattr(rank.handle, method).remote(*args), rank.who, what)


def test_results_come_in_rank_order(group: TrainerGroup) -> None:
    assert [(info.rank, info.part) for info in group.initialise()] == [(0, "spec-0"), (1, "spec-1")]
    assert [rank.who for rank in group.ranks] == ["trainer rank 0", "trainer rank 1"]
    assert group.all(lambda rank: ask(rank, "add", 1, 2), LIMIT) == [3, 3]
    assert group.all(lambda rank: ask(rank, "add", *[(1, 2), (3, 4)][rank.rank]), LIMIT) == [3, 7]


def test_ranks_of_this_node_are_told_where_to_meet(group: TrainerGroup) -> None:
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    first, second = group.all(lambda rank: ask(rank, "environment", *names), LIMIT)
    assert first == second
    assert first[0] == "2"


def test_a_rank_that_dies_is_named(group: TrainerGroup) -> None:
    os.kill(group.initialise()[1].pid, signal.SIGKILL)
    with pytest.raises(MemberDied, match=r"^trainer rank 1 died while it was to train step 3$"):
        group.all(lambda rank: ask(rank, "add", 1, 2, what="train step 3"), LIMIT)
