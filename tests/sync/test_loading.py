"""An explorer's load: what it holds afterwards is what was published, or it holds nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch

from tests.checkpoint.helpers import unreadable
from tests.sync.helpers import BUCKET_BYTES, LIMIT, PretendTrainer, empty, make_loader, node_id, random_weights
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.errors import RunError
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.base import Bucket, FindDestination, LayoutCache, TrainerSide
from trinity_sync.sync.checkpoint import CheckpointPublisher, CheckpointTransport
from trinity_sync.sync.memory import MemoryPublisher, MemoryTransport
from trinity_sync.sync.weight_loader import LiveTensors, LoadResult, WeightLoader
from trinity_sync.weights.layout import Cut
from trinity_sync.weights.shard_file import ShardFileError
from trinity_sync.weights.slots import map_segment

PART, BYTE, DAMAGED = "rank-00001", 300, "layers.0.mlp.weight"
"""A byte of the second bucket of the second part, and of this tensor."""


class FolderStore:
    """Weights-only saves that are committed as soon as they are asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files: list[tuple[str, int, str]] = []
        self.failed: list[str] = []

    def begin(self, version: Version, nodes: list[str]) -> Path:
        return self._root / f"version-{version.step}"

    def part_written(self, version: Version, node: str, files: list[tuple[str, int, str]]) -> None:
        self.files += files

    def commit(self, version: Version, digest: str | None) -> Path:
        return self._root / f"version-{version.step}"

    def fail(self, version: Version, error: str) -> None:
        self.failed.append(error)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def side_of(trainer: PretendTrainer, **changes: Any) -> TrainerSide:
    given = {"synchronizer": trainer.synchronizer, "agents": trainer.agents, "ranks": [], "timeout_s": LIMIT}
    return TrainerSide(**given | changes)


def assert_all_leases_have_ended(trainer: PretendTrainer) -> None:
    """Two slots serve two more versions only if nobody holds an older one."""
    for seed in (101, 102):
        trainer.publish(random_weights(seed))


class Altered:
    """Memory transport whose bytes are damaged on the way, as often as asked."""

    def __init__(self, trainer: PretendTrainer, times: int) -> None:
        self._source = MemoryTransport(trainer.agents, LayoutCache(trainer.agents, LIMIT), LIMIT, node_id())
        self._times = times

    def buckets(self, lease: Any, broadcast: Any, find_destination: FindDestination) -> Iterator[Bucket]:
        self._times -= 1
        for bucket in self._source.buckets(lease, broadcast, find_destination):
            copy = bytearray(bucket.data)
            if self._times >= 0 and bucket.layout.part == PART and bucket.number == BYTE // BUCKET_BYTES:
                copy[BYTE % BUCKET_BYTES] ^= 0xFF
            yield bucket._replace(data=copy)


@pytest.fixture(scope="module")
def bucket_trainer(synchronizer: Synchronizer, make_agent: Callable[..., AgentClient]) -> PretendTrainer:
    """One whose agent digests buckets, and not the version."""
    return PretendTrainer(synchronizer.client, {node_id(): make_agent(synchronizer.client, verify="bucket")})


# ---- what arrives


@pytest.mark.parametrize("mode", ["memory", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_explorer_holds_what_the_trainer_published(
    trainer: PretendTrainer, store: FolderStore, mode: str, dtype: torch.dtype
) -> None:
    weights = random_weights(11)
    here = {name: torch.zeros_like(t, dtype=dtype if t.is_floating_point() else t.dtype) for name, t in weights.items()}
    sealed = trainer.seal(weights)
    if mode == "memory":
        MemoryPublisher(side_of(trainer)).publish(sealed)
        loader = make_loader(trainer, here)
    else:
        CheckpointPublisher(side_of(trainer), store, durable=False).publish(sealed)
        loader = make_loader(trainer, here, transport=CheckpointTransport())
    report = loader.load(sealed.version)
    assert report.digest == sealed.digest == reference_digest(weights, "BF16")
    assert report.version == loader.held == sealed.version
    cut: Cut = "bucket" if mode == "memory" else "tensor"  # where files are read, what only aligns them is left out
    pieces = [piece for layout in trainer.layouts.values() for piece in layout.pieces(cut)]
    assert report.bytes_moved == sum(stop - start for start, stop in pieces)
    assert report.total_s >= report.paused_s > 0
    for name, tensor in weights.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(here[name], expected.to(here[name].dtype))


@pytest.mark.parametrize("verify", ["bucket", "off"])
def test_without_full_verification_no_digest_is_claimed(trainer: PretendTrainer, verify: str) -> None:
    weights = random_weights(12)
    here = empty(weights)
    sealed = trainer.publish(weights)
    report = make_loader(trainer, here, verify=verify).load(None)
    assert (report.digest, report.version) == (None, sealed.version)
    assert reference_digest(here, "BF16") == sealed.digest


def test_the_newest_version_is_loaded_unless_one_is_named(trainer: PretendTrainer) -> None:
    older, newest = trainer.publish(random_weights(13)), trainer.publish(random_weights(14))
    loader = make_loader(trainer, empty(random_weights(0)))
    assert (loader.load(None).version, loader.held) == (newest.version, newest.version)
    assert (loader.load(older.version).digest, loader.held) == (older.digest, older.version)


# ---- damage


@pytest.mark.parametrize("verify", ["full", "bucket"])
def test_damaged_bytes_are_told_with_what_they_are_of_and_the_next_version_loads(
    trainer: PretendTrainer, bucket_trainer: PretendTrainer, verify: str
) -> None:
    trainer = trainer if verify == "full" else bucket_trainer
    loader = make_loader(trainer, empty(random_weights(0)), verify=verify)
    trainer.publish(random_weights(21))
    loader.load(None)
    sealed = trainer.publish(random_weights(22))
    trainer.damage(sealed, PART, BYTE)
    what = rf"bucket 1 of part {PART} is damaged: " if verify == "bucket" else rf".*damaged: {DAMAGED}$"
    with pytest.raises(RunError, match=rf"^explorer-0 cannot load version {sealed.version}: {what}"):
        loader.load(sealed.version)
    assert loader.held is None
    assert_all_leases_have_ended(trainer)
    assert loader.load(None).version == loader.held


def test_bytes_that_were_damaged_on_the_way_only_are_taken_once_more(trainer: PretendTrainer) -> None:
    weights = random_weights(23)
    sealed = trainer.publish(weights)
    here = empty(weights)
    loader = make_loader(trainer, here, transport=Altered(trainer, times=1))
    assert loader.load(None).digest == sealed.digest == reference_digest(here, "BF16")
    assert loader.held == sealed.version


def test_the_digest_is_of_what_is_held_and_not_of_what_came(trainer: PretendTrainer) -> None:
    weights = random_weights(24)
    sealed = trainer.publish(weights)
    here = empty(weights)
    loader = make_loader(trainer, here, transport=Altered(trainer, times=9))
    with pytest.raises(RunError) as caught:
        loader.load(None)
    held = reference_digest(here, "BF16")
    assert held != sealed.digest
    for told in ("explorer-0", f"version {sealed.version}", f"holds {held}", f"trainer published {sealed.digest}"):
        assert told in str(caught.value)
    assert loader.held is None
    assert_all_leases_have_ended(trainer)


def test_a_slot_that_was_reused_under_a_slow_reader_is_not_taken_for_the_version(trainer: PretendTrainer) -> None:
    """The reader's lease ended while it read, and nothing but the lease could have told it."""
    weights = random_weights(25)
    sealed = trainer.publish(weights)

    member = RoundMember.new("explorer-0")

    class Slow(MemoryTransport):
        def buckets(self, lease: Any, broadcast: Any, find_destination: FindDestination) -> Iterator[Bucket]:
            trainer.synchronizer.drop_reader(member).result(LIMIT)
            for seed in (26, 27):
                trainer.publish(random_weights(seed))
            yield from super().buckets(lease, broadcast, find_destination)

    slow = Slow(trainer.agents, LayoutCache(trainer.agents, LIMIT), LIMIT, node_id())
    loader = make_loader(trainer, empty(weights), transport=slow, verify="off", member=member)
    with pytest.raises(RunError, match=rf"^explorer-0 .*lease .*version {sealed.version}.*sync\.lease_s"):
        loader.load(sealed.version)
    assert loader.held is None


@pytest.mark.parametrize("reread", [False, True])
def test_a_digest_of_what_was_read_again_after_it_proves_nothing_once_the_lease_is_lost(
    trainer: PretendTrainer, reread: bool
) -> None:
    weights = random_weights(28)
    sealed = trainer.publish(weights)
    member = RoundMember.new("explorer-0")

    class Late(LiveTensors):
        def take(self, *args: Any) -> LoadResult:
            taken = super().take(*args)
            trainer.synchronizer.drop_reader(member).result(LIMIT)
            return taken._replace(reread=reread)

    layouts = LayoutCache(trainer.agents, LIMIT)
    transport = MemoryTransport(trainer.agents, layouts, LIMIT, node_id())
    loader = WeightLoader(member, Late(empty(weights), transport, layouts, "full"), trainer.synchronizer)
    if reread:
        with pytest.raises(RunError, match=r"lost its lease on version .*sync\.lease_s"):
            loader.load(sealed.version)
        assert loader.held is None
    else:
        assert loader.load(sealed.version).digest == sealed.digest


def test_a_load_from_shared_memory_waits_for_a_gpu_once(
    trainer: PretendTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams are stand-ins; the slot's bytes stay until the lease ends."""
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    weights = random_weights(29)
    loader = make_loader(trainer, empty(weights))
    loader._target._receiver._cuda_devices = {torch.device("cuda")}  # type: ignore[attr-defined]
    sealed = trainer.publish(weights)
    assert sum(len(layout.buckets()) for layout in trainer.layouts.values()) > 2
    assert loader.load(None).digest == sealed.digest
    assert stream.synchronize.call_count == 1


# ---- what does not fit


def test_names_and_shapes_that_differ_are_listed_and_nothing_is_applied(trainer: PretendTrainer) -> None:
    here = empty(random_weights(0))
    del here["layers.0.norm.weight"]
    here["lm_head.weight"] = torch.zeros(33, 16)
    here["embed.weight"] = torch.zeros(32, 16)
    here["steps"] = torch.zeros(3)
    sealed = trainer.publish(random_weights(31))
    loader = make_loader(trainer, here)
    with pytest.raises(RunError) as caught:
        loader.load(None)
    text = str(caught.value)
    assert text.startswith(f"explorer-0 cannot load version {sealed.version}: ")
    for difference in (
        "1 missing (lm_head.weight)",
        "1 unexpected (layers.0.norm.weight)",
        "1 of another shape (embed.weight: 33x16 published, 32x16 here)",
        "1 of another dtype (steps: I64 published, F32 here)",
    ):
        assert difference in text
    assert loader.held is None
    assert all(not tensor.any() for tensor in here.values())
    assert_all_leases_have_ended(trainer)


@pytest.mark.parametrize("which", ["reused", "never published"])
def test_a_version_that_is_not_there_is_told_with_the_newest(trainer: PretendTrainer, which: str) -> None:
    first, *_, newest = [trainer.publish(random_weights(seed)).version for seed in (32, 33, 34)]
    wanted = first if which == "reused" else Version(0, 10_000)
    loader = make_loader(trainer, empty(random_weights(0)))
    loader.load(None)
    expected = rf"^explorer-0 cannot load: version {wanted} is not available \(newest: {newest}\)$"
    with pytest.raises(RunError, match=expected):
        loader.load(wanted)
    assert loader.held == newest


def test_a_version_whose_parts_are_gone_is_told(trainer: PretendTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.publish(random_weights(35))
    loader = make_loader(trainer, empty(random_weights(0)))
    monkeypatch.setattr("trinity_sync.weights.slots.map_segment", refuse)
    with pytest.raises(RunError, match="its node agent ended"):
        loader.load(None)
    assert loader.held is None
    monkeypatch.undo()
    assert_all_leases_have_ended(trainer)


def refuse(path: str, nbytes: int, *, populate: bool, map_segment: Any = map_segment) -> None:
    map_segment(f"{path}-gone", nbytes, populate=populate)


# ---- through files


@pytest.fixture
def mode(trainer: PretendTrainer, store: FolderStore) -> CheckpointPublisher:
    return CheckpointPublisher(side_of(trainer), store, durable=False)


@pytest.fixture
def reader(trainer: PretendTrainer) -> WeightLoader:
    return make_loader(trainer, empty(random_weights(0)), transport=CheckpointTransport())


def test_files_are_handed_to_the_store_with_their_digests(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore
) -> None:
    sealed = trainer.seal(random_weights(41))
    mode.publish(sealed)
    assert [path for path, _, _ in store.files] == [f"actor/weights_{part}.safetensors" for part in trainer.layouts]
    assert store.failed == []
    newest = trainer.synchronizer.find().result(LIMIT)
    assert newest is not None
    assert newest.location == str(store.begin(sealed.version, []))


def test_a_write_that_fails_is_told_and_the_version_before_stays_the_newest(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore
) -> None:
    mode.publish(before := trainer.seal(random_weights(42)))
    sealed = trainer.seal(random_weights(43))
    store.begin(sealed.version, []).write_text("in the way")
    with pytest.raises(RunError, match=rf"^the agent of node .* could not write version {sealed.version}: "):
        mode.publish(sealed)
    assert len(store.failed) == 1
    assert trainer.synchronizer.newest().result(LIMIT) == before.version
    trainer.synchronizer.discard(sealed.version).result(LIMIT)


def published_file(mode: CheckpointPublisher, trainer: PretendTrainer, store: FolderStore, seed: int) -> Path:
    sealed = trainer.seal(random_weights(seed))
    mode.publish(sealed)
    return store.begin(sealed.version, []) / "actor" / f"weights_{PART}.safetensors"


def test_a_damaged_file_is_told_with_the_tensor(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore, reader: WeightLoader
) -> None:
    path = published_file(mode, trainer, store, 44)
    with path.open("r+b") as file:
        file.seek(BYTE - trainer.layouts[PART].nbytes, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))
    with pytest.raises(RunError, match=rf"damaged: {DAMAGED}$"):
        reader.load(None)
    assert reader.held is None


@pytest.mark.parametrize("harm", ["is torn", "is missing", "cannot be read now: Input/output error"])
def test_a_file_that_is_not_all_there_is_told(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore, reader: WeightLoader, harm: str
) -> None:
    path = published_file(mode, trainer, store, 45)
    if harm == "is torn":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    elif harm == "is missing":
        path.unlink()
    else:
        unreadable(path)
    with pytest.raises(ShardFileError, match=rf"/weights_{PART}.safetensors {harm}"):
        reader.load(None)
    assert reader.held is None
    assert_all_leases_have_ended(trainer)


def test_a_file_of_another_layout_is_refused(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore, reader: WeightLoader
) -> None:
    path = published_file(mode, trainer, store, 46)
    path.write_bytes((path.parent / "weights_rank-00000.safetensors").read_bytes())
    with pytest.raises(RunError, match=rf"{path.name} has layout .*, the version was staged with"):
        reader.load(None)


def test_a_version_without_a_folder_is_refused(trainer: PretendTrainer, reader: WeightLoader) -> None:
    version = trainer.publish(random_weights(47)).version
    with pytest.raises(RunError, match=rf"^version {version} has no folder, though the sync mode is checkpoint$"):
        reader.load(None)


def test_the_folder_is_held_while_it_is_read(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore
) -> None:
    held: list[tuple[Path, Version]] = []
    prolonged: list[int] = []

    @contextmanager
    def hold(folder: Path, version: Version) -> Iterator[Callable[[], None]]:
        held.append((folder, version))
        yield lambda: prolonged.append(1)
        held.clear()

    path = published_file(mode, trainer, store, 48)
    seen = []

    class Watched(CheckpointTransport):
        def buckets(self, *args: Any) -> Iterator[Bucket]:
            for bucket in super().buckets(*args):
                seen.append(list(held))
                yield bucket

    weights = random_weights(48)
    reader = make_loader(trainer, empty(weights), transport=Watched(hold))
    version = reader.load(None).version
    assert len(seen) == sum(len(layout.pieces("tensor")) for layout in trainer.layouts.values()) > 2
    assert {tuple(holds) for holds in seen} == {((path.parents[1], version),)}
    assert len(prolonged) == len(seen)
    assert held == []


def test_a_file_on_a_bad_disk_is_told_and_the_version_loads_once_it_can_be_read(
    trainer: PretendTrainer,
    mode: CheckpointPublisher,
    store: FolderStore,
    reader: WeightLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = published_file(mode, trainer, store, 51)
    first = path.with_name("weights_rank-00000.safetensors")
    real, reads = os.preadv, []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        if reads[-1] == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ShardFileError, match=rf"/{path.name} cannot be read now: Input/output error$"):
        reader.load(None)
    assert (reads[0], reads[-1]) == (first, path), "it failed with half of the version applied"
    assert reader.held is None
    monkeypatch.undo()
    assert reader.load(None).version == reader.held
    assert_all_leases_have_ended(trainer)


@pytest.mark.parametrize("wire", [True, False], ids=["read in place", "cast"])
def test_a_file_that_is_cut_under_a_slow_explorer_is_an_error_and_does_not_kill_it(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore, wire: bool
) -> None:
    path = published_file(mode, trainer, store, 50)

    class Cut(CheckpointTransport):
        def buckets(self, *args: Any) -> Iterator[Bucket]:
            for bucket in super().buckets(*args):
                os.truncate(path, 4)
                yield bucket

    weights = {name: tensor.bfloat16() if wire else tensor for name, tensor in empty(random_weights(0)).items()}
    weights["steps"] = empty(random_weights(0))["steps"]
    slow = make_loader(trainer, weights, transport=Cut())
    with pytest.raises(ShardFileError, match=rf"{path.name} is torn: it has no byte"):
        slow.load(None)
    assert slow.held is None
    assert_all_leases_have_ended(trainer)


def test_a_version_whose_folder_was_deleted_is_not_loaded(
    trainer: PretendTrainer, mode: CheckpointPublisher, store: FolderStore
) -> None:
    def gone(folder: Path, version: Version) -> Any:
        raise RunError(f"the checkpoint of step {version.step} was deleted")

    published_file(mode, trainer, store, 49)
    reader = make_loader(trainer, empty(random_weights(49)), transport=CheckpointTransport(gone))
    with pytest.raises(RunError, match="was deleted"):
        reader.load(None)
    assert reader.held is None
    assert_all_leases_have_ended(trainer)


# ---- many at a time


def test_all_explorers_load_side_by_side_and_are_reported_in_order(trainer: PretendTrainer) -> None:
    def explorer(name: str) -> ExplorerClient:
        load = SimpleNamespace(remote=lambda version, broadcast=None: ray.put((name, version)))
        return ExplorerClient(SimpleNamespace(load=load), name)

    explorers = {name: explorer(name) for name in ("explorer-1", "explorer-0")}
    delivery = MemoryPublisher(side_of(trainer)).deliver(explorers, Version(0, 5))
    assert delivery.reports == [("explorer-1", Version(0, 5)), ("explorer-0", Version(0, 5))]
    assert delivery.lost == {}


def test_what_a_failed_load_overcame_is_told_by_the_report_of_the_next_one() -> None:
    version = Version(0, 3)
    lease = SimpleNamespace(id=1, version=version, digest=None)
    answer: Any = lambda value: SimpleNamespace(result=lambda timeout_s: value)  # noqa: E731
    synchronizer: Any = SimpleNamespace(
        timeout_s=LIMIT, lease=lambda *_: answer(lease), release=lambda *_: answer(True)
    )

    class Target:
        tries = 0

        def check(self, lease: Any) -> None: ...

        def take(self, *_: Any) -> LoadResult:
            self.tries += 1
            if self.tries == 1:
                loader.note_fault("node 2 was slow")
                raise RunError("nothing came")
            return LoadResult(1, None)

    target: Any = Target()
    loader = WeightLoader(RoundMember.new("explorer-0"), target, synchronizer)
    with pytest.raises(RunError, match="nothing came"):
        loader.load(None)
    assert [loader.load(None).fault for _ in range(2)] == ["node 2 was slow", None]
