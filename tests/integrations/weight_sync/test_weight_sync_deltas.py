"""Versions that travel as deltas between the members of a weight sync, over the version before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.integrations.weight_sync.sync_members import BUCKET, Members, Named
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl.weight_sync.checkpoint_engine import WeightSync
from trinity_sync.sync.stream import BucketBase
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.packing import layouts
from trinity_sync.weights.tensors import state_digest

State = dict[str, torch.Tensor]


def trained(step: int) -> State:
    """Weights of which each step changes a few elements; each tensor has a bucket."""
    made = torch.Generator().manual_seed(0)
    state: State = {name: torch.randn(80, 40, generator=made).bfloat16() for name in ("a", "b", "c")}
    state |= {"half": torch.randn(60, 30, generator=made), "steps": torch.arange(9)}
    for number in range(step):
        for tensor in state.values():
            tensor.view(-1)[3 + number] += 1
    return state


def moved(members: Members, step: int) -> int:
    """Move a version, compare it at every receiver, and return the bytes that travelled to each."""
    members.meet()
    metrics, _, *received = members.move(trained(step), step)
    for found in received:
        assert state_digest(found, None) == state_digest(trained(step), None)
    members.finalize()
    return int(metrics["weight_sync/bytes"])


@pytest.fixture
def members(make: Callable[..., Members]) -> Members:
    return make("nccl", encoding="delta")


def test_what_has_changed_travels_over_the_version_before(members: Members) -> None:
    full, *later = [moved(members, step) for step in (1, 2, 5)]
    assert full >= sum(one.nbytes for one in trained(1).values())
    assert all(0 < one < full / 4 for one in later)


def test_members_that_lost_the_version_before_get_all_of_the_next_one(members: Members) -> None:
    full = moved(members, 1)
    members.rollout[1] = WeightSync(BUCKET, mode="nccl", timeout_s=20.0, encoding="delta")
    assert moved(members, 2) == full
    assert moved(members, 3) < full / 4
    members.ranks[0] = WeightSync(BUCKET, is_master=True, mode="nccl", timeout_s=20.0, encoding="delta")
    assert moved(members, 4) == full


def test_members_that_hold_different_versions_get_all_of_the_next_one(members: Members) -> None:
    full = moved(members, 1)
    members.rollout[1]._held = "another"
    assert moved(members, 2) == full


def test_members_without_deltas_send_all_of_each_version(make: Callable[..., Members]) -> None:
    members = make("nccl")
    assert moved(members, 1) == moved(members, 2)


def test_after_a_version_that_failed_the_next_one_travels_in_full(members: Members) -> None:
    full = moved(members, 1)

    def failing() -> Iterator[Named]:
        yield from list(trained(2).items())[:3]
        raise RuntimeError("the gather failed")

    members.meet()
    sender, *_ = members.move(trained(2), 2, failing())
    assert "the gather failed" in str(sender)
    assert moved(members, 3) == full
    assert moved(members, 4) < full / 4


def test_tensors_of_other_shapes_travel_in_full(members: Members) -> None:
    moved(members, 1)
    members.meet()
    state = trained(2) | {"a": torch.ones(90, 40)}
    _, _, *received = members.move(state, 2)
    for found in received:
        assert state_digest(found, None) == state_digest(state, None)


def test_what_is_received_stays_when_a_delta_follows(members: Members) -> None:
    members.meet()
    _, _, first, _ = members.move(trained(1), 1)
    members.meet()
    _, _, second, _ = members.move(trained(2), 2)
    members.meet()
    members.move(trained(3), 3)
    assert state_digest(first, None) == state_digest(trained(1), None)
    assert state_digest(second, None) == state_digest(trained(2), None)


@pytest.mark.parametrize("damage", ["sender", "receiver"])
@pytest.mark.few(1)
def test_a_copy_that_was_damaged_ends_the_sync_and_the_next_one_travels_in_full(members: Members, damage: str) -> None:
    full = moved(members, 1)
    engine = members.ranks[0] if damage == "sender" else members.rollout[0]
    engine._bases[0]._kept[0].data[0] ^= 1
    members.meet()
    sender, _, receiver, _ = members.move(trained(2), 2)
    assert isinstance(sender, RunError)
    assert isinstance(receiver, RunError)
    assert moved(members, 3) == full


def test_a_delta_over_a_bucket_that_is_not_here_is_refused() -> None:
    [layout] = layouts([("a", "torch.bfloat16", (4, 4))], BUCKET)
    with pytest.raises(DeltaError, match="over a bucket that is not here"):
        BucketBase().apply(0, layout, torch.zeros(3, dtype=torch.uint8))


def test_a_delta_over_a_bucket_of_other_tensors_is_refused() -> None:
    [layout], [other] = (layouts([(name, "torch.bfloat16", (4, 4))], BUCKET) for name in ("a", "b"))
    base = BucketBase()
    base.keep(0, other, torch.zeros(other.nbytes, dtype=torch.uint8))
    with pytest.raises(DeltaError, match="over a bucket that is not here"):
        base.apply(0, layout, torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("mode", ["memory", "checkpoint"])
def test_deltas_are_for_the_mode_that_has_a_network(mode: str) -> None:
    given: dict[str, Any] = {"mode": mode, "encoding": "delta"} | ({"dir": "/v"} if mode == "checkpoint" else {})
    with pytest.raises(ConfigError, match=f"encoding=delta has no effect with mode={mode}"):
        WeightSync(BUCKET, **given)
