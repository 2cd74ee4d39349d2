"""What workers do with a version that they map, without an engine: who checks what, and what is touched."""

from __future__ import annotations

import gc
import mmap
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.weights.helpers import CutVersion, cut, reference_digest
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.arrivals import Arrival, MappedArrivals, Share, share_of
from trinity_sync.sync.base import LayoutCache, MappedPart
from trinity_sync.sync.maps import SlotMaps
from trinity_sync.weights.apply import ChecksumError
from trinity_sync.weights.digests import bucket_digests, version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.packing import WholeTensors
from trinity_sync.weights.shards import whole
from trinity_sync.weights.slots import SlotArena
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import from_torch

NAMES = [f"layers.{number}.weight" for number in (10, 2, 0)]
TENSORS = {name: torch.randn(40, 16).bfloat16() for name in NAMES} | {"norm": torch.ones(40).bfloat16()}


class Segments:
    """Parts in this process's memory (a `PartMaps`)."""

    def __init__(self, version: CutVersion, *, buckets: bool = False) -> None:
        self.layouts = version.layouts
        self.segments = [mmap.mmap(-1, max(layout.nbytes, 1)) for layout in version.layouts]
        for layout, sources, segment in zip(version.layouts, version.sources, self.segments, strict=True):
            stage(layout, sources, segment)
        self._buckets = [
            bucket_digests(segment, layout) if buckets else None
            for layout, segment in zip(self.layouts, self.segments, strict=True)
        ]

    def map(self, lease: Lease) -> list[MappedPart]:
        parts = zip(self.layouts, self.segments, self._buckets, strict=True)
        return [MappedPart(layout, segment, buckets) for layout, segment, buckets in parts]


def lease_of(parts: Sequence[PartInfo] = ()) -> Lease:
    named = {info.part: info for info in parts}
    return Lease(id=0, reader=0, version=Version(0, 3), slot=0, expires=0.0, parts=named, digest=None, location=None)


Room = Callable[[Segments], str]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """Makes the file of the segment in which the tensors of versions are put together."""

    def make(maps: Segments) -> str:
        dtypes = {name: tensor.dtype for name, tensor in TENSORS.items()}
        path = tmp_path / "together"
        path.write_bytes(bytes(WholeTensors(maps.layouts, dtypes).together.nbytes))
        return str(path)

    return make


def worker(maps: Segments | SlotMaps, verify: str = "full", rank: int = 0, workers: int = 1) -> MappedArrivals:
    shapes = {name: (from_torch(tensor.dtype), tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    return MappedArrivals(shapes, LayoutCache({}, 1.0), maps, verify, Share(rank, workers))


def cut_at_random(bucket_bytes: int = 256) -> CutVersion:
    return cut(dict(TENSORS), "BF16", 3, bucket_bytes, random.Random(1))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_look_at_each_tensor_once_and_together_have_the_digest_of_the_version(room: Room, workers: int) -> None:
    maps = Segments(cut_at_random())
    arrival = Arrival(lease_of(), None, (), room(maps))
    arrived = [worker(maps, rank=rank, workers=workers).take(arrival) for rank in range(workers)]
    assert sorted(name for one in arrived for name in one.digests) == sorted(TENSORS)
    joined = {name: digest for one in arrived for name, digest in one.digests.items()}
    entries = [(name, "BF16", tuple(tensor.shape), joined[name]) for name, tensor in TENSORS.items()]
    assert version_digest(entries) == reference_digest(TENSORS, "BF16")
    assert {one.moved for one in arrived} == {sum(layout.nbytes for layout in maps.layouts)}


@pytest.mark.parametrize("verify", ["full", "bucket", "off"])
def test_each_worker_puts_its_share_together_and_all_read_what_all_have(room: Room, verify: str) -> None:
    maps = Segments(cut_at_random())
    arrival = Arrival(lease_of(), None, (), room(maps))
    together = Path(arrival.together or "")
    workers = [worker(maps, verify, rank, 3) for rank in range(3)]
    written = []
    for one in workers:
        before = together.read_bytes()
        one.take(arrival)
        written.append(sum(a != b for a, b in zip(before, together.read_bytes(), strict=True)))
    assert all(written)
    assert sum(written) <= together.stat().st_size
    for layout, segment in zip(maps.layouts, maps.segments, strict=True):
        segment[: layout.nbytes] = bytes(layout.nbytes)  # of these bytes nothing is put together any more
    for one in workers:
        found = dict(one.tensors("3"))
        assert all(torch.equal(found[name], TENSORS[name]) for name in NAMES)


def test_workers_have_about_as_much_to_look_at() -> None:
    rng = random.Random(3)
    sizes = [rng.randrange(1, 4000) for _ in range(300)]
    named = {str(n): size for n, size in enumerate(sizes)}
    shares = [share_of(named, Share(rank, 8)) for rank in range(8)]
    assert sorted(name for share in shares for name in share) == sorted(map(str, range(300)))
    loads = [sum(sizes[int(name)] for name in share) for share in shares]
    assert max(loads) < 1.02 * min(loads)


def damage_found_by(one: MappedArrivals, arrival: Arrival) -> str | None:
    try:
        one.take(arrival)
    except ChecksumError as error:
        return str(error)
    return None


def test_each_bucket_is_checked_by_one_of_the_workers(room: Room) -> None:
    maps = Segments(cut_at_random(), buckets=True)
    arrival = Arrival(lease_of(), None, (), room(maps))
    workers = [worker(maps, "bucket", rank, 3) for rank in range(3)]
    for layout, segment in zip(maps.layouts, maps.segments, strict=True):
        for number, (start, _) in enumerate(layout.buckets()):
            segment[start] ^= 1
            [told] = filter(None, (damage_found_by(one, arrival) for one in workers))
            assert f"bucket {number} of part {layout.part} is damaged" in told
            segment[start] ^= 1
    assert all(one.take(arrival).digests == {} for one in workers)


def test_tensors_come_layer_by_layer_of_the_version_that_arrived_until_it_is_let_go() -> None:
    shards = [whole(name, "BF16", tuple(tensor.shape)) for name, tensor in TENSORS.items()]
    maps = Segments(CutVersion(TENSORS, "BF16", [PartLayout.build("rank-00000", shards, 256)], [TENSORS]))
    one = worker(maps)
    one.take(Arrival(lease_of(), None, ()))
    with pytest.raises(RunError, match="version 4 is to be used, but 3 has arrived"):
        next(one.tensors("4"))
    found = dict(one.tensors("3"))
    assert list(found) == ["norm", *reversed(NAMES)]
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    with pytest.raises(BufferError):
        maps.segments[0].close()
    del found
    one.let_go()
    gc.collect(1)
    for segment in maps.segments:
        segment.close()
    with pytest.raises(RunError, match="but none has arrived"):
        next(one.tensors("3"))


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    text = Path("/proc/self/smaps").read_text()
    [sizes] = re.findall(rf"{re.escape(str(path))}\n(?:[A-Z]\w*:.*\n)*?Rss: +(\d+) kB", text)
    return int(sizes) << 10


def test_of_a_tensor_that_lies_whole_in_a_slot_a_worker_touches_its_own_slice_only(tmp_path: Path) -> None:
    """As vLLM's loaders do: the half of the rows is narrowed to, and copied."""
    shape = (4096, 2048)
    layout = PartLayout.build("rank-00000", [whole("matrix", "BF16", shape)], 1 << 20)
    layouts = LayoutCache({}, 1.0)
    layouts.learn(layout)
    with SlotArena.create("slice", 1, {layout.part: layout.nbytes}, fallback=tmp_path) as arena:
        path = arena.path(0, layout.part)
        info = PartInfo(
            part=layout.part, node="here", path=str(path), nbytes=layout.nbytes, layout=layout.digest, buckets=None
        )
        arena._maps.pop((0, layout.part)).close()  # the owner's own mapping, all of whose pages are in place
        one = MappedArrivals({"matrix": ("BF16", shape)}, layouts, SlotMaps(layouts), "off", Share(1, 2))
        one.take(Arrival(lease_of([info]), None, ()))
        assert resident(path) == 0
        [(_, matrix)] = one.tensors("3")
        mine = matrix.narrow(0, 2048, 2048).clone()
        assert 0.5 <= resident(path) / layout.nbytes < 0.55
        assert torch.equal(mine, torch.zeros(2048, 2048).bfloat16())
