"""Rounds over gloo between processes: who gets the version when somebody dies, hangs or comes late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch

from tests.sync.helpers import LIMIT, PretendTrainer, empty, node_id, random_weights
from tests.sync.members import Receiver, Sender
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import ExplorerClient, LoadReport
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer, nccl
from trinity_sync.sync.base import LayoutCache, TrainerSide
from trinity_sync.sync.broadcast_group import BroadcastGroup
from trinity_sync.sync.nccl import NcclPublisher, NcclTransport
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole

SHAPES = {"embed.weight": (300, 64), "layers.0.mlp.weight": (64, 100), "layers.0.norm.weight": (64,), "scale": ()}
MEMBERS = {name: RoundMember.new(name) for name in ("explorer-0", "explorer-1")}


def weights(seed: int) -> dict[str, torch.Tensor]:
    return random_weights(seed, SHAPES)


def ask(explorer: ExplorerClient, method: str, *args: Any) -> Any:
    """Call what only these stand-ins have."""
    return ray.get(getattr(explorer.handle, method).remote(*args), timeout=LIMIT)


@pytest.fixture(scope="module")
def trainer(synchronizer: Synchronizer, make_agent: Callable[..., AgentClient]) -> PretendTrainer:
    """Its parts are large enough for deltas to pay."""
    agents = {node_id(): make_agent(synchronizer.client)}
    return PretendTrainer(synchronizer.client, agents, weights=weights(0), bucket_bytes=4096)


@pytest.fixture(scope="module")
def ranks(trainer: PretendTrainer) -> list[RankClient]:
    """Two senders."""

    def start(part: str, layout: PartLayout) -> Any:
        paths = {slot: path for (slot, name), path in trainer.paths.items() if name == part}
        return ray.remote(Sender).options(num_cpus=0).remote(layout, paths)

    return [RankClient(start(part, layout), rank) for rank, (part, layout) in enumerate(trainer.layouts.items())]


@pytest.fixture(scope="module")
def explorers(trainer: PretendTrainer, ranks: list[RankClient]) -> dict[str, ExplorerClient]:
    """Two: one casts what it receives, the other receives it where it belongs. The last test kills the second."""

    def start(name: str, dtype: torch.dtype) -> ExplorerClient:
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in empty(weights(0)).items()}
        arguments = (MEMBERS[name], trainer.synchronizer, trainer.agents, tensors)
        return ExplorerClient(ray.remote(Receiver).options(num_cpus=0).remote(*arguments), name)

    found = {"explorer-0": start("explorer-0", torch.float32), "explorer-1": start("explorer-1", torch.bfloat16)}
    ray.get([client.handle.pid.remote() for client in (*ranks, *found.values())], timeout=LIMIT)
    return found


@pytest.fixture
def stopped(explorers: dict[str, ExplorerClient]) -> Iterator[int]:
    """The process of explorer-1, which a test may stop; it goes on afterwards."""
    pid = ask(explorers["explorer-1"], "pid")
    yield pid
    os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def mode(trainer: PretendTrainer, ranks: list[RankClient]) -> NcclPublisher:
    return mode_of(trainer, ranks)


def mode_of(trainer: PretendTrainer, ranks: list[RankClient], timeout_s: float = LIMIT) -> NcclPublisher:
    side = TrainerSide(synchronizer=trainer.synchronizer, agents=trainer.agents, ranks=ranks, timeout_s=timeout_s)
    return NcclPublisher(side, "gloo")


def test_every_explorer_gets_every_ranks_part(
    trainer: PretendTrainer, mode: NcclPublisher, explorers: dict[str, ExplorerClient]
) -> None:
    for seed in (1, 2):
        sealed = trainer.seal(weights(seed))
        mode.publish(sealed)
        delivery = mode.deliver(explorers, sealed.version)
        assert delivery.lost == {}
        assert [report.explorer for report in delivery.reports] == list(explorers)
        for report in delivery.reports:
            assert (report.version, report.digest) == (sealed.version, sealed.digest)
            shards = [shard.nbytes for layout in trainer.layouts.values() for shard in layout.shards]
            assert sum(shards) <= report.bytes_moved <= sum(info.nbytes for info in sealed.parts.values())


def test_who_comes_late_gets_a_round_of_its_own(
    trainer: PretendTrainer, mode: NcclPublisher, explorers: dict[str, ExplorerClient]
) -> None:
    sealed = trainer.seal(weights(3))
    mode.publish(sealed)
    for name, explorer in explorers.items():
        (report,) = mode.deliver({name: explorer}, sealed.version).reports
        assert (report.explorer, report.digest) == (name, sealed.digest)


@pytest.mark.parametrize("when", ["before the round", "in the round"])
@pytest.mark.few(1)
def test_an_explorer_that_hangs_is_named_and_holds_nobody_up_for_longer_than_the_limit(
    trainer: PretendTrainer,
    ranks: list[RankClient],
    explorers: dict[str, ExplorerClient],
    stopped: int,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinity_sync.actors.calls._GRACE_S", 0.5)
    mode = mode_of(trainer, ranks, timeout_s=2.0)
    sealed = trainer.seal(weights(7))
    mode.publish(sealed)
    if when == "before the round":
        os.kill(stopped, signal.SIGSTOP)
    else:
        ask(explorers["explorer-1"], "signal_itself", signal.SIGSTOP)
    with pytest.raises(RunError, match=rf"exchange version {sealed.version}") as caught:
        mode.deliver(explorers, sealed.version)
    assert "explorer-1" in str(caught.value)

    os.kill(stopped, signal.SIGCONT)
    again = mode_of(trainer, ranks)
    again.publish(sealed := trainer.seal(weights(8)))
    reports = again.deliver(explorers, sealed.version).reports
    assert [report.digest for report in reports] == [sealed.digest] * 2


def test_a_slot_that_was_damaged_is_told_and_the_next_version_arrives(
    trainer: PretendTrainer, mode: NcclPublisher, explorers: dict[str, ExplorerClient]
) -> None:
    sealed = trainer.seal(weights(9))
    [start] = [start for name, _, _, start, _ in trainer.layouts["rank-00001"].table if name == "layers.0.mlp.weight"]
    trainer.damage(sealed, "rank-00001", start)
    mode.publish(sealed)
    with pytest.raises(RunError, match=r"^explorer-\d cannot load .*damaged: layers.0.mlp.weight$"):
        mode.deliver(explorers, sealed.version)
    assert [ask(explorer, "held") for explorer in explorers.values()] == [None, None]
    mode.publish(sealed := trainer.seal(weights(10)))
    assert [report.digest for report in mode.deliver(explorers, sealed.version).reports] == [sealed.digest] * 2


def test_an_explorer_that_gives_up_with_buckets_on_their_way_holds_nobody_up(
    trainer: PretendTrainer, mode: NcclPublisher, explorers: dict[str, ExplorerClient]
) -> None:
    ask(explorers["explorer-1"], "take_for_damaged")
    mode.publish(sealed := trainer.seal(weights(17)))
    began = time.monotonic()
    with pytest.raises(RunError, match="the first bucket arrived damaged"):
        mode.deliver(explorers, sealed.version)
    mode.publish(sealed := trainer.seal(weights(18)))
    assert [report.digest for report in mode.deliver(explorers, sealed.version).reports] == [sealed.digest] * 2
    assert time.monotonic() - began < LIMIT / 2, "somebody waited for the limit of a round"


def test_a_round_is_led_for_the_version_that_the_ranks_have_staged_only(
    trainer: PretendTrainer, mode: NcclPublisher, explorers: dict[str, ExplorerClient]
) -> None:
    older, newer = trainer.seal(weights(11)), None
    mode.publish(older)
    newer = trainer.seal(weights(12))
    mode.publish(newer)
    with pytest.raises(RunError, match=rf"^version {older.version} was not published last"):
        mode.deliver(explorers, older.version)


def test_a_load_without_a_broadcast_is_refused(trainer: PretendTrainer, explorers: dict[str, ExplorerClient]) -> None:
    version = trainer.publish(weights(13)).version
    with pytest.raises(RunError, match=rf"to load version {version}, but was not asked to any broadcast$"):
        explorers["explorer-0"].load(version).result(LIMIT)


# ---- deltas


class Following:
    """A trainer that broadcasts deltas to explorers."""

    def __init__(self, trainer: PretendTrainer, ranks: list[RankClient], explorers: dict[str, ExplorerClient]) -> None:
        self.trainer, self.explorers, self.weights = trainer, explorers, weights(20)
        self._ranks = ranks
        self.publisher = self.publisher_of(LIMIT)

    def publisher_of(self, timeout_s: float, codec: str = "auto", **nodes: str) -> NcclPublisher:
        """`nodes`: of explorers; deltas are for those elsewhere then."""
        given = {"synchronizer": self.trainer.synchronizer, "agents": self.trainer.agents, "ranks": self._ranks}
        side = TrainerSide(**given, timeout_s=timeout_s, explorer_nodes=lambda: nodes)
        return NcclPublisher(side, "gloo", SimpleNamespace(codec=codec), always=not nodes)

    def publish(self, share: float = 0.01) -> SealedVersion:
        """Publish a version with a share of new elements."""
        for name, tensor in self.weights.items():
            changed = torch.rand(tensor.shape) < share
            self.weights[name] = torch.where(changed, tensor + tensor.abs() / 64 + 1, tensor).to(tensor.dtype)
        sealed = self.trainer.seal(self.weights)
        self.publisher.publish(sealed)
        return sealed

    def deliver(self, sealed: SealedVersion, *names: str) -> list[LoadReport]:
        """Deliver a version to explorers, all where none are named."""
        chosen = {name: self.explorers[name] for name in names or self.explorers}
        reports = self.publisher.deliver(chosen, sealed.version).reports
        assert {(report.explorer, report.digest) for report in reports} == {(name, sealed.digest) for name in chosen}
        return reports

    def is_delta(self, report: LoadReport) -> bool:
        return report.bytes_moved < sum(layout.nbytes for layout in self.trainer.layouts.values()) / 2


@pytest.fixture
def following(trainer: PretendTrainer, ranks: list[RankClient], explorers: dict[str, ExplorerClient]) -> Following:
    return Following(trainer, ranks, explorers)


def test_what_has_changed_is_broadcast_after_the_first_version(following: Following) -> None:
    sent = [[following.is_delta(report) for report in following.deliver(following.publish())] for _ in range(3)]
    assert sent == [[False, False], [True, True], [True, True]]


def test_explorers_that_hold_different_versions_get_deltas_of_their_own(following: Following) -> None:
    following.deliver(following.publish())
    following.deliver(following.publish(), "explorer-0")
    assert [following.is_delta(report) for report in following.deliver(following.publish())] == [True, True]


@pytest.mark.parametrize("beside", ["both", "one"])
def test_explorers_beside_the_trainer_get_whole_versions_where_deltas_are_for_others(
    following: Following, beside: str
) -> None:
    here = {info.node for info in following.publish().parts.values()}.pop()
    places = {"explorer-0": here, "explorer-1": here if beside == "both" else "far-away"}
    following.publisher = following.publisher_of(LIMIT, **places)
    following.deliver(following.publish())
    reports = {report.explorer: following.is_delta(report) for report in following.deliver(following.publish())}
    assert reports == {"explorer-0": False, "explorer-1": beside == "one"}


def test_a_version_whose_deltas_are_larger_is_broadcast_in_full(following: Following) -> None:
    """Those of the codec `full` are."""
    following.publisher = following.publisher_of(LIMIT, codec="full")
    first = following.deliver(following.publish())
    reports = following.deliver(following.publish(share=1.0))
    told = [(report.explorer, report.bytes_moved, report.fault) for report in reports]
    assert told == [(report.explorer, report.bytes_moved, None) for report in first]


@pytest.mark.parametrize("how", ["restart", "change"])
@pytest.mark.few(1)
def test_a_delta_that_an_explorer_cannot_take_is_told_and_the_version_sent_in_full(
    following: Following, how: str
) -> None:
    following.deliver(following.publish())
    ask(following.explorers["explorer-1"], how)
    reports = following.deliver(following.publish(share=0.1))
    assert not any(following.is_delta(report) for report in reports)
    faults = {report.explorer: str(report.fault) for report in reports}
    assert "was sent once more, in full: explorer-1 cannot load" in faults["explorer-1"]
    assert faults["explorer-0"] == "None"
    reports = following.deliver(following.publish())
    assert all(following.is_delta(report) and report.fault is None for report in reports)


def test_a_delta_that_no_agent_hands_out_is_not_waited_for(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    following.deliver(following.publish())
    sealed = following.publish()
    late = WaitTimeout("the agent", "hand out the deltas", 1.0)
    monkeypatch.setattr("trinity_sync.sync.deltas.shared_deltas", Mock(side_effect=late))
    assert not any(following.is_delta(report) for report in following.deliver(sealed))


def test_an_explorer_that_hangs_ends_a_round_of_deltas_too(
    following: Following, stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.actors.calls._GRACE_S", 0.5)
    following.deliver(following.publish())
    following.publisher = following.publisher_of(2.0)
    following.deliver(following.publish())
    sealed = following.publish()
    lead = Mock(wraps=following.publisher._lead_round)
    monkeypatch.setattr(following.publisher, "_lead_round", lead)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RunError, match="explorer-1"):
        following.publisher.deliver(following.explorers, sealed.version)
    assert lead.call_count == 1
    os.kill(stopped, signal.SIGCONT)
    following.publisher = following.publisher_of(LIMIT)
    following.deliver(following.publish())


def test_a_transport_of_whole_versions_refuses_a_delta() -> None:
    broadcast = SimpleNamespace(base=Version(0, 1))
    with pytest.raises(DeltaError, match="explorer-0 takes whole versions only"):
        next(NcclTransport("explorer-0", LayoutCache({}, LIMIT)).buckets(SimpleNamespace(), broadcast, lambda *_: None))


def test_an_explorer_that_dies_in_a_round_is_lost_and_the_other_gets_the_version(
    trainer: PretendTrainer, mode: NcclPublisher, explorers: dict[str, ExplorerClient]
) -> None:
    ask(explorers["explorer-1"], "signal_itself", signal.SIGKILL)
    sealed = trainer.seal(weights(14))
    mode.publish(sealed)
    delivery = mode.deliver(explorers, sealed.version)
    assert {name: death.who for name, death in delivery.lost.items()} == {"explorer-1": "explorer-1"}
    assert [(report.explorer, report.digest) for report in delivery.reports] == [("explorer-0", sealed.digest)]

    # One that was dead before the round keeps nobody in it: neither the ranks nor the slots.
    assert list(mode.deliver({"explorer-1": explorers["explorer-1"]}, sealed.version).lost) == ["explorer-1"]
    trainer.synchronizer.drop_reader(MEMBERS["explorer-1"]).result(LIMIT)
    for seed in (15, 16):
        mode.publish(sealed := trainer.seal(weights(seed)))
    (report,) = mode.deliver({"explorer-0": explorers["explorer-0"]}, sealed.version).reports
    assert report.digest == sealed.digest


# ---- NCCL, which needs a GPU: what is asked of it


class Device:
    """A group of NCCL's as far as a round sees it, in the place of a real one, which needs two GPUs."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.asked = 0

    def name(self) -> str:
        return "nccl"

    def broadcast(self, tensors: list[Any], options: Any) -> Any:
        self.asked += 1
        number = self.asked

        def wait(timeout: timedelta | None = None) -> None:
            """Without a limit NCCL's returns at once, whatever has arrived."""
            if timeout is not None:
                self.done.append(f"arrived {number}")

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.done.append("abort")

    def shutdown(self) -> None:
        self.done.append("shutdown")


def arriving_on(device: Device, index: int) -> nccl._PieceArrivals:
    layout = PartLayout.build("rank-00000", [whole(name, "U8", (64,)) for name in "abcdef"], 64)
    place = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=index))
    group = BroadcastGroup(device, torch.device("cuda", 0), 5.0)
    return nccl._PieceArrivals(group, layout, "tensor", lambda *_: place, [])


def test_between_gpus_a_piece_is_taken_for_received_when_it_is_there() -> None:
    device = Device()
    arriving = arriving_on(device, 0)
    for number, data in arriving:
        assert data is None
        assert device.done == [f"arrived {1 + one}" for one in range(number + 1)]
    assert arriving.close()
    assert device.done[6:] == ["shutdown"]


def test_between_gpus_a_load_that_is_given_up_breaks_off_what_is_under_way() -> None:
    device = Device()
    arriving = arriving_on(device, 0)
    next(iter(arriving))
    assert device.asked == 5
    assert not arriving.close()
    assert device.done == ["arrived 1", "abort", *(f"arrived {number}" for number in range(2, 6)), "shutdown"]


def test_a_place_on_another_gpu_than_the_groups_is_not_received_into() -> None:
    device = Device()
    with pytest.raises(IndexError):  # no room for it either
        next(iter(arriving_on(device, 1)))
    assert device.asked == 0
