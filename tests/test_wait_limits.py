"""The limits of waits for bytes: how long they are, what they cover, and what their errors say."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.checkpoint.helpers import commit
from trinity_sync.actors.agent_client import SharedDelta
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.leases import leased
from trinity_sync.errors import ConfigError, WaitLimit, WaitTimeout, grown
from trinity_sync.explorer.actor import _lease_folder
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.protocol.parts import STATE_DICT, PartInfo, VersionBytes
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import base, broadcast_group, deltas, memory, nccl, node_agent
from trinity_sync.sync.base import TrainerSide
from trinity_sync.trainer.steps import LoopSettings, Steps

VERSION = Version(0, 7)
MB = 1_000_000
LIMIT = WaitLimit(60.0, 100.0)


def test_a_limit_grows_by_the_time_of_its_bytes_at_the_slowest_rate() -> None:
    assert grown(LIMIT, 2_000 * MB) == 60.0 + 160.0
    assert grown(LIMIT, 2_000 * MB, more_s=5.0) == 225.0
    assert grown(LIMIT, 0) == LIMIT == 60.0


@pytest.mark.parametrize("constant", [WaitLimit(60.0, None), 60.0])
def test_without_a_rate_it_does_not_grow(constant: float) -> None:
    assert grown(constant, 2_000 * MB) == 60.0


def test_the_slowest_rate_gives_no_limit_that_a_lock_does_not_take() -> None:
    threading.Lock().acquire(timeout=grown(WaitLimit(60.0, 5e-324), 10**15))


def test_an_error_names_the_bytes_and_both_settings() -> None:
    late = WaitTimeout("the agent of node a", "send rank-00003", grown(LIMIT, 2_000 * MB))
    said = (
        "the agent of node a did not send rank-00003 within 220 s "
        "(sync.timeout_s=60, and 2,000.0 MB at sync.min_rate_mbps=100)"
    )
    assert str(late) == said
    assert str(pickle.loads(pickle.dumps(late))) == said  # as it comes from an actor


def test_an_error_says_where_bytes_get_no_time() -> None:
    late = WaitTimeout("explorer-0", "load version 7", grown(WaitLimit(60.0, None), 3 * MB))
    assert str(late).endswith(" within 60 s (sync.timeout_s=60, and no time for 3.0 MB at sync.min_rate_mbps=null)")


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan"), True, "fast"])
def test_a_rate_that_is_none_is_refused_by_name(rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"^sync\.min_rate_mbps is .*above 0, or null$"):
        WaitLimit(60.0, rate)


def test_the_bytes_of_a_version_are_known_for_each_hop() -> None:
    assert VersionBytes.of([("a", 3), ("b", 4), ("a", 2)]) == VersionBytes(whole=9, node=5, part=4)
    assert VersionBytes.of([]) == VersionBytes()


# ---- what each wait covers


def part(name: str, nbytes: int) -> PartInfo:
    return PartInfo(part=name, node="there", path="", nbytes=nbytes, layout="", buckets=None)


class Patient:
    """Answers each call, and notes how long the caller would have waited."""

    def __init__(self, answer: object = None) -> None:
        self.limits: list[float] = []
        self._answer = answer

    def __call__(self, *args: object, **kwargs: object) -> Patient:
        return self

    def __getattr__(self, name: str) -> Patient:
        return self

    def result(self, limit_s: float) -> Any:
        self.limits.append(limit_s)
        return self._answer

    def all(self, ask: object, limit_s: float) -> list[float]:
        return [self.result(limit_s)]


def test_the_wait_for_a_part_is_for_all_that_travel_with_it() -> None:
    agent: Any = Patient(SimpleNamespace(path="slot", errors=()))
    lease: Any = SimpleNamespace(version=VERSION, slot=0, again=False)
    lease.parts = {name: part(name, nbytes * MB) for name, nbytes in (("rank-00000", 2_000), ("rank-00001", 1_000))}
    found = list(memory.parts_here({"here": agent, "there": agent}, "here", lease, LIMIT, lambda error: None))
    assert [info.path for info in found] == ["slot", "slot"]
    assert agent.limits == [60.0 + 240.0] * 2


def test_an_object_of_ray_has_the_time_of_its_part_for_each_of_its_two_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, sent, into = Patient(["shared"]), Patient(SimpleNamespace(data=b"bytes")), Patient()
    monkeypatch.setattr(node_agent, "Call", sent)
    wanted: Any = SimpleNamespace(version=VERSION, slot=0, part="rank-00000", nbytes=2_000 * MB, owner=owner)
    node_agent.ObjectFetcher(LIMIT).bring(wanted, into, print)  # type: ignore[arg-type]
    assert owner.limits == sent.limits == [220.0]


def test_a_delta_has_a_quarter_of_the_constant_and_the_time_of_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Patient(SimpleNamespace(data=b"delta"))
    monkeypatch.setattr(deltas, "Call", sent)
    reference: Any = "reference"
    assert deltas.fetch_delta(SharedDelta(VERSION, 100 * MB, reference), "the agent", LIMIT) == b"delta"
    assert sent.limits == [15.0 + 8.0]


def test_the_wait_for_loads_outlasts_the_hops_of_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("trinity_sync.actors.calls.results", lambda calls, limit_s: waited.append(limit_s) or [])
    whole, silent = 8 * 2_000 * MB, Patient()
    side = TrainerSide(
        synchronizer=silent,  # type: ignore[arg-type]
        agents={},
        ranks=[],
        timeout_s=LIMIT,
        version_bytes=VersionBytes(whole, whole, 2_000 * MB),
    )
    base.deliver_each(side, {"explorer-0": silent}, VERSION)  # type: ignore[dict-item]
    to_the_last_hop = grown(WaitLimit(0.0, 100.0), whole - 2_000 * MB)  # at the slowest rate
    assert waited[0] > to_the_last_hop + grown(LIMIT, 2_000 * MB)


def test_the_waits_of_a_step_are_for_what_they_move() -> None:
    silent = Patient(0.0)
    sizes = VersionBytes(whole=4_000 * MB, node=2_000 * MB, part=1_000 * MB)
    settings: dict[str, Any] = {"steps": 1, "first": 1, "attempt": 0, "mode": "memory", "sync_interval": 1}
    settings |= {"max_staleness": 0, "save_interval": 0, "step_timeout_s": 1.0}
    of_loop = LoopSettings(**settings, sync_timeout_s=LIMIT, version_bytes=sizes)
    steps = Steps(of_loop, trainer=silent, synchronizer=silent, parts=[], log=silent)  # type: ignore[arg-type]
    steps.begin(VERSION)
    steps.copy(VERSION, 0)
    steps.wait_sealed(VERSION)
    assert silent.limits == [60.0 + 640.0 + base.ANSWER_S, 60.0 + 80.0, 60.0 + 240.0 + base.ANSWER_S]


def test_a_folder_is_leased_as_long_as_its_files_take(tmp_path: Path) -> None:
    nbytes = commit(tmp_path, 1, kind=STATE_DICT).bytes
    spec: Any = SimpleNamespace(name="explorer-0", sync_timeout_s=WaitLimit(60.0, 2 * nbytes * 8e-6 / 100))
    with _lease_folder(spec, step_dir(tmp_path, 1), Version(0, 1), lambda: 1000.0):
        assert leased(tmp_path, now=1000.0 + 159.0) == {(1, 0)}
        assert leased(tmp_path, now=1000.0 + 161.0) == set()


# ---- rounds of `sync=nccl`


def round_of(timeout_s: float, store: HashStore, monkeypatch: pytest.MonkeyPatch) -> Broadcast:
    """A round of two senders to one explorer, the first of which sends for 100 s at the slowest rate."""
    monkeypatch.setattr(nccl, "_connect", lambda host, port, limit_s: store)
    monkeypatch.setattr(nccl, "enter", lambda store, rank, size, transport, limit_s: limit_s)
    given: dict[str, Any] = {"id": 1, "version": VERSION, "slot": 0, "host": "", "port": 0, "transport": "gloo"}
    given |= {"senders": ["rank-00000", "rank-00001"], "explorers": ["explorer-0"], "cut": "bucket"}
    return Broadcast(**given, sync_timeout_s=WaitLimit(timeout_s, 1.0), nbytes=[12_500_000, 250_000])


def test_a_sender_waits_while_the_explorer_receives_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = round_of(0.05, HashStore(), monkeypatch)
    met: list[Any] = []
    sender = threading.Thread(target=lambda: met.append(nccl._join(broadcast, 1, 0, 125_000)), daemon=True)
    sender.start()
    time.sleep(0.2)  # the explorer is still at the first part
    nccl._join(broadcast, 1, 1, 125_000)
    sender.join(10.0)
    assert met == [0.05 + 2.0]  # of a broadcast: all pieces are under way at once


def test_a_member_that_does_not_come_to_a_round_is_told_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = round_of(0.05, HashStore(), monkeypatch)
    monkeypatch.setattr(nccl, "grown", lambda limit_s, nbytes: grown(limit_s, nbytes // 1000))
    with pytest.raises(RuntimeError, match=r"not within 0\.15 s \(sync\.timeout_s=0\.05, and .*sync\.min_rate_mbps=1"):
        nccl._join(broadcast, 1, 0, 125_000)


def test_torchs_error_of_a_late_broadcast_names_the_settings_and_any_other_stays() -> None:
    late = grown(WaitLimit(1.0, 100.0), 16 * MB)
    named = r"Timed out waiting 2280ms.*within 2\.28 s \(sync\.timeout_s=1, and 16\.0 MB at sync\.min_rate_mbps=100\)$"
    with pytest.raises(RuntimeError, match=named), broadcast_group.limited(late):
        raise RuntimeError("Timed out waiting 2280ms for recv operation to complete")
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"), broadcast_group.limited(late):
        raise RuntimeError("Connection closed by peer")


def test_a_shorter_limit_says_by_how_much() -> None:
    late = WaitTimeout("the agent", "send a piece", grown(LIMIT, 2 * MB, more_s=-45.0))
    assert "=60, 45 s less, and 2.0 MB at " in str(late)


def test_a_call_for_samples_has_the_time_of_the_load_in_it() -> None:
    pool = object.__new__(ExplorerPool)
    pool._timeout_s = WaitLimit(120.0, 100.0, ("explorer.timeout_s", "sync.min_rate_mbps"))
    pool.introduce({}, version_bytes=1_000 * MB)
    late = WaitTimeout("explorer-0", "generate", pool.work_limit(300.0))
    assert str(late).endswith(
        "within 580 s (explorer.timeout_s=120, 300 s more, and 2,000.0 MB at sync.min_rate_mbps=100)"
    )
