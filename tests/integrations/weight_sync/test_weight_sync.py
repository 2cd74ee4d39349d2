"""The weight sync without verl's manager: all members in this process, each in a thread of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.weight_sync import sync_members
from tests.integrations.weight_sync.sync_members import (
    BUCKET,
    LIMIT,
    MODES,
    Members,
    Named,
    left_in,
    receive,
    send,
    shared_memory,
    weights,
)
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.integrations.verl.weight_sync import checkpoint_engine
from trinity_sync.integrations.verl.weight_sync.checkpoint_engine import ShardedWeightSync, WeightSync
from trinity_sync.integrations.verl.weight_sync.membership import MemberReady, Node, WeightSyncSettings, place
from trinity_sync.sync import memory, stream
from trinity_sync.sync.links import BucketNotice
from trinity_sync.weights.apply import ChecksumError
from trinity_sync.weights.tensors import state_digest


@pytest.mark.parametrize("mode", MODES)
def test_versions_move_and_nothing_is_held_between_them(
    mode: str, make: Callable[..., Members], tmp_path: Path
) -> None:
    members = make(mode)
    for step in (1, 2, 3):
        state = weights(step)
        members.meet()
        metrics, nothing, *received = members.move(state, step)
        assert nothing is None
        expected = state_digest(state, None)
        for found in received:
            assert list(found) == list(state)
            assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
                name: (one.dtype, one.shape) for name, one in state.items()
            }
            assert state_digest(found, None) == expected
        assert metrics["weight_sync/digest_48bit"] == int(expected[:12], 16)
        assert metrics["weight_sync/tensors"] == len(state)
        assert metrics["weight_sync/buckets"] > 2
        assert metrics["weight_sync/receivers"] == 2
        assert metrics[f"weight_sync/mode_{mode}"] == 1
        assert metrics["weight_sync/bytes"] >= sum(one.nbytes for one in state.values())
        assert all(isinstance(value, int | float) for value in metrics.values())
        for member in (members.ranks[0], *members.rollout):
            last = member.last_version()
            assert last is not None
            assert (last["step"], last["digest"]) == (step, expected)
        members.finalize()
        assert shared_memory() == []
        assert [name.split("-")[0] for name in left_in(tmp_path / "versions")] == (
            [f"version_{step}"] if mode == "checkpoint" else []
        )


def odd(number: int) -> dict[str, torch.Tensor]:
    """Tensors of which each is of another kind, and whose dtypes and shapes differ from version to version."""
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    shared = torch.arange(64 + number).to(dtype)
    made = torch.Generator().manual_seed(number)
    return {
        "columns": torch.randn(30 + number, 20, generator=made)
        .to(dtype)
        .t(),  # larger than a bucket, and not contiguous
        "nothing": torch.empty(0, 3, dtype=dtype),  # a bucket of its own, without a byte
        "shared": shared,
        "tied": shared,
        "part": shared[3:-1:2],
        "expanded": torch.ones(1, dtype=dtype).expand(5, 4),
        "flags": torch.tensor([True, False]),
        "fp8": torch.randn(6, generator=made).to(torch.float8_e4m3fn),
        f"only in {number}": torch.tensor(number),
        "large": torch.randn(400, generator=made).to(dtype),
        "last": torch.empty(0, dtype=dtype),
    }


@pytest.mark.parametrize("mode", MODES)
def test_versions_of_all_kinds_of_tensors_move(mode: str, make: Callable[..., Members]) -> None:
    members = make(mode)
    for step in (1, 2, 3):
        members.meet()
        _, _, *received = members.move(odd(step), step)
        for found in received:
            assert not isinstance(found, BaseException), found
            assert list(found) == list(odd(step))
            assert state_digest(found, None) == state_digest(odd(step), None)
            assert all(tensor.is_contiguous() for tensor in found.values())


def test_the_wire_dtype_is_of_floating_tensors(make: Callable[..., Members]) -> None:
    members = make("memory", wire_dtype="BF16", receivers=1)
    members.meet()
    *_, found = members.move(weights(1), 1)
    assert found["embed"].dtype == torch.bfloat16
    assert found["steps"].dtype == torch.int64
    assert torch.equal(found["embed"], weights(1)["embed"].bfloat16())


def test_what_is_received_stays_when_the_next_version_comes(make: Callable[..., Members]) -> None:
    for mode in MODES:
        members = make(mode, receivers=1)
        members.meet()
        *_, first = members.move(weights(1), 1)
        members.finalize()
        members.meet()
        members.move(weights(2), 2)
        first["embed"].add_(0)  # and may be written to
        assert state_digest(first, None) == state_digest(weights(1), None)


def test_files_of_a_committed_version_are_of_any_reader(make: Callable[..., Members], tmp_path: Path) -> None:
    members = make("checkpoint")
    members.meet()
    members.move(weights(1), 7)
    (folder,) = (tmp_path / "versions").glob("version_7-*")
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("bucket-*.safetensors")):
        found |= load_file(path)
    assert torch.equal(found["embed"], weights(1)["embed"].reshape(-1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", ["full", "bucket"])
@pytest.mark.few(2)
def test_a_damaged_bucket_is_never_part_of_a_whole_version(
    mode: str, verify: str, make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    members = make(mode, receivers=1, verify=verify)
    members.meet()
    handed: list[str] = []
    real = stream.Stream._take

    def damaged(self: stream.Stream, bucket: Any) -> None:
        if bucket.number == 2:
            taken = self._receiver.take

            def other(bucket: Any, into: torch.Tensor) -> None:
                taken(bucket, into)
                into[-1] ^= 1

            monkeypatch.setattr(self._receiver, "take", other)
        real(self, bucket)

    monkeypatch.setattr(stream.Stream, "_take", damaged)
    monkeypatch.setattr(sync_members, "receive", lambda one, step, _use=receive: _use(one, step, handed.append))
    sender, nothing, receiver = members.move(weights(1), 1)
    assert isinstance(receiver, ChecksumError)
    assert "bucket 2 of trainer rank 0" in str(receiver)
    assert isinstance(sender, RunError)
    assert "rollout worker 0" in str(sender)
    assert "bucket 2" in str(sender)
    assert nothing is None
    assert 0 < len(handed) < len(weights(1))
    assert shared_memory() == []
    assert left_in(tmp_path / "versions") == []
    monkeypatch.undo()
    members.meet()
    *_, found = members.move(weights(2), 2)
    assert state_digest(found, None) == state_digest(weights(2), None)


def test_the_last_tensor_comes_after_the_digest_of_the_version(
    make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = make("memory", receivers=1)
    members.meet()
    handed: list[str] = []
    finish = stream.Stream._finish
    monkeypatch.setattr(stream.Stream, "_finish", lambda self, end: finish(self, replace(end, digest="0" * 32)))
    monkeypatch.setattr(sync_members, "receive", lambda one, step, _use=receive: _use(one, step, handed.append))
    state = weights(1) | {"beside it": torch.zeros(3), "last": torch.zeros(3)}  # in one bucket
    sender, _, receiver = members.move(state, 1)
    assert isinstance(receiver, ChecksumError)
    assert isinstance(sender, RunError)
    assert "beside it" in handed
    assert "last" not in handed


def test_a_receiver_tells_what_the_sender_failed_of(
    make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes to the sender's memory only when that is gone."""
    members = make("memory", receivers=1)
    members.meet()

    def failing() -> Iterator[Named]:
        yield from list(weights(1).items())[:3]
        raise RuntimeError("Connection closed by peer")

    sending = members.pool.submit(send, members.ranks[0], failing(), 1)
    real = memory.RoomReceiver.take

    def late(self: memory.RoomReceiver, bucket: BucketNotice, into: torch.Tensor) -> None:
        sending.exception(LIMIT)
        real(self, bucket, into)

    monkeypatch.setattr(memory.RoomReceiver, "take", late)
    with pytest.raises(RunError, match=r"trainer rank 0 .* gave the weights up: .*Connection closed by peer"):
        receive(members.rollout[0], 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_gather_ends_it_for_all_and_the_next_version_moves(
    mode: str, make: Callable[..., Members], tmp_path: Path
) -> None:
    members = make(mode)

    def failing() -> Iterator[Named]:
        yield from list(weights(1).items())[:3]
        raise RuntimeError("Connection closed by peer")

    members.meet()
    sender, nothing, *received = members.move(weights(1), 1, failing())
    assert isinstance(sender, RunError)
    assert "tensor 3 of the weights of step 1 could not be gathered" in str(sender)
    assert nothing is None
    for one in received:
        assert isinstance(one, RunError)
        assert "trainer rank 0" in str(one)
        assert "Connection closed by peer" in str(one)
    assert shared_memory() == []
    assert left_in(tmp_path / "versions") == []
    members.meet()
    *_, found = members.move(weights(2), 2)
    assert state_digest(found, None) == state_digest(weights(2), None)


@pytest.mark.parametrize("mode", MODES)
def test_all_weights_are_gathered_also_when_a_receiver_stops(mode: str, make: Callable[..., Members]) -> None:
    members = make(mode, receivers=1)
    gathered: list[str] = []

    def all_of_them() -> Iterator[Named]:
        for name, tensor in weights(1).items():
            gathered.append(name)
            yield name, tensor

    def stop(name: str) -> None:
        raise ValueError("no room on the device")

    members.meet()
    sending = members.pool.submit(send, members.ranks[0], all_of_them(), 1)
    with pytest.raises(ValueError, match="no room"):
        receive(members.rollout[0], 1, stop)
    error = sending.exception(2 * LIMIT)
    assert isinstance(error, RunError)
    assert "rollout worker 0" in str(error)
    assert gathered == list(weights(1))


def test_every_wait_for_a_member_ends_and_says_for_whom(make: Callable[..., Members]) -> None:
    members = make("memory", receivers=1, timeout_s=0.5)
    everybody = [*members.ranks, *members.rollout]
    places = WeightSync.build_topology(2, 1, [member.prepare() for member in everybody])
    late = r"rollout worker 0 \(pid \d+ on .*\) did not connect .* within 0\.5\d* s \(timeout_s=0\.5, and"
    with pytest.raises(WaitTimeout, match=late):
        members.ranks[0].init_process_group(place=places[0]["place"][0])
    with pytest.raises(RunError, match=r"trainer rank 0 .* cannot be reached"):
        members.rollout[0].init_process_group(place=places[1]["place"][0])

    members.meet()
    with pytest.raises(WaitTimeout, match=r"trainer rank 0 .* did not send bucket 0 of the weights within 0\.5"):
        receive(members.rollout[0], 1)

    members.meet()
    with pytest.raises(
        WaitTimeout, match=r"rollout worker 0 .* did not take bucket 0 of the weights within .* min_rate_mbps=100\)$"
    ):
        send(members.ranks[0], iter(weights(1).items()), 1)

    release = threading.Event()

    def hanging() -> Iterator[Named]:
        yield "a", torch.zeros(1)
        release.wait(LIMIT)

    members.meet()
    with pytest.raises(
        WaitTimeout, match=r"the trainer's ranks did not gather tensor 1 of the weights of step 4 within"
    ):
        send(members.ranks[0], hanging(), 4)
    with pytest.raises(RunError, match=r"still hangs"):
        members.ranks[0].prepare()
    release.set()


def test_a_version_is_sent_only_after_a_meeting(make: Callable[..., Members]) -> None:
    members = make("memory")
    with pytest.raises(RunError, match="init_process_group comes before"):
        send(members.ranks[0], iter(()), 1)
    members.meet()
    sender, _, receiver, _ = members.move({}, 1)
    assert "no weights to send" in str(sender)
    assert "no weights to send" in str(receiver)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"mod": "nccl"},
            r"engine_kwargs\.trinity\.mod=nccl: there is no such key \(did you mean mode\?\); the keys are mode,",
        ),
        ({"mode": "shm"}, "trinity.mode=shm: expected one of memory, nccl, checkpoint"),
        ({"timeout_s": "60"}, "trinity.timeout_s=60: expected seconds"),
        ({"timeout_s": 0}, "timeout_s=0: expected seconds, above 0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: expected seconds"),
        ({"min_rate_mbps": 0}, "min_rate_mbps=0: expected a number of Mbit/s above 0, or null"),
        ({"min_rate_mbps": float("inf")}, "min_rate_mbps=inf: expected a number of Mbit/s"),
        ({"bucket_mb": 0.5}, "bucket_mb=0.5: expected a whole number of MiB"),
        ({"bucket_mb": True}, "bucket_mb=True: expected a whole number of MiB"),
        ({"wire_dtype": "bfloat16"}, "wire_dtype=bfloat16: expected one of null, BF16"),
        ({"wire_dtype": "I8"}, "wire_dtype=I8: expected one of null, BF16"),
        ({"verify": "off"}, "verify=off: expected one of full, bucket"),
        ({"mode": "checkpoint"}, "trinity.dir is needed for mode=checkpoint"),
        ({"mode": "checkpoint", "dir": "versions"}, "dir=versions: expected an absolute path"),
        ({"dir": "/versions"}, "dir=/versions has no effect with mode=memory"),
        ({"transport": "gloo"}, "transport=gloo has no effect with mode=memory"),
    ],
)
def test_a_wrong_key_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        WeightSync(BUCKET, **given)


def ready(**other: Any) -> MemberReady:
    return MemberReady(
        **{"node": Node("one", "boot", 1), "pid": 1, "settings": WeightSyncSettings(), "address": ("h", 1, b"")} | other
    )


def test_members_that_do_not_go_together_are_told_apart() -> None:
    with pytest.raises(
        RunError, match=r"rollout worker 1 \(pid 1 on two\) shares no memory with trainer rank 0 .* nccl"
    ):
        place([ready()], [ready(), ready(node=Node("two", "other", 1))], all_send=False)
    with pytest.raises(RunError, match="different containers"):
        place([ready()], [ready(node=Node("one", "boot", 2))], all_send=False)
    apart = WeightSyncSettings(mode="nccl")
    of_ranks, _ = place(
        [ready(settings=apart), ready(settings=apart)],
        [ready(settings=apart, node=Node("two", "x", 1))],
        all_send=False,
    )
    assert [one.role for one in of_ranks] == ["sender", "gatherer"]
    with pytest.raises(RunError, match="must be equal"):
        place([ready()], [ready(settings=apart)], all_send=False)
    with pytest.raises(RunError, match=r"trainer rank 0 .* was not made as the trainer's first rank"):
        place([ready(address=None)], [ready()], all_send=False)
    with pytest.raises(RunError, match="from 1 trainer ranks to 0 receivers"):
        place([ready()], [], all_send=False)


def test_the_backend_is_registered_and_the_other_name_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    known: dict[str, type] = {checkpoint_engine.NO_GATHER: int}
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", known)
    monkeypatch.delenv(checkpoint_engine.NO_GATHER_VARIABLE, raising=False)
    checkpoint_engine.register()
    checkpoint_engine.register()
    assert known == {"trinity": WeightSync, "delta_sharded": int}
    monkeypatch.setenv(checkpoint_engine.NO_GATHER_VARIABLE, "1")
    checkpoint_engine.register()
    assert known["delta_sharded"] is ShardedWeightSync
    monkeypatch.setenv(checkpoint_engine.NO_GATHER_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="TRINITY_SYNC_NO_GATHER=yes"):
        checkpoint_engine.register()


HOOKED = """
import sys
from unittest.mock import MagicMock

from trinity_sync.integrations.verl import plugin, weight_sync

assert "torch" not in sys.modules and "verl" not in sys.modules
sys.modules["cupy"] = MagicMock()  # which verl's own engine needs, and is there with GPUs only

from verl.checkpoint_engine import CheckpointEngineRegistry

print({name: found.__name__ for name, found in CheckpointEngineRegistry._registry.items()})
"""


@pytest.mark.all
@pytest.mark.parametrize(("asked", "takes"), [("1", "ShardedWeightSync"), ("0", "DeltaShardedCheckpointEngine")])
def test_the_name_is_ours_also_where_verl_registers_its_own_later(asked: str, takes: str) -> None:
    variables = {**os.environ, checkpoint_engine.NO_GATHER_VARIABLE: asked}
    found = subprocess.run(
        [sys.executable, "-c", HOOKED], env=variables, check=True, capture_output=True, text=True, timeout=120
    )
    assert f"'delta_sharded': '{takes}'" in found.stdout
    assert "'trinity': 'WeightSync'" in found.stdout
