from __future__ import annotations

import json
import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings

from tests.weights.helpers import CutVersion, cut_versions
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.shards import row_slice, whole


def example() -> PartLayout:
    return PartLayout.build("rank-00000", [whole("b", "BF16", (3,)), row_slice("a", "F32", (8, 40), 2, 5)], 128)


def test_shards_keep_their_order_and_start_on_64_byte_boundaries() -> None:
    assert [(shard.name, offset) for shard, offset in example().entries] == [("b", 0), ("a", 64)]
    assert example().nbytes == 64 + 3 * 40 * 4
    assert example().gaps == [(6, 64)]


def test_buckets_cover_the_segment() -> None:
    assert example().buckets() == [(0, 128), (128, 256), (256, 384), (384, 512), (512, 544)]


def test_a_part_that_holds_nothing_has_no_buckets() -> None:
    layout = PartLayout.build("rank-00001", [], 64)
    assert (layout.nbytes, layout.buckets(), len(layout.view(b""))) == (0, [], 0)


def test_cut_by_tensors_large_ones_travel_alone_and_small_ones_together() -> None:
    shapes = {"a": (3,), "b": (40,), "large": (300,), "c": (5,), "d": (100,), "e": (60,), "none": (0,), "more": (2,)}
    layout = PartLayout.build("p", [whole(name, "U8", shape) for name, shape in shapes.items()], 128)
    assert dict((shard.name, offset) for shard, offset in layout.entries) == {
        "a": 0, "b": 64, "large": 128, "c": 448, "d": 512, "e": 640, "none": 704, "more": 704
    }  # fmt: skip
    assert layout.pieces("tensor") == [(0, 104), (128, 256), (256, 384), (384, 428), (448, 453), (512, 612), (640, 706)]
    assert layout.pieces("bucket") == layout.buckets()


@given(cut_versions())
@settings(deadline=None)
def test_pieces_are_apart_no_longer_than_a_bucket_and_leave_no_shard_out(version: CutVersion) -> None:
    for layout in version.layouts:
        pieces = layout.pieces("tensor")
        assert all(0 < stop - start <= layout.bucket_bytes for start, stop in pieces)
        assert all(stop <= after for (_, stop), (after, _) in pairwise(pieces))
        covered = {byte for start, stop in pieces for byte in range(start, stop)}
        needed = {byte for shard, offset in layout.entries for byte in range(offset, offset + shard.nbytes)}
        assert needed <= covered <= set(range(layout.nbytes))


@given(cut_versions())
@settings(deadline=None)
def test_json_and_pickle_give_back_an_equal_layout_with_the_same_digest(version: CutVersion) -> None:
    for layout in version.layouts:
        again = PartLayout.from_json(json.loads(json.dumps(layout.to_json())))
        assert again == layout == pickle.loads(pickle.dumps(layout))
        assert again.digest == layout.digest


def test_the_digest_tells_layouts_apart() -> None:
    shards = [whole("b", "BF16", (3,)), whole("a", "F32", (8, 40))]
    digests = {
        PartLayout.build("p", shards, 64).digest,
        PartLayout.build("p", shards[::-1], 64).digest,
        PartLayout.build("p", shards, 128).digest,
        PartLayout.build("q", shards, 64).digest,
        PartLayout.build("p", [whole("b", "F16", (3,)), shards[1]], 64).digest,
    }
    assert len(digests) == 5


@pytest.mark.parametrize("bucket_bytes", [0, -64, 100])
def test_bucket_lengths_that_would_cut_elements_are_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match="expected a multiple of 64"):
        PartLayout.build("p", [], bucket_bytes)


def test_a_tensor_may_appear_once_in_a_part() -> None:
    with pytest.raises(ValueError, match="a appears twice"):
        PartLayout.build("p", [row_slice("a", "BF16", (4, 2), 0, 1), row_slice("a", "BF16", (4, 2), 2, 3)], 64)


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 10},
        {"bucket_bytes": 3},
        {"bucket_bytes": "64"},
        {"entries": [{"name": "a"}]},
        {"entries": [{"name": "a", "dtype": "BF17", "shape": [1], "offset": 0, "rects": []}]},
        {"entries": [{"name": "a", "dtype": "U8", "shape": [1], "offset": 7, "rects": [[0, 0, 0, 1, 1]]}], "nbytes": 8},
    ],
)
def test_a_description_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match="not a valid part layout"):
        PartLayout.from_json({**example().to_json(), **change})


def test_who_receives_a_layout_checks_it_and_works_its_digest_out_anew() -> None:
    layout = example()
    digest = layout.digest
    sent = pickle.dumps(layout)
    assert digest.encode() not in sent
    assert pickle.loads(sent) == layout
    assert pickle.loads(sent).digest == digest
    altered = example()
    object.__setattr__(altered, "nbytes", altered.nbytes + 1)
    with pytest.raises(LayoutError, match="not a valid part layout"):
        pickle.loads(pickle.dumps(altered))


def test_a_buffer_that_is_too_small_is_named_and_a_larger_one_is_cut() -> None:
    with pytest.raises(LayoutError, match="part rank-00000 needs 544 bytes, but only 500 are there"):
        example().view(bytes(500))
    assert len(example().view(bytes(600))) == 544
