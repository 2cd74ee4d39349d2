"""The files of a rank's state, written beside training by its node's agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.actors.agent_client import StatePart
from trinity_sync.errors import WaitTimeout
from trinity_sync.host.durable import digest_file
from trinity_sync.sync.node_agent import StateSlots
from trinity_sync.weights import shard_file
from trinity_sync.weights.slots import map_segment

LIMIT = 60.0
PART = "rank-00000"
PIECE = shard_file.PIECE_BYTES
LENGTH = 3 * PIECE + 100

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no class that yields")


class Coordinator:
    """Lets everybody write at once."""

    def __init__(self) -> None:
        self.reported: list[Any] = []

    def save_sync(self, save_fn: Callable[[], Any], step: int, **_: Any) -> None:
        self.reported += save_fn()


class Writes:
    """Every write to the disk: by which class of thread. The first one waits until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policies: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        real = os.write

        def observed(descriptor: int, data: memoryview) -> int:
            self.policies.append(os.sched_getscheduler(0))
            self.begun.set()
            assert self.go_on.wait(LIMIT)
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", observed)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[StateSlots]:
    root = tmp_path / "shm"
    root.mkdir()
    made = StateSlots("run", str(root), tmp_path / "fallback", timeout_s=LIMIT)
    yield made
    made.close()


def begin(slots: StateSlots, folder: Path, coordinator: Coordinator) -> bytes:
    """Hand a state over; returns what is to be in its file."""
    state = os.urandom(LENGTH)
    path, _ = slots.reserve(PART, LENGTH)
    map_segment(path, LENGTH, writable=True)[:] = state
    (folder / "model.pt").write_bytes(b"head" + bytes(LENGTH) + b"tail")
    slots.take(
        StatePart(part=PART, step=7, folder=str(folder), files=[("model.pt", [(4, 0, LENGTH)])]),
        coordinator,
        durable=True,
    )
    return b"head" + state + b"tail"


def test_a_state_is_written_by_a_thread_that_yields(
    slots: StateSlots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, coordinator = Writes(monkeypatch), Coordinator()
    writes.go_on.set()
    whole = begin(slots, tmp_path, coordinator)
    slots.wait_written(PART, LIMIT, hurry=False)
    assert writes.policies == [os.SCHED_IDLE] * 4
    assert (tmp_path / "model.pt").read_bytes() == whole
    assert coordinator.reported == [("model.pt", *digest_file(tmp_path / "model.pt"))]
    assert [path.name for path in tmp_path.glob("model*")] == ["model.pt"]


@pytest.mark.parametrize("hurry", [True, False])
def test_it_yields_no_more_when_training_waits_for_it(
    slots: StateSlots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    writes, coordinator = Writes(monkeypatch), Coordinator()
    whole = begin(slots, tmp_path, coordinator)
    assert writes.begun.wait(LIMIT)
    with pytest.raises(WaitTimeout, match=f"the node agent did not write {PART}"):
        slots.wait_written(PART, 0.01, hurry=hurry)
    writes.go_on.set()
    slots.wait_written(PART, LIMIT, hurry=False)
    mine = os.sched_getscheduler(0)
    assert writes.policies == [os.SCHED_IDLE, *[mine if hurry else os.SCHED_IDLE] * 3]
    assert (tmp_path / "model.pt").read_bytes() == whole
