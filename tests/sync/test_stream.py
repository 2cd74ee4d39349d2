"""Parameters over a process group: sender and receivers as threads, each with a group of its own."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.sync.helpers import odd_weights, random_weights
from trinity_sync.errors import RunError
from trinity_sync.sync.broadcast_group import BroadcastGroup, make_group
from trinity_sync.sync.nccl import GroupTransfer
from trinity_sync.sync.stream import _broadcast, broadcast, describe, receive
from trinity_sync.weights.apply import ChecksumError

LIMIT = 20.0
RECEIVERS = 2

_numbers = itertools.count()


def exchange(send: Callable[[Any], None], take: Callable[[Any], Any]) -> list[Any]:
    """Run a sender and the receivers; what each of them returned or raised, the sender first."""
    store, number = dist.HashStore(), next(_numbers)
    found: list[Any] = [None] * (1 + RECEIVERS)

    def member(rank: int) -> None:
        try:
            prefixed = dist.PrefixStore(f"group-{number}", store)
            group = make_group(prefixed, rank, 1 + RECEIVERS, "gloo", LIMIT)
            found[rank] = send(group) if rank == 0 else take(group)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(1 + RECEIVERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    return found


def taken(group: Any, meta: Any, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in receive(group, meta, timeout_s=LIMIT, **options)}


def same(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(weights) and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
def test_buckets_arrive(bucket_bytes: int, verify: bool) -> None:
    weights = random_weights(1)
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "verify": verify}
    _, *received = exchange(
        lambda group: broadcast(group, weights.items(), packed=True, timeout_s=LIMIT, **options),
        lambda group: taken(group, describe(weights.items()), packed=True, **options),
    )
    assert all(same(found, weights) for found in received)


@pytest.mark.parametrize("options", [{"packed": True, "bucket_bytes": 1}, {"packed": True}, {"packed": False}])
def test_tensors_of_every_kind_arrive(options: dict[str, Any]) -> None:
    weights = odd_weights()
    _, *received = exchange(
        lambda group: broadcast(group, weights.items(), timeout_s=LIMIT, **options),
        lambda group: taken(group, describe(weights.items()), **options),
    )
    cast = {name: tensor.float() for name, tensor in weights.items()}
    assert all(same({name: tensor.float() for name, tensor in found.items()}, cast) for found in received)


def test_parameters_arrive_one_by_one_in_wire_dtype() -> None:
    weights = random_weights(2)
    cast = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    meta = describe(weights.items(), "BF16")
    _, *received = exchange(
        lambda group: broadcast(group, weights.items(), wire_dtype="BF16", timeout_s=LIMIT),
        lambda group: taken(group, meta),
    )
    assert all(same(found, cast) for found in received)


def test_a_peers_receiver_takes_the_stream_of_parameters() -> None:
    """It makes an empty tensor of each announced dtype and shape, and broadcasts into it from rank 0."""
    weights = random_weights(3)

    def peer(group: Any) -> dict[str, torch.Tensor]:
        found = {}
        for name, dtype, shape in describe(weights.items()):
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype.split(".")[-1]))
            options = dist.BroadcastOptions()
            options.rootRank = 0
            group.broadcast([found[name]], options).wait()
        return found

    _, *received = exchange(lambda group: broadcast(group, weights.items(), timeout_s=LIMIT), peer)
    assert all(same(found, weights) for found in received)


def test_a_bucket_that_was_damaged_on_the_way_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(4)
    monkeypatch.setattr("trinity_sync.sync.stream.xxh3_128_digest", lambda data: bytes(16))
    _, *received = exchange(
        lambda group: broadcast(group, weights.items(), packed=True, timeout_s=LIMIT),
        lambda group: taken(group, describe(weights.items()), packed=True),
    )
    assert all(isinstance(error, ChecksumError) for error in received)


def test_a_sender_that_ends_early_is_an_error_within_the_limit() -> None:
    weights = random_weights(5)

    def send_one(group: Any) -> None:
        broadcast(group, list(weights.items())[:1], timeout_s=LIMIT)

    def take(group: Any) -> Any:
        return {name: tensor for name, tensor in receive(group, describe(weights.items()), timeout_s=1.0)}

    _, *received = exchange(send_one, take)
    assert all(isinstance(error, RunError) and "could not be broadcast within 1 s" in str(error) for error in received)


def test_between_gpus_a_broadcast_that_does_not_end_is_an_error_within_the_limit() -> None:
    """NCCL's, which needs two GPUs, in the place of which stands what it does: without a limit it returns at once."""

    def ended(timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError(f"not within {timeout}")

    group: Any = SimpleNamespace(broadcast=lambda *_: SimpleNamespace(wait=ended))
    sender = BroadcastGroup(group, torch.device("cuda", 0), 2.0)
    with pytest.raises(RunError, match=r"weight could not be broadcast within 2 s: not within 0:00:02"):
        _broadcast(sender, torch.empty(0), "weight")


def test_members_begin_once_all_have_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has all its tensors and leaves would break off the connections that a slower one is making."""
    entered, make = [], dist.ProcessGroupGloo

    def slow(store: Any, rank: int, *rest: Any) -> Any:
        group = make(store, rank, *rest)
        time.sleep(0.2 * (rank == RECEIVERS))
        entered.append(rank)
        return group

    monkeypatch.setattr(dist, "ProcessGroupGloo", slow)
    found = exchange(lambda group: len(entered), lambda group: len(entered))
    assert found == [1 + RECEIVERS] * (1 + RECEIVERS)


def test_a_receiver_leaves_after_a_sender_that_is_gone() -> None:
    """With the sender goes the store at which they have met."""
    transfer, spoke = GroupTransfer("gloo", LIMIT), Mock(sender="trainer rank 0")
    sender = transfer.sender("127.0.0.1")
    connecting = threading.Thread(target=sender.connect, args=(Mock(), 1))
    connecting.start()
    receiver = transfer.receiver(spoke, sender.meeting, 0, 1)
    connecting.join(LIMIT)
    sender.close(failed=False)
    time.sleep(0.1)
    receiver.close(failed=False)


def test_members_find_at_once_that_another_one_has_died_before_it_had_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    make = dist.ProcessGroupGloo

    def dying(store: Any, rank: int, *rest: Any) -> Any:
        group = make(store, rank, *rest)
        if rank == RECEIVERS:
            del group
            raise OSError("killed")
        return group

    monkeypatch.setattr(dist, "ProcessGroupGloo", dying)
    began = time.monotonic()
    found = exchange(lambda group: None, lambda group: None)
    assert all(isinstance(one, error) for one, error in zip(found, (RuntimeError, RuntimeError, OSError), strict=True))
    assert time.monotonic() - began < LIMIT / 2
