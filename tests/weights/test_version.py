"""A version's whole way: cut into parts, staged, digested on several nodes, written, read back and applied."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.weights.helpers import CutVersion, cut, cut_versions, random_tensor, raw, reference_digest
from trinity_sync.weights.apply import ChecksumError, Receiver, in_buckets
from trinity_sync.weights.digests import RowDigests, bucket_digests, digest_rows, version_digest
from trinity_sync.weights.shard_file import open_shard_file, write_shard_file
from trinity_sync.weights.shards import check_cover
from trinity_sync.weights.staging import stage


def staged(version: CutVersion) -> list[bytearray]:
    """Each part's segment, which held something else before."""
    segments = [bytearray(b"\xa5" * layout.nbytes) for layout in version.layouts]
    for layout, sources, segment in zip(version.layouts, version.sources, segments, strict=True):
        stage(layout, sources, segment)
    return segments


def receiver_for(tensors: dict[str, torch.Tensor]) -> tuple[Receiver, dict[str, torch.Tensor]]:
    destinations = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return Receiver(destinations), destinations


@given(cut_versions(), st.integers(1, 4), st.randoms())
@settings(deadline=None)
def test_any_cut_over_any_nodes_has_the_reference_digest(version: CutVersion, nodes: int, rng: random.Random) -> None:
    segments = staged(version)
    home = [rng.randrange(nodes) for _ in segments]
    parts = list(zip(version.layouts, segments, strict=True))
    found = [digest_rows([part for part, at in zip(parts, home, strict=True) if at == node]) for node in range(nodes)]
    arrived = [pickle.loads(pickle.dumps(one)) for one in found]
    rng.shuffle(arrived)
    halfway = RowDigests().merge(arrived[:2])
    assert halfway.merge(arrived[2:]).version_digest() == reference_digest(version.tensors, version.wire)


@given(cut_versions())
@settings(deadline=None)
def test_a_receiver_holds_the_bits_that_were_staged(version: CutVersion) -> None:
    check_cover(layout.shards for layout in version.layouts)
    expected = version.on_wire
    receiver, destinations = receiver_for(expected)
    receiver.check(version.layouts)
    for layout, segment in zip(version.layouts, staged(version), strict=True):
        receiver.apply(layout, segment, bucket_digests(segment, layout))
    assert {n: raw(t) for n, t in destinations.items()} == {n: raw(t) for n, t in expected.items()}
    assert receiver.digest(version.wire) == reference_digest(version.tensors, version.wire)


@given(cut_versions(), st.sampled_from([1, 100, 1 << 20]), st.sampled_from(["wire", "F32"]), st.randoms())
@settings(deadline=None)
def test_what_was_taken_digests_as_it_was_written_to_what_is_held(
    version: CutVersion, cached: int, here: str, rng: random.Random
) -> None:
    """Bucket by bucket and part by part in any order, whatever fits the cache, cast or not; again for each version."""
    tensors = version.on_wire
    if here == "F32":  # holds any value of the wire dtypes below it; the others stay as they are
        tensors = {
            n: t.float() if version.wire in ("BF16", "F16") and t.is_floating_point() else t for n, t in tensors.items()
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trinity_sync.weights.apply._CACHED_BYTES", cached)
        receiver, destinations = receiver_for(tensors)
        receiver.check(version.layouts)
        for _ in range(2):
            receiver.begin()
            for layout, segment in rng.sample(
                list(zip(version.layouts, staged(version), strict=True)), len(version.layouts)
            ):
                for bucket, data, _ in rng.sample(list(in_buckets(layout, segment, None)), len(layout.buckets())):
                    receiver.take(layout, bucket, data)
            taken = receiver.taken()
            assert (
                version_digest(taken) == receiver.digest(version.wire) == reference_digest(destinations, version.wire)
            )
            assert version_digest(taken) == reference_digest(version.tensors, version.wire)
            for tensor in destinations.values():
                tensor.zero_()


@given(cut_versions(), st.sampled_from(["wire", "F32"]), st.randoms())
@settings(deadline=None)
def test_what_is_received_where_it_belongs_is_what_was_staged(
    version: CutVersion, here: str, rng: random.Random
) -> None:
    """Pieces go to their room or, where they have none, through memory of their own, in any order."""
    tensors = version.on_wire
    if here == "F32":
        tensors = {
            n: t.float() if version.wire in ("BF16", "F16") and t.is_floating_point() else t for n, t in tensors.items()
        }
    receiver, destinations = receiver_for(tensors)
    receiver.check(version.layouts)
    receiver.begin()
    for layout, segment in zip(version.layouts, staged(version), strict=True):
        pieces = list(enumerate(layout.pieces("tensor")))
        for number, (start, stop) in rng.sample(pieces, len(pieces)):
            room = receiver.destination(layout, number, "tensor")
            if room is None:
                receiver.take(layout, number, segment[start:stop], cut="tensor")
            else:
                room.copy_(torch.frombuffer(segment[start:stop], dtype=torch.uint8))
                receiver.received(layout, number, "tensor")
    assert {n: raw(t) for n, t in destinations.items()} == {n: raw(t) for n, t in tensors.items()}
    assert version_digest(receiver.taken()) == reference_digest(version.tensors, version.wire)


@given(cut_versions())
@settings(deadline=None)
def test_shard_files_give_back_layout_bits_and_digest(
    tmp_path_factory: pytest.TempPathFactory, version: CutVersion
) -> None:
    folder: Path = tmp_path_factory.mktemp("files")
    receiver, destinations = receiver_for(version.on_wire)
    opened = []
    for layout, segment in zip(version.layouts, staged(version), strict=True):
        write_shard_file(folder / layout.part, layout, segment, {}, fsync=False)
        opened.append(open_shard_file(folder / layout.part))
        assert opened[-1][0] == layout
        assert bytes(opened[-1][1]) == bytes(segment)
        receiver.apply(*opened[-1], bucket_digests(segment, layout))
    assert {n: raw(t) for n, t in destinations.items()} == {n: raw(t) for n, t in version.on_wire.items()}
    assert digest_rows(opened).version_digest() == reference_digest(version.tensors, version.wire)


@given(cut_versions(), st.randoms())
@settings(deadline=None)
def test_a_flipped_bit_anywhere_in_a_segment_is_found(version: CutVersion, rng: random.Random) -> None:
    segments = staged(version)
    index = rng.randrange(len(segments))
    layout, segment = version.layouts[index], segments[index]
    assume(layout.nbytes)
    digests = bucket_digests(segment, layout)
    at = rng.randrange(len(segment))
    segment[at] ^= 1 << rng.randrange(8)
    receiver, _ = receiver_for(version.on_wire)
    with pytest.raises(ChecksumError, match=rf"bucket {at // layout.bucket_bytes} of part {layout.part} "):
        receiver.apply(layout, segment, digests)


@given(cut_versions(), st.randoms())
@settings(deadline=None)
def test_no_byte_of_a_damaged_bucket_reaches_a_destination(version: CutVersion, rng: random.Random) -> None:
    segments = staged(version)
    index = rng.randrange(len(segments))
    layout, segment = version.layouts[index], segments[index]
    assume(layout.nbytes)
    digests = bucket_digests(segment, layout)
    start, stop = rng.choice(layout.buckets())
    segment[start:stop] = bytes(byte ^ 0xFF for byte in segment[start:stop])
    receiver, destinations = receiver_for(version.on_wire)
    with pytest.raises(ChecksumError):
        receiver.apply(layout, segment, digests)
    for name, expected in version.on_wire.items():
        assert all(byte in (0, right) for byte, right in zip(raw(destinations[name]), raw(expected), strict=True))


@pytest.mark.parametrize("pool_threads", [None, 3])
def test_large_tensors_in_many_buckets_agree_with_and_without_a_pool(pool_threads: int | None) -> None:
    rng = random.Random(5)
    shapes = {"embed": (300, 4100), "odd": (3, 600_001), "tall": (9000, 33), "flat": (700_000,)}
    tensors = {name: random_tensor("BF16", shape, rng) for name, shape in shapes.items()}
    version = cut(tensors, "BF16", 3, 1 << 16, rng)
    segments = staged(version)
    receiver, destinations = receiver_for(tensors)
    pool = ThreadPoolExecutor(pool_threads) if pool_threads else None
    for layout, segment in zip(version.layouts, segments, strict=True):
        receiver.apply(layout, segment, bucket_digests(segment, layout, pool))
    assert all(torch.equal(destinations[n].view(torch.int16), t.view(torch.int16)) for n, t in tensors.items())
    rows = digest_rows(list(zip(version.layouts, segments, strict=True)), pool)
    assert rows.version_digest() == receiver.digest("BF16") == reference_digest(tensors, "BF16")
    if pool:
        pool.shutdown()
