"""A rank's share of a version: the bytes are those of the time of the call, whatever the rank trains meanwhile."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.trainer.test_agent_saver import LIMIT, PART, PretendBackend
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.errors import WaitLimit, WaitTimeout
from trinity_sync.protocol.versions import Version
from trinity_sync.trainer import member as stager_module
from trinity_sync.trainer.member import WeightStager
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.staging import stage

NUMEL = 1000
VERSION = Version(0, 1)


class Engine(PretendBackend):
    def sources(self) -> Mapping[str, torch.Tensor]:
        return dict(self.weights)


class Agent:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.heard = threading.Event()

    def __getattr__(self, method: str) -> Any:
        class Call:
            @staticmethod
            def remote(*args: Any) -> None:
                self.told.append((method, args))
                self.heard.set()

        return Call


class Rank:
    """A stager with all around it. `gate`: a copy begins when it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float = LIMIT, **options: Any) -> None:
        self.engine = Engine(NUMEL, **options)
        self.agent = Agent()
        self.gate = threading.Event()
        layout = PartLayout.build(PART, [whole("weight", "F32", (NUMEL,))], 1 << 20)
        self.segment = mmap.mmap(-1, layout.nbytes)

        def gated(*args: Any) -> None:
            assert self.gate.wait(LIMIT)
            stage(*args)

        monkeypatch.setattr(stager_module, "stage", gated)
        self.stager = WeightStager(
            self.engine,  # type: ignore[arg-type]
            layout,
            {0: self.segment},
            AgentClient(self.agent, "here"),
            PART,
            sync_timeout_s=timeout_s,
        )

    def staged(self) -> torch.Tensor:
        assert self.agent.heard.wait(LIMIT)
        return torch.frombuffer(self.segment, dtype=torch.float32)[:NUMEL]


def test_a_lazy_copy_waits_for_what_the_training_thread_has_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of its stream; the copying thread has a stream of its own."""
    rank, asked, given = Rank(monkeypatch), [], []
    monkeypatch.setattr(stager_module, "enqueued", lambda: asked.append(threading.current_thread()) or "the point")
    monkeypatch.setattr(stager_module, "stage", lambda layout, sources, segment, after: given.append(after))
    rank.stager.stage(VERSION, 0, lazily=True)
    rank.staged()
    assert (asked, given) == ([threading.current_thread()], ["the point"])


def test_a_lazy_copy_holds_the_optimizers_step_and_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.engine.train(1)
    begun = rank.stager.stage(VERSION, 0, lazily=True)
    assert rank.agent.told == []  # the rank goes on meanwhile
    opened = threading.Timer(0.05, rank.gate.set)
    opened.start()
    rank.engine.train(2)
    assert rank.staged().eq(1).all()
    ((method, (version, slot, part, blocked)),) = rank.agent.told
    assert (method, version, slot, part) == ("part_staged", VERSION, 0, PART)
    assert blocked > begun


def test_a_copy_that_ends_in_time_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.gate.set()
    begun = rank.stager.stage(VERSION, 0, lazily=True)
    assert rank.staged().eq(0).all()
    rank.engine.train(1)
    assert rank.agent.told[0][1][-1] == begun


@pytest.mark.parametrize(("lazily", "deadline"), [(False, "optimizer_step"), (True, "now")])
def test_where_it_may_not_be_lazy_all_is_there_when_it_returns(
    monkeypatch: pytest.MonkeyPatch, lazily: bool, deadline: str
) -> None:
    rank = Rank(monkeypatch, deadline=deadline)
    rank.gate.set()
    blocked = rank.stager.stage(VERSION, 0, lazily=lazily)
    assert rank.agent.told == [("part_staged", (VERSION, 0, PART, blocked))]
    rank.engine.train(1)
    assert rank.staged().eq(0).all()


def test_a_copy_that_fails_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.gate.set()
    rank.engine.weights["weight"] = torch.zeros(NUMEL + 1)
    rank.stager.stage(VERSION, 0, lazily=True)
    rank.staged()
    ((method, (version, part, error)),) = rank.agent.told
    assert (method, version, part) == ("part_failed", VERSION, PART)
    assert "the layout has 1000" in error
    rank.engine.train(1)


def test_a_copy_that_does_not_end_is_an_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, timeout_s=0.05)
    rank.stager.stage(VERSION, 0, lazily=True)
    with pytest.raises(WaitTimeout, match=f"^the snapshot did not copy the weights of {PART} within"):
        rank.engine.train(1)
    rank.gate.set()
    rank.staged()


def test_a_copy_may_take_as_long_as_its_bytes_at_the_slowest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, timeout_s=WaitLimit(0.05, 0.001))  # 32 s for 4 kB
    rank.stager.stage(VERSION, 0, lazily=True)
    opened = threading.Timer(0.2, rank.gate.set)
    opened.start()
    rank.engine.train(1)
    assert rank.staged().eq(0).all()
