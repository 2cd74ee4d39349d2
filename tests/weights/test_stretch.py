"""Tensors that lie together are copied and digested together, and nothing comes out otherwise than one by one."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.helpers import raw, reference_digest
from trinity_sync.weights.apply import Receiver, groups
from trinity_sync.weights.digests import RowPlan, version_digest
from trinity_sync.weights.layout import Cut, PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.staging import Stretch, stage
from trinity_sync.weights.tensors import to_torch

SHAPES = [(32,), (64,), (2, 32), (4, 32), (2, 64), (1, 32), (3, 2, 16), (5,), (3, 7), (), (0, 32)]
Shapes = list[tuple[int, ...]]


def placed(shapes: Shapes, dtype: torch.dtype, rng: random.Random) -> list[torch.Tensor]:
    """Tensors that lie in one of two storages behind the one before, with a gap or turned, or in a storage of their
    own; of values that each floating dtype holds.
    """
    storages = [torch.zeros(sum(map(prod, shapes)) + 2 * len(shapes), dtype=dtype) for _ in range(2)]
    ends = [0, 0]
    found = []
    for shape in shapes:
        number, numel = rng.choice([0, 0, 0, 1]), prod(shape)
        way = rng.choice(["behind", "behind", "behind", "gap", "turned", "apart"])
        start = ends[number] + (way == "gap")
        flat = torch.zeros(numel, dtype=dtype) if way == "apart" else storages[number][start : start + numel]
        if way != "apart":
            ends[number] = start + numel
        flat.copy_(torch.tensor([rng.randrange(-127, 128) / 64 for _ in range(numel)]))
        found.append(flat.view(shape[::-1]).t() if way == "turned" and len(shape) == 2 else flat.view(shape))
    return found


@settings(deadline=None, max_examples=200)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=12),
    held=st.sampled_from([torch.float32, torch.bfloat16]),
    kinds=st.sampled_from([["BF16"], ["F32"], ["BF16", "BF16", "F32"]]),
    bucket_bytes=st.sampled_from([64, 192, 1024, 1 << 20]),
    by=st.sampled_from(["bucket", "tensor"]),
    rng=st.randoms(use_true_random=False),
)
def test_a_version_is_the_same_however_its_tensors_lie(
    shapes: Shapes, held: torch.dtype, kinds: list[str], bucket_bytes: int, by: Cut, rng: random.Random
) -> None:
    sources = {f"w{number}": tensor for number, tensor in enumerate(placed(shapes, held, rng))}
    names = list(sources) if rng.random() < 0.7 else rng.sample(list(sources), len(sources))
    shards = [whole(name, rng.choice(kinds), tuple(sources[name].shape)) for name in names]
    layout = PartLayout.build("p", shards, bucket_bytes)
    segment = bytearray(b"\xff" * layout.nbytes)
    stage(layout, sources, segment)

    on_wire = {shard.name: sources[shard.name].to(to_torch(shard.dtype)) for shard in shards}
    one_by_one = bytearray(layout.nbytes)
    for shard, offset in layout.entries:
        one_by_one[offset : offset + shard.nbytes] = raw(on_wire[shard.name])
    assert segment == one_by_one
    published = RowPlan([layout]).digest([segment]).version_digest()
    assert published == reference_digest(on_wire, None)

    there = rng.choice([torch.float32, to_torch(kinds[0])] if len(kinds) == 1 else [torch.float32])
    destinations = dict(zip(sources, placed(shapes, there, rng), strict=True))
    receiver = Receiver(destinations)
    receiver.check([layout])
    receiver.begin()
    for number, (start, stop) in enumerate(layout.pieces(by)):
        room = receiver.destination(layout, number, by)
        if room is None:
            receiver.take(layout, number, bytes(segment[start:stop]), None, by)
        else:
            room.copy_(torch.frombuffer(segment[start:stop], dtype=torch.uint8))
            receiver.received(layout, number, by)
    assert all(torch.equal(destinations[name], sources[name].to(there)) for name in sources)
    assert version_digest(receiver.taken()) == published


def parts_of(storage: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": part.view(-1, 32) for number, part in enumerate(storage.split(size))}


def test_parts_of_one_storage_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = parts_of(torch.randn(640), 64)
    layout = PartLayout.build("p", [whole(name, "BF16", (2, 32)) for name in sources], 1024)
    copies: list[int] = []
    copy = torch._foreach_copy_

    def counted(places: list[torch.Tensor], here: list[torch.Tensor]) -> None:
        copies.append(len(here))
        copy(places, here)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    stage(layout, sources, bytearray(layout.nbytes))
    assert copies == [1]
    [group] = groups(layout, sources)
    assert group.rows(1, 4) == (("w0", 1, 1), ("w1", 0, 2), ("w2", 0, 1))


def test_a_source_that_was_given_other_memory_is_copied_from_there() -> None:
    """As engines do that offload: the objects stay, what they refer to does not."""
    sources = parts_of(torch.zeros(256), 64)
    layout = PartLayout.build("p", [whole(name, "F32", (2, 32)) for name in sources], 1024)
    segment = bytearray(layout.nbytes)
    stage(layout, sources, segment)
    for number, source in enumerate(sources.values()):
        source.data = torch.full((2, 32), float(number))
    stage(layout, sources, segment)
    assert bytes(segment) == b"".join(raw(source) for source in sources.values())


def test_tensors_that_lie_together_by_chance_stay_apart() -> None:
    """An allocator may put one storage right behind another: neither reaches into the other."""
    memory = bytearray(512)
    first = torch.frombuffer(memory, dtype=torch.float32, count=64)
    second = torch.frombuffer(memory, dtype=torch.float32, count=64, offset=256)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    stretch = Stretch(first)
    assert not stretch.take(second)
    assert stretch.elements() is first
