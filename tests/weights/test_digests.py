from __future__ import annotations

import pickle
import random

import pytest
import torch
import xxhash

from tests.weights.helpers import cut, random_tensor, raw, reference_digest
from trinity_sync.weights.digests import IncompleteError, RowDigests, bucket_digests, digest_rows, version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import CoverageError, Rect, Shard, flat_range, row_slice, whole
from trinity_sync.weights.staging import stage


def part(name: str, shards: list[Shard], tensors: dict[str, torch.Tensor]) -> tuple[PartLayout, bytearray]:
    layout = PartLayout.build(name, shards, 64)
    segment = bytearray(layout.nbytes)
    for shard, offset in layout.entries:
        matrix = tensors[shard.name].reshape(shard.matrix)
        local = b"".join(raw(matrix[r.row : r.row + r.rows, r.col : r.col + r.cols]) for r in shard.rects)
        segment[offset : offset + len(local)] = local
    return layout, segment


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": random_tensor("BF16", (6, 40), random.Random(1))}


def test_the_definition_on_a_small_example() -> None:
    rows = [bytes([1, 2, 3]), bytes([4, 5, 6])]
    layout = PartLayout.build("p", [whole("w", "U8", (2, 3)), whole("s", "I16", ())], 64)
    segment = bytearray(layout.nbytes)
    segment[0:6], segment[64:66] = rows[0] + rows[1], b"\x01\x02"
    tensor = xxhash.xxh3_128(xxhash.xxh3_128(rows[0]).digest() + xxhash.xxh3_128(rows[1]).digest()).hexdigest()
    scalar = xxhash.xxh3_128(xxhash.xxh3_128(b"\x01\x02").digest()).hexdigest()
    lines = f"s I16  {scalar}\nw U8 2x3 {tensor}\n"
    assert digest_rows([(layout, segment)]).version_digest() == xxhash.xxh3_128(lines.encode()).hexdigest()


def test_a_version_digest_does_not_depend_on_the_order_of_its_tensors() -> None:
    tensors = [("b", "U8", (1,), b"x" * 16), ("a", "BF16", (2, 2), b"y" * 16), ("a.b", "U8", (), b"z" * 16)]
    assert version_digest(tensors) == version_digest(tensors[::-1])


def test_bucket_digests_are_of_the_bytes_between_the_bounds(weights: dict[str, torch.Tensor]) -> None:
    layout, segment = part("p", [whole("w", "BF16", (6, 40))], weights)
    assert bucket_digests(segment, layout) == [xxhash.xxh3_128(segment[a:b]).digest() for a, b in layout.buckets()]


def test_rows_split_over_parts_of_one_node_need_no_fragments(weights: dict[str, torch.Tensor]) -> None:
    parts = [
        part("p", [flat_range("w", "BF16", (6, 40), 0, 90)], weights),
        part("q", [flat_range("w", "BF16", (6, 40), 90, 240)], weights),
    ]
    rows = digest_rows(parts)
    assert rows.tensors["w"].fragments == ()
    assert rows.version_digest() == reference_digest(weights, "BF16")


def test_only_rows_that_are_split_over_nodes_travel_as_fragments(weights: dict[str, torch.Tensor]) -> None:
    here = digest_rows([part("p", [flat_range("w", "BF16", (6, 40), 0, 90)], weights)])
    assert [(f.row, f.col, f.rows, f.cols) for f in here.tensors["w"].fragments] == [(2, 0, 1, 10)]
    assert [(row, len(digests)) for row, digests in here.tensors["w"].runs] == [(0, 32)]


def test_rows_that_follow_each_other_are_one_run_however_many_batches_they_took() -> None:
    layout = PartLayout.build("p", [whole("w", "U8", (3000, 1000))], 1 << 20)
    rows = digest_rows([(layout, bytes(3_000_000))])
    assert [(row, len(digests)) for row, digests in rows.tensors["w"].runs] == [(0, 48_000)]


def test_fragments_outlive_the_segment_they_came_from(weights: dict[str, torch.Tensor]) -> None:
    layout, segment = part("p", [flat_range("w", "BF16", (6, 40), 0, 90)], weights)
    other = digest_rows([part("q", [flat_range("w", "BF16", (6, 40), 90, 240)], weights)])
    here = digest_rows([(layout, segment)])
    segment[:] = bytes(len(segment))
    segment.clear()  # and nothing holds on to it, or this would be refused
    assert here.merge([other]).version_digest() == reference_digest(weights, "BF16")


def test_merging_changes_none_of_the_merged(weights: dict[str, torch.Tensor]) -> None:
    here = digest_rows([part("p", [flat_range("w", "BF16", (6, 40), 0, 90)], weights)])
    other = digest_rows([part("q", [flat_range("w", "BF16", (6, 40), 90, 240)], weights)])
    before = pickle.dumps((here, other))
    here.merge([other])
    assert pickle.dumps((here, other)) == before


def test_missing_rows_are_named(weights: dict[str, torch.Tensor]) -> None:
    shard = Shard("w", "BF16", (6, 40), (Rect(0, 1, 0, 1, 40), Rect(80, 3, 0, 1, 40), Rect(160, 5, 0, 1, 20)))
    rows = digest_rows([part("p", [shard, whole("v", "BF16", (3,))], {**weights, "v": torch.zeros(3).bfloat16()})])
    with pytest.raises(IncompleteError, match=r"rows are missing: w rows 0, 2, 4-5$"):
        rows.version_digest()


def test_a_row_given_twice_on_one_node_is_an_error(weights: dict[str, torch.Tensor]) -> None:
    parts = [part(name, [row_slice("w", "BF16", (6, 40), 0, 4)], weights) for name in "pq"]
    with pytest.raises(CoverageError, match="w: row 0 is held twice"):
        digest_rows(parts)


def test_elements_given_twice_in_a_split_row_are_an_error(weights: dict[str, torch.Tensor]) -> None:
    parts = [
        part(n, [flat_range("w", "BF16", (6, 40), *span)], weights) for n, span in [("p", (0, 30)), ("q", (20, 40))]
    ]
    with pytest.raises(CoverageError, match="w: row 0 is held twice"):
        digest_rows(parts)


def test_a_row_given_by_two_nodes_is_an_error(weights: dict[str, torch.Tensor]) -> None:
    here, other = (
        digest_rows([part("p", [row_slice("w", "BF16", (6, 40), *span)], weights)]) for span in [(0, 4), (3, 6)]
    )
    with pytest.raises(CoverageError, match="w: row 3 is held by two nodes"):
        here.merge([other])


def test_a_fragment_of_a_row_that_another_node_has_whole_is_an_error(weights: dict[str, torch.Tensor]) -> None:
    here = digest_rows([part("p", [whole("w", "BF16", (6, 40))], weights)])
    other = digest_rows([part("q", [flat_range("w", "BF16", (6, 40), 0, 10)], weights)])
    with pytest.raises(CoverageError, match=r"held by several parts: w$"):
        here.merge([other]).version_digest()


def test_nodes_must_agree_on_dtype_and_shape(weights: dict[str, torch.Tensor]) -> None:
    here = digest_rows([part("p", [row_slice("w", "BF16", (6, 40), 0, 3)], weights)])
    other = RowDigests({"w": here.tensors["w"]._replace(shape=(3, 80))})
    with pytest.raises(CoverageError, match="w: its dtype or shape differs"):
        here.merge([other])


def test_parts_of_a_node_must_agree_on_dtype_and_shape(weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CoverageError, match="w: its dtype or shape differs"):
        digest_rows([part(n, [Shard("w", dtype, (6, 40), ())], weights) for n, dtype in [("p", "BF16"), ("q", "F16")]])


def test_padding_is_no_part_of_the_version_digest() -> None:
    tensors = {"a": torch.ones(3).bfloat16(), "b": torch.ones(2, 5).bfloat16()}
    version = cut(tensors, "BF16", 1, 64, random.Random(0))
    layout = version.layouts[0]
    segment = bytearray(layout.nbytes)
    stage(layout, version.sources[0], segment)
    for start, stop in layout.gaps:
        segment[start:stop] = b"\xff" * (stop - start)
    assert digest_rows([(layout, segment)]).version_digest() == reference_digest(tensors, "BF16")
