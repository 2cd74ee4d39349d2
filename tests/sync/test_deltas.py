"""Versions as deltas: an explorer holds what was published, by the shortest way, or takes the version in full."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ray.exceptions import OutOfDiskError

from tests.sync.helpers import LIMIT, PretendTrainer, empty, make_loader, node_id, random_weights
from tests.sync.test_loading import FolderStore, side_of
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient, SharedDelta, WrittenDelta
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.host.hardware import peak_rss
from trinity_sync.protocol.parts import version_folder
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.base import ExplorerSide, LayoutCache, Published
from trinity_sync.sync.checkpoint import CheckpointMode
from trinity_sync.sync.deltas import DeltaTransport, KeptDeltas, VersionDeltas
from trinity_sync.sync.memory import MemoryMode
from trinity_sync.sync.node_agent import NodeAgent
from trinity_sync.sync.weight_loader import WeightLoader
from trinity_sync.weights import native
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.part_delta import EncodedDelta, PartEncoder, Route, VersionIndex, find_route
from trinity_sync.weights.shards import whole


def also(*values: Any) -> list[Any]:
    """Cases that only the whole suite has."""
    return [pytest.param(value, marks=pytest.mark.all) for value in values]


Weights = dict[str, torch.Tensor]
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (300, 64),
    "layers.0.mlp.weight": (64, 100),
    "layers.0.norm.weight": (64,),
    "scale": (),
}
FULL_EVERY = 6


class Run:
    """A trainer that publishes deltas to a folder, and its explorers. `nodes`: see `automatic`."""

    nodes: dict[str, str]

    def __init__(
        self,
        trainer: PretendTrainer,
        root: Path,
        codec: str = "auto",
        encoding: str = "delta",
        full_every: int = FULL_EVERY,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        **sides: Any,
    ) -> None:
        self.trainer, self.root, self.deltas = trainer, root, root / ".deltas"
        self.weights = random_weights(1, shapes)
        self.published: list[Version] = []
        self.sent: list[Published] = []
        keys = SimpleNamespace(full_every=full_every, codec=codec)
        self._sides = sides
        self._mode = self.make_mode(encoding, keys)
        self.restart()

    def make_mode(self, encoding: str, keys: SimpleNamespace) -> CheckpointMode | MemoryMode:
        return CheckpointMode(durable=False, encoding=encoding, delta=keys)

    def restart(self) -> None:
        places = {"store": FolderStore(self.root), "deltas": self.deltas}
        self.publisher = self._mode.publisher(side_of(self.trainer, **places | self._sides))

    def publish(self, count: int = 1, share: float = 0.02) -> SealedVersion:
        """Publish versions, each with a share of new elements; return the last."""
        for _ in range(count):
            for name, tensor in self.weights.items():
                generator = torch.Generator().manual_seed(len(self.published))
                changed = torch.rand(tensor.shape, generator=generator) < share
                self.weights[name] = torch.where(changed, tensor + tensor.abs() / 64 + 1, tensor).to(tensor.dtype)
            sealed = self.trainer.seal(self.weights)
            self.sent.append(self.publisher.publish(sealed))
            self.published.append(sealed.version)
        return sealed

    def side(self, **changes: Any) -> ExplorerSide:
        agents = self.trainer.agents
        layouts = LayoutCache(agents, LIMIT)
        given = {"name": "explorer-0", "node": node_id(), "agents": agents, "layouts": layouts, "timeout_s": LIMIT}
        return ExplorerSide(**given | changes)

    def explorer(
        self, dtype: torch.dtype = torch.bfloat16, node: str | None = None, **settings: Any
    ) -> tuple[WeightLoader, Weights]:
        here = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in empty(self.weights).items()
        }
        node = node or node_id()
        # the one real agent stands for that of another node
        agents = {node: next(iter(self.trainer.agents.values())), **self.trainer.agents}
        transport = self._mode.transport(self.side(node=node, agents=agents))
        assert isinstance(transport, DeltaTransport)
        return make_loader(self.trainer, here, transport=transport, **settings), here

    def folder(self, back: int = 1) -> Path:
        return version_folder(self.deltas, self.published[-back])

    def file(self, back: int = 1) -> Path:
        before = self.published[-back - 1]
        return self.folder(back) / f"rank-00001-from-{before.attempt}-{before.step}.delta"

    def route(self, held: Version | None) -> Route | None:
        """The way to the newest version."""
        read = lambda version: VersionIndex.read(version_folder(self.deltas, version) / "index.json")  # noqa: E731
        return find_route(self.published[-1], held, self.full_bytes, read)

    def lose(self) -> None:
        """Lose a delta to the newest version."""
        self.file().unlink()

    @property
    def piece_bytes(self) -> int:
        """Without what only aligns them."""
        layouts = self.trainer.layouts.values()
        return sum(stop - start for layout in layouts for start, stop in layout.pieces("tensor"))

    @property
    def full_bytes(self) -> int:
        return sum(layout.nbytes for layout in self.trainer.layouts.values())


@pytest.fixture(scope="module")
def trainer(synchronizer: Synchronizer, make_agent: Callable[..., AgentClient]) -> PretendTrainer:
    return make_trainer(synchronizer, make_agent(synchronizer.client))


def make_trainer(synchronizer: Synchronizer, agent: AgentClient) -> PretendTrainer:
    weights = random_weights(0, SHAPES)
    return PretendTrainer(synchronizer.client, {node_id(): agent}, weights=weights, bucket_bytes=4096)


@pytest.fixture
def run(trainer: PretendTrainer, tmp_path: Path) -> Run:
    return Run(trainer, tmp_path)


def assert_holds(loader: WeightLoader, here: Weights, run: Run) -> Any:
    report = loader.load(None)
    assert loader.held == report.version == run.published[-1]
    assert report.digest in (None, reference_digest(run.weights, "BF16"))
    assert reference_digest(here, "BF16") == reference_digest(run.weights, "BF16")
    assert not list(run.deltas.glob("*/full-*"))
    return report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", ["auto", *also("class_gap", "sparse")])
def test_an_explorer_follows_the_trainer_by_deltas(
    trainer: PretendTrainer, tmp_path: Path, codec: str, dtype: torch.dtype
) -> None:
    run = Run(trainer, tmp_path, codec)
    loader, here = run.explorer(dtype)
    run.publish()
    assert assert_holds(loader, here, run).apply_s == 0
    for _ in range(FULL_EVERY + 1):
        run.publish()
        report = assert_holds(loader, here, run)
        assert report.fault is None
        assert 0 < report.apply_s < report.total_s
        assert 0 < report.bytes_moved < run.full_bytes / 2


@pytest.mark.all
def test_nothing_but_the_changed_pieces_travels(run: Run) -> None:
    loader, here = run.explorer()
    run.publish()
    loader.load(None)
    run.publish(share=0.0)
    assert assert_holds(loader, here, run).bytes_moved == 0


def test_a_version_says_its_codec_what_it_changes_and_what_was_written(run: Run) -> None:
    run.publish(2, share=0.1)
    first, second = run.sent
    assert (first.encoding, first.codec, first.changed, first.nbytes) == ("full", None, None, run.full_bytes)
    assert second.encoding == "delta"
    assert second.codec
    assert 0.05 < (second.changed or 0) < 0.15
    assert second.nbytes == sum(path.stat().st_size for path in run.folder().glob("*.delta"))


def test_a_version_says_what_it_changes_by_layer_over_all_ranks(run: Run) -> None:
    run.publish()
    before = dict(run.weights)
    run.publish(share=0.1)
    counts = {name: int((run.weights[name] != before[name]).sum()) for name in SHAPES}
    layer = counts["layers.0.mlp.weight"] + counts["layers.0.norm.weight"]
    assert run.sent[-1].changed_ppm == {
        "embeddings": round(1e6 * counts["embed.weight"] / (300 * 64)),
        "0": round(1e6 * layer / (64 * 101)),
        "others": 1e6 * counts["scale"],
    }


def test_a_version_says_how_long_its_deltas_took(run: Run) -> None:
    run.publish(2)
    first, second = run.sent
    assert first.encode_s is None
    assert 0 < (second.encode_s or 0) < LIMIT


def test_a_version_is_written_in_full_every_so_many_versions_and_by_each_new_publisher(run: Run) -> None:
    run.publish(FULL_EVERY + 2)
    run.restart()
    run.publish(2)
    whole = [index for index, version in enumerate(run.published) if (run.root / f"version-{version.step}").exists()]
    assert whole == [0, FULL_EVERY, FULL_EVERY + 2]
    assert [one.encoding for one in run.sent][FULL_EVERY + 1 :] == ["delta", "full", "delta"]


def test_a_new_explorer_reads_the_newest_full_version_and_what_follows(run: Run) -> None:
    run.publish(FULL_EVERY + 3)
    route = run.route(None)
    assert route is not None
    assert route.full == (run.published[FULL_EVERY], f"version-{run.published[FULL_EVERY].step}")
    loader, here = run.explorer()
    report = assert_holds(loader, here, run)
    assert report.fault is None
    assert run.full_bytes < report.bytes_moved < 1.5 * run.full_bytes


@pytest.mark.parametrize("missed", [*also(1, 5), 9])
def test_an_explorer_that_missed_versions_takes_few_deltas(run: Run, missed: int) -> None:
    loader, here = run.explorer()
    run.publish(share=0.005)
    loader.load(None)
    run.publish(missed, share=0.005)
    starts = [run.published[at] for at in {1: [0], 5: [0, 4], 9: [0, 4, 8]}[missed]]
    assert run.route(loader.held) == Route(tuple(starts), None)
    report = assert_holds(loader, here, run)
    assert report.fault is None


@pytest.mark.all
def test_an_explorer_whose_version_is_gone_reads_a_full_one(run: Run) -> None:
    loader, here = run.explorer()
    run.publish()
    loader.load(None)
    run.publish(3 * FULL_EVERY)
    report = assert_holds(loader, here, run)
    assert report.fault is None
    assert report.bytes_moved == run.piece_bytes


@pytest.mark.all
def test_deltas_that_no_reader_needs_are_deleted(run: Run) -> None:
    run.publish(2 * FULL_EVERY + 1)
    kept = {version_folder(run.deltas, version).name for version in run.published[FULL_EVERY:]}
    assert {path.name for path in run.deltas.iterdir()} == kept


# ---- deltas that cannot be used


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Run], None]] = {
    "lost": lambda run: run.file().unlink(),
    "cut": lambda run: cut(run.file()),
    "empty": lambda run: run.file().write_bytes(b""),
    "flipped": lambda run: flip(run.file()),
    "of another version": lambda run: run.file().write_bytes(run.file(2).read_bytes()),
    "a folder": lambda run: (run.file().unlink(), run.file().mkdir()),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("damage", ["lost", "flipped", *also("cut", "empty", "of another version", "a folder")])
def test_a_delta_that_cannot_be_used_costs_a_full_version_and_is_told(run: Run, damage: str) -> None:
    loader, here = run.explorer()
    run.publish(2)
    loader.load(None)
    run.publish()
    DAMAGE[damage](run)
    report = assert_holds(loader, here, run)
    assert report.fault.startswith(f"version {run.published[-1]} was read once more: ")
    assert run.file().name in report.fault
    run.publish(2)  # two slots serve two more versions only if all leases have ended
    assert assert_holds(loader, here, run).bytes_moved < run.full_bytes, "later versions are deltas again"


INDEX = '{"format": 1, "full": "PLACE", "deltas": []}'
NOT_NOW = INDEX.replace("PLACE", "x" * 300)  # the system has an error for it, as for a disk that does not answer


@pytest.mark.parametrize(
    "index",
    [
        NOT_NOW,
        *also(
            None,
            "",
            "{}",
            "[]",
            INDEX.replace("1", "2"),
            INDEX.replace("PLACE", "../x"),
            INDEX.replace("PLACE", "/tmp"),
        ),
    ],
)
def test_a_version_that_no_files_lead_to_is_asked_for_in_full(run: Run, index: str | None) -> None:
    loader, here = run.explorer()
    run.publish(2)
    path = run.folder() / "index.json"
    path.unlink() if index is None else path.write_text(index)
    assert assert_holds(loader, here, run).bytes_moved == run.piece_bytes


def test_a_version_is_asked_for_in_full_where_that_costs_less_than_its_deltas(run: Run) -> None:
    run.publish(5, share=1.0)
    loader, here = run.explorer()
    assert assert_holds(loader, here, run).bytes_moved == run.piece_bytes


def test_no_delta_is_applied_to_bytes_of_a_slot_whose_lease_ended_meanwhile(run: Run) -> None:
    run.publish(2)
    (run.folder() / "index.json").unlink()
    transport = run._mode.transport(run.side(still_leased=lambda lease_id: False))
    loader = make_loader(run.trainer, empty(run.weights), transport=transport)
    loader.load(None)
    run.publish()
    assert loader.load(None).bytes_moved >= run.piece_bytes


@pytest.mark.parametrize("back", [*also(1), 2])
def test_a_full_version_that_is_gone_is_asked_for(run: Run, back: int) -> None:
    run.publish(back)
    for path in run.root.glob("version-*/actor/*1.safetensors"):
        path.unlink()
    loader, here = run.explorer()
    assert "is missing" in assert_holds(loader, here, run).fault


@pytest.mark.parametrize(
    ("share", "told"), [(1.0, "a delta of other weights"), (0.0, "damaged: embed.weight")], ids=["changed", "unchanged"]
)
def test_other_weights_than_the_base_are_found_and_replaced(run: Run, share: float, told: str) -> None:
    """By the delta of a piece, and where it has none by the digest of the version."""
    loader, here = run.explorer()
    run.publish()
    loader.load(None)
    run.publish(share=share)
    here["embed.weight"][3] += 1
    assert told in assert_holds(loader, here, run).fault


def test_a_full_version_that_is_damaged_too_is_an_error_and_nothing_is_held(run: Run) -> None:
    loader, _ = run.explorer()
    run.publish(2)
    loader.load(None)
    sealed = run.publish()
    flip(run.file())
    run.trainer.damage(sealed, "rank-00001", 300)
    with pytest.raises(RunError, match=f"cannot load version {run.published[-1]}: .*damaged"):
        loader.load(None)
    assert loader.held is None


@pytest.mark.all
def test_a_nan_that_wider_weights_lose_costs_a_full_version_only(run: Run) -> None:
    """A NaN has other bits in bf16 than in the fp32 of the explorer; the next change of its piece finds that."""
    loader, here = run.explorer(torch.float32)
    run.publish()
    loader.load(None)
    here["embed.weight"][0, 0] = float("nan")
    run.publish(share=1.0)
    assert assert_holds(loader, here, run).fault


@pytest.mark.parametrize("share", [0.0, *also(0.02)])
@pytest.mark.parametrize("harmed", [*also(False), True])
def test_buckets_are_checked_where_versions_have_no_digest(
    synchronizer: Synchronizer, make_agent: Callable[..., AgentClient], tmp_path: Path, share: float, harmed: bool
) -> None:
    run = Run(make_trainer(synchronizer, make_agent(synchronizer.client, verify="bucket")), tmp_path)
    loader, here = run.explorer(verify="bucket")
    run.publish()
    loader.load(None)
    run.publish(share=share)
    if harmed:
        here["embed.weight"][3] += 1
    assert (assert_holds(loader, here, run).fault is not None) == harmed
    assert assert_holds(loader, here, run).fault is None  # the same version again, as for a validation


def test_the_folder_of_the_full_version_is_kept_while_it_is_read(run: Run) -> None:
    held: list[tuple[Path, Version]] = []

    @contextmanager
    def hold(folder: Path, version: Version) -> Iterator[Callable[[], None]]:
        held.append((folder, version))
        yield lambda: None

    run.publish(2)
    transport = run._mode.transport(run.side(lease_folder=hold))
    loader = make_loader(run.trainer, empty(run.weights), transport=transport)
    loader.load(None)
    assert held == [(run.root / f"version-{run.published[0].step}", run.published[0])]


# ---- deltas that agents keep


class MemoryRun(Run):
    """A trainer whose agents keep the deltas."""

    def make_mode(self, encoding: str, keys: SimpleNamespace) -> MemoryMode:
        return MemoryMode(encoding=encoding, delta=keys)

    def route(self, held: Version | None) -> Route | None:
        [agent] = self.trainer.agents.values()
        assert held is not None
        chains = agent.share_deltas(self.published[-1], held).result(LIMIT).values()
        [starts] = {tuple(one.start for one in chain) for chain in chains}
        return Route(starts, None)

    def lose(self) -> None:
        """Lose the next delta that is fetched."""
        patch = pytest.MonkeyPatch()

        def result(limit: float) -> memoryview:
            patch.undo()
            raise WaitTimeout("the node agent", "send a delta", limit)

        patch.setattr("trinity_sync.sync.deltas.Call", lambda *given: SimpleNamespace(result=result))


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ProcessLoss("pid 7 does not reach Ray's raylet on its node any more"), True),
        (WaitTimeout("the node agent", "make the deltas", 1.0), False),
        (RunError("an unknown codec"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_lost_process_is_no_reason_to_publish_a_version_in_full(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    outcomes = [error]

    def results(*given: object) -> list[Any]:
        if outcomes:
            raise outcomes.pop()
        return []

    monkeypatch.setattr("trinity_sync.sync.deltas.results", results)
    node = SimpleNamespace(node=0)
    side: Any = SimpleNamespace(versions=None, base_every=None, agents={}, timeout_s=1.0, version_bytes=node)
    sealed = SealedVersion(version=Version(0, 2), slot=1, digest=None, parts={})
    deltas = VersionDeltas(side, "auto", always=False)
    deltas._before = Version(0, 1), 0
    if not is_lost:
        assert deltas.encode(sealed, pays=True) is None
        return
    with pytest.raises(ProcessLoss, match="raylet"):
        deltas.encode(sealed, pays=True)


@pytest.fixture
def in_memory(trainer: PretendTrainer, tmp_path: Path) -> MemoryRun:
    return MemoryRun(trainer, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *also(torch.float32)], ids=str)
def test_deltas_that_agents_keep_are_followed(in_memory: MemoryRun, dtype: torch.dtype) -> None:
    loader, here = in_memory.explorer(dtype)
    moved = []
    for _ in range(3):
        in_memory.publish()
        report = assert_holds(loader, here, in_memory)
        assert report.fault is None
        moved.append(report.bytes_moved)
    assert moved[0] == in_memory.full_bytes
    assert all(0 < nbytes < in_memory.full_bytes / 2 for nbytes in moved[1:])
    assert [sent.encoding for sent in in_memory.sent] == ["full", "delta", "delta"]


def test_missed_versions_are_made_up_for_by_few_kept_deltas(in_memory: MemoryRun) -> None:
    loader, here = in_memory.explorer()
    in_memory.publish(share=0.002)
    loader.load(None)
    in_memory.publish(9, share=0.002)
    assert in_memory.route(loader.held) == Route(tuple(in_memory.published[at] for at in (0, 4, 8)), None)
    assert assert_holds(loader, here, in_memory).bytes_moved < in_memory.full_bytes / 2


def test_agents_keep_no_more_deltas_than_pay(in_memory: MemoryRun) -> None:
    loader, here = in_memory.explorer()
    in_memory.publish()
    loader.load(None)
    in_memory.publish(4, share=0.3)
    report = assert_holds(loader, here, in_memory)
    assert (report.bytes_moved, report.fault) == (in_memory.full_bytes, None)


def test_a_version_that_readers_take_in_full_is_published_as_full(trainer: PretendTrainer, tmp_path: Path) -> None:
    """Deltas of the codec `full` are larger than the version."""
    run = MemoryRun(trainer, tmp_path, codec="full")
    loader, here = run.explorer()
    for _ in range(2):
        run.publish(share=1.0)
        assert assert_holds(loader, here, run).bytes_moved == run.full_bytes
    assert [sent.encoding for sent in run.sent] == ["full", "full"]
    assert all(sent.nbytes >= run.full_bytes for sent in run.sent)


@pytest.mark.parametrize("how", ["lost", "other weights"])
def test_kept_deltas_that_cannot_be_used_cost_a_full_version_and_are_told(in_memory: MemoryRun, how: str) -> None:
    loader, here = in_memory.explorer()
    in_memory.publish()
    loader.load(None)
    in_memory.publish()
    if how == "lost":
        in_memory.lose()
    else:
        here["embed.weight"][3] += 1
    report = assert_holds(loader, here, in_memory)
    assert "was read once more: " in report.fault
    assert report.bytes_moved == in_memory.full_bytes
    in_memory.publish(2)
    assert assert_holds(loader, here, in_memory).bytes_moved < in_memory.full_bytes / 2


KEPT = EncodedDelta(Version(0, 1), [b"delta"], {})


def test_a_part_that_is_smaller_than_its_delta_has_one_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda data: bytes(data))
    kept = KeptDeltas(0)
    kept.add(Version(0, 2), KEPT)
    assert kept.chain(Version(0, 2), Version(0, 1)) == [SharedDelta(Version(0, 1), 5, b"delta")]
    assert kept.chain(Version(0, 2), Version(0, 2)) is None


def test_an_agent_keeps_the_newest_deltas_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", len)
    kept = KeptDeltas(16 * 2**20)
    for step in range(5):
        kept.add(Version(0, step + 1), EncodedDelta(Version(0, step), [bytes(2**20 - 1)], {}))
    assert kept.chain(Version(0, 5), Version(0, 3)) is not None
    assert kept.chain(Version(0, 5), Version(0, 2)) is None


def test_a_full_object_store_costs_deltas_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptDeltas(1000)
    monkeypatch.setattr("ray.put", Mock(side_effect=OutOfDiskError()))
    assert kept.add(Version(0, 2), KEPT) is None
    assert kept.chain(Version(0, 2), Version(0, 1)) is None


def test_a_version_of_which_a_part_has_no_delta_is_published_as_full(
    in_memory: MemoryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there was no room for it."""
    encode = VersionDeltas.encode
    monkeypatch.setattr(VersionDeltas, "encode", lambda *given, **how: encode(*given, **how)[1:])
    in_memory.publish(2)
    assert [sent.encoding for sent in in_memory.sent] == ["full", "full"]
    assert in_memory.sent[1].nbytes > in_memory.full_bytes
    told = f"version {in_memory.published[-1]} is published in full: the agents have no room for its deltas"
    assert [sent.fault for sent in in_memory.sent] == [None, told]


def test_a_version_that_has_merged_deltas_only_is_published_as_full(
    in_memory: MemoryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where dropping the earlier deltas made room for the merged one."""
    in_memory.publish(4, share=0.002)
    encode = VersionDeltas.encode
    before = in_memory.published[-1]

    def merged(*given: Any, **how: Any) -> list[WrittenDelta]:
        return [one for one in encode(*given, **how) or () if one.start != before]

    monkeypatch.setattr(VersionDeltas, "encode", merged)
    in_memory.publish(share=0.002)
    sent = in_memory.sent[-1]
    assert (sent.encoding, sent.codec) == ("full", None)
    assert sent.nbytes > in_memory.full_bytes, "the merged deltas count"
    assert "no room" in str(sent.fault)


def test_deltas_that_were_given_up_while_they_were_made_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots may have been filled meanwhile."""
    parts = {part: PartLayout.build(part, [whole("weight", "U8", (64,))], 64) for part in ("rank-00000", "rank-00001")}
    agent: Any = NodeAgent.__new__(NodeAgent)
    agent._layouts, agent._encoders, agent._kept = parts, {}, {}
    agent._maps, agent._tasks, agent._pool = Mock(__getitem__=Mock()), ThreadPoolExecutor(1), None  # part after part
    monkeypatch.setattr("ray.put", bytes)
    begun, given_up = threading.Event(), threading.Event()

    def encode(*given: Any) -> list[EncodedDelta]:
        begun.set()
        assert given_up.wait(LIMIT)
        return [KEPT]

    async def make(*, forgets: bool) -> Any:
        making = asyncio.ensure_future(agent.encode_deltas(Version(0, 2), 1, Version(0, 1), 0, None, "gap8z", ()))
        await asyncio.to_thread(begun.wait, LIMIT)
        if forgets:
            await agent.forget_deltas()
        given_up.set()
        assert len(await making) == len(parts)
        return await agent.share_deltas(Version(0, 2), Version(0, 1))

    monkeypatch.setattr(PartEncoder, "encode", encode)
    assert list(asyncio.run(make(forgets=False))) == list(parts)
    agent._kept = {}
    begun.clear()
    given_up.clear()
    assert asyncio.run(make(forgets=True)) == {}


@pytest.mark.all
def test_parts_of_two_nodes_are_followed(
    synchronizer: Synchronizer, make_agent: Callable[..., AgentClient], tmp_path: Path
) -> None:
    lead = make_agent(synchronizer.client, nodes=2)
    agents = {node_id(): lead, "far-away": make_agent(synchronizer.client, nodes=2, lead=lead, node="far-away")}
    weights = random_weights(0, SHAPES)
    run = MemoryRun(PretendTrainer(synchronizer.client, agents, weights=weights, bucket_bytes=4096), tmp_path)
    loader, here = run.explorer()
    run.publish()
    loader.load(None)
    run.publish()
    assert assert_holds(loader, here, run).bytes_moved < run.full_bytes / 2


@pytest.mark.parametrize("kind", [Run, MemoryRun], ids=["files", "memory"])
def test_nothing_travels_of_a_version_that_is_held(trainer: PretendTrainer, tmp_path: Path, kind: type[Run]) -> None:
    """An explorer that follows the trainer may be asked to validate the version that it has."""
    run = kind(trainer, tmp_path)
    loader, here = run.explorer()
    run.publish(2)
    loader.load(None)
    report = assert_holds(loader, here, run)
    assert (report.bytes_moved, report.fault) == (0, None)
    here["embed.weight"][3] += 1
    assert "was read once more: " in assert_holds(loader, here, run).fault


@pytest.mark.all
@pytest.mark.parametrize("full_every", [FULL_EVERY, 128])
@pytest.mark.parametrize("kind", [Run, MemoryRun], ids=["files", "memory"])
def test_an_explorer_that_missed_a_hundred_versions_holds_the_newest(
    trainer: PretendTrainer, tmp_path: Path, kind: type[Run], full_every: int
) -> None:
    run = kind(trainer, tmp_path, full_every=full_every)
    loader, here = run.explorer()
    run.publish()
    loader.load(None)
    run.publish(100, share=0.0005)
    assert assert_holds(loader, here, run).fault is None
    run.publish()
    report = assert_holds(loader, here, run)
    assert report.fault is None
    assert report.bytes_moved < run.full_bytes / 2, "the next version is a delta again"


def resident() -> int:
    """The private bytes of this process that are in memory now."""
    rows = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(rows[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))


@pytest.mark.all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Run, MemoryRun], ids=["files", "memory"])
def test_an_explorer_keeps_no_second_model(
    synchronizer: Synchronizer,
    make_agent: Callable[..., AgentClient],
    tmp_path: Path,
    kind: type[Run],
    dtype: torch.dtype,
) -> None:
    """A load by deltas takes less than a quarter of a version besides the model, and leaves less than half of one."""
    shapes: dict[str, tuple[int, ...]] = {f"layers.{layer}.weight": (512, 1024) for layer in range(64)}
    agent = {node_id(): make_agent(synchronizer.client)}
    weights = random_weights(0, shapes)
    trainer = PretendTrainer(synchronizer.client, agent, weights=weights, bucket_bytes=2**20)
    run = kind(trainer, tmp_path, shapes=shapes)
    loader, here = run.explorer(dtype)
    run.publish(share=0.001)
    nothing, model = resident(), sum(tensor.nbytes for tensor in here.values())
    loader.load(None)
    assert resident() - nothing < model + run.full_bytes / 2
    run.publish(share=0.001)  # brings what the first use of a code takes
    loader.load(None)
    run.publish(share=0.001)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_rss()
    report = loader.load(None)
    assert peak_rss() - before < run.full_bytes / 4
    assert 0 < report.bytes_moved < run.full_bytes / 4
    assert_holds(loader, here, run)


# ---- deltas to other nodes only


@pytest.fixture(params=[Run, MemoryRun], ids=["files", "memory"])
def automatic(request: pytest.FixtureRequest, trainer: PretendTrainer, tmp_path: Path) -> Run:
    """Explorers are added to its `nodes`."""
    nodes: dict[str, str] = {}
    run: Run = request.param(trainer, tmp_path, encoding="auto", explorer_nodes=lambda: nodes)
    run.nodes = nodes
    return run


def encodings(run: Run) -> list[str]:
    return [sent.encoding for sent in run.sent]


def test_versions_stay_whole_while_no_explorer_is_elsewhere(automatic: Run) -> None:
    automatic.nodes["explorer-0"] = node_id()
    loader, here = automatic.explorer()
    for _ in range(3):
        automatic.publish()
        report = assert_holds(loader, here, automatic)
        assert report.bytes_moved >= automatic.piece_bytes
        assert report.fault is None
    assert encodings(automatic) == ["full"] * 3
    assert {sent.codec for sent in automatic.sent} == {None}


def test_deltas_begin_once_an_explorer_is_elsewhere_and_end_with_it(automatic: Run) -> None:
    loader, here = automatic.explorer(node="far-away")
    automatic.publish()
    loader.load(None)
    automatic.nodes["explorer-0"] = "far-away"
    for _ in range(2):
        automatic.publish()
        report = assert_holds(loader, here, automatic)
        assert report.bytes_moved < automatic.full_bytes / 2
        assert report.fault is None
    automatic.nodes["explorer-0"] = node_id()
    automatic.publish()
    assert assert_holds(loader, here, automatic).bytes_moved >= automatic.piece_bytes
    [agent] = automatic.trainer.agents.values()
    assert agent.share_deltas(*automatic.published[-2:-4:-1]).result(LIMIT) == {}
    assert encodings(automatic) == ["full", "delta", "delta", "full"]


@pytest.mark.parametrize("kind", [Run, MemoryRun], ids=["files", "memory"])
def test_deltas_that_cannot_be_made_cost_a_full_version_and_are_told(
    trainer: PretendTrainer, tmp_path: Path, kind: type[Run]
) -> None:
    run = kind(trainer, tmp_path, codec="unknown", encoding="auto", explorer_nodes=lambda: {"far": "far-away"})
    loader, here = run.explorer(node="far-away")
    for _ in range(2):
        run.publish()
        assert assert_holds(loader, here, run).fault is None
    assert [(sent.encoding, sent.fault is None) for sent in run.sent] == [("full", True), ("full", False)]
    told = rf"^version {run.published[-1]} is published in full: the agent of .* could not make .*unknown"
    assert re.match(told, run.sent[1].fault), run.sent[1].fault


@pytest.mark.parametrize(
    "how", [{"encoding": "delta"}, {"encoding": "auto", "versions": Mock()}], ids=["all versions", "a store"]
)
def test_deltas_that_are_asked_for_and_cannot_be_made_end_the_run(
    trainer: PretendTrainer, tmp_path: Path, how: dict[str, Any]
) -> None:
    run = Run(trainer, tmp_path, codec="unknown", **how)
    run.publish()
    with pytest.raises(RunError, match="could not make the deltas"):
        run.publish()
    trainer.synchronizer.discard(Version(0, run.published[-1].step + 1)).result(LIMIT)


def test_followers_of_a_store_are_elsewhere(trainer: PretendTrainer, tmp_path: Path) -> None:
    run = Run(trainer, tmp_path, encoding="auto", versions=Mock())
    run.publish(2)
    assert encodings(run) == ["full", "delta"]


def test_an_explorer_beside_the_trainer_reads_the_slot_while_another_one_takes_deltas(
    trainer: PretendTrainer, tmp_path: Path
) -> None:
    run = MemoryRun(trainer, tmp_path, encoding="auto", explorer_nodes=lambda: {"near": node_id(), "far": "far-away"})
    near, far = run.explorer(), run.explorer(node="far-away")
    run.publish()
    near[0].load(None)
    far[0].load(None)
    run.publish()
    assert assert_holds(*near, run).bytes_moved == run.full_bytes
    assert assert_holds(*far, run).bytes_moved < run.full_bytes / 2


@pytest.mark.parametrize("kind", [Run, MemoryRun], ids=["files", "memory"])
def test_workers_beside_the_trainer_map_the_version_itself(
    trainer: PretendTrainer, tmp_path: Path, kind: type[Run]
) -> None:
    run = kind(trainer, tmp_path, encoding="auto", explorer_nodes=lambda: {"explorer-0": node_id()})
    copies = run._mode.copies(run.side())
    assert copies is not None
    for _ in range(2):
        sealed = run.publish()
        lease = trainer.synchronizer.lease("explorer-0", None).result(LIMIT)
        assert copies.localize(lease) is lease
        assert copies.moved is None
        for part in run._mode.maps(run.side()).map(lease):
            assert bytes(part.data) == bytes(trainer.segment(sealed.slot, part.layout.part))
        trainer.synchronizer.release(lease.id).result(LIMIT)


def test_deltas_as_large_as_the_version_are_not_published(trainer: PretendTrainer, tmp_path: Path) -> None:
    """Those of the codec `full` are."""
    run = Run(trainer, tmp_path, codec="full")
    loader, here = run.explorer()
    for _ in range(3):
        run.publish()
        assert assert_holds(loader, here, run).fault is None
    assert encodings(run) == ["full"] * 3
    assert {sent.nbytes for sent in run.sent} == {run.full_bytes}


@pytest.mark.few(1)
def test_what_deltas_needed_goes_once_versions_are_whole(automatic: Run) -> None:
    loader, _ = automatic.explorer(node="far-away")
    automatic.nodes["explorer-0"] = "far-away"
    automatic.publish(3 * FULL_EVERY)
    loader.load(None)
    automatic.nodes["explorer-0"] = node_id()
    automatic.publish()
    if automatic.deltas.exists():
        assert len([path for path in automatic.deltas.iterdir() if path.is_dir()]) <= FULL_EVERY


def test_versions_without_deltas_leave_no_folder_for_them(trainer: PretendTrainer, tmp_path: Path) -> None:
    Run(trainer, tmp_path, encoding="auto", explorer_nodes=dict).publish(2)
    assert not (tmp_path / ".deltas").exists()


@pytest.mark.parametrize(
    ("sides", "codec"),
    [({}, "gap8z"), ({"versions": Mock()}, "class_gap" if native.library() is not None else "gap8z")],
    ids=["read at once", "stored"],
)
def test_the_code_is_the_fast_one_unless_its_bytes_are_stored(
    trainer: PretendTrainer, tmp_path: Path, sides: dict[str, Any], codec: str
) -> None:
    run = Run(trainer, tmp_path, **sides)
    run.publish(2)
    assert run.sent[-1].codec == codec


# ---- explorers whose engine cannot give weights back


@pytest.mark.parametrize("kind", [Run, MemoryRun], ids=["files", "memory"])
def test_copies_for_workers_follow_by_deltas_and_heal(trainer: PretendTrainer, tmp_path: Path, kind: type[Run]) -> None:
    run = kind(trainer, tmp_path)
    copies = run._mode.copies(run.side())
    assert copies is not None
    moved, applied = [], []
    for damaged in (False, False, False, True, False):
        run.publish()
        lease = run.trainer.synchronizer.lease("explorer-0", None).result(LIMIT)
        if damaged:
            run.lose()
            with pytest.raises(DeltaError):
                copies.localize(lease)
        here = copies.localize(lease)
        run.trainer.synchronizer.release(lease.id).result(LIMIT)
        for part in run._mode.maps(run.side()).map(here):
            slot = run.trainer.segment(lease.slot, part.layout.part)
            pieces = part.layout.pieces("shard")
            assert all(part.data[start:stop] == slot[start:stop] for start, stop in pieces)
        moved.append(copies.moved)
        applied.append(copies.apply_s > 0)
    assert run.piece_bytes <= moved[0] == moved[3] <= run.full_bytes
    assert all(0 < nbytes < run.full_bytes / 2 for nbytes in (moved[1], moved[2], moved[4]))
    assert applied == [False, True, True, False, True]
    paths = [Path(info.path) for info in here.parts.values()]
    assert all(path.exists() for path in paths)
    copies.close()
    assert not any(path.exists() for path in paths)
