"""Deltas of parts: whatever the versions and the spans, a reader gets the bits of the newest version."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trinity_sync.protocol.parts import delta_file
from trinity_sync.weights import delta
from trinity_sync.weights.delta import DeltaError, WrongBaseError
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.part_delta import PartDelta, PartEncoder, apply_steps, layer_group
from trinity_sync.weights.shards import itemsize, whole

LAYOUT = PartLayout.build(
    "rank-00000",
    [
        whole("embedding", "BF16", (700, 3)),
        whole("norm", "F32", (65,)),
        whole("nothing", "BF16", (0, 4)),
        whole("scale", "F32", ()),
        whole("steps", "I64", (5,)),
        whole("large", "BF16", (9, 250)),
    ],
    bucket_bytes=1024,
)
POOL = ThreadPoolExecutor(2)


def arrays(segment: bytearray, layout: PartLayout = LAYOUT) -> list[Any]:
    return [
        np.frombuffer(memoryview(segment)[start:stop], f"<u{itemsize(dtype)}") for start, stop, dtype in layout.by_shard
    ]


def versions(*shares: float, layout: PartLayout = LAYOUT) -> list[bytearray]:
    """Segments, each with any bits in a share of the elements of the one before; some bits come back."""
    random = np.random.default_rng(0)
    found = [bytearray(layout.nbytes)]
    for start, stop, _ in layout.by_shard:
        found[0][start:stop] = random.bytes(stop - start)
    for share in shares:
        new = bytearray(found[-1])
        for view, first in zip(arrays(new, layout), arrays(found[0], layout), strict=True):
            changed = random.random(view.size) < share
            bits = view + random.integers(-3, 4, view.size).astype(view.dtype)
            far = random.random(view.size) < 0.1
            view[changed] = np.where(far, np.frombuffer(random.bytes(view.nbytes), view.dtype), bits)[changed]
            back = random.random(view.size) < share / 4
            view[back] = first[back]
        found.append(new)
    return found


def all_deltas(segments: list[bytearray], codec: str = "auto") -> dict[tuple[int, int], bytes]:
    encoder = PartEncoder(LAYOUT, codec)
    found = {}
    for step, (old, new) in enumerate(itertools.pairwise(segments)):
        for one in encoder.encode((0, step), (0, step + 1), (old, new), POOL):
            found[one.start[1], step + 1] = b"".join(one.parts)
    return found


def applied(segment: bytearray, data: bytes, layout: PartLayout = LAYOUT) -> bytearray:
    found, read = bytearray(segment), PartDelta(layout, data, "a file")
    for number, view in enumerate(arrays(found, layout)):
        if (piece := read.pieces[number]) is not None:
            delta.apply(view, piece, layout.by_shard[number][2], view)
        assert delta.digest(view) == read.digests[number]
    return found


@pytest.mark.parametrize("share", [0.0, 0.002, 0.01])
@pytest.mark.parametrize("codec", ["auto", "gap8z", "sparse", "full"])
def test_every_delta_leads_from_its_start_to_its_end(codec: str, share: float) -> None:
    segments = versions(*[share] * 17)
    deltas = all_deltas(segments, codec)
    spans = {(start, start + 4) for start in (0, 4, 8, 12)} | ({(0, 16)} if share < 0.01 else set())
    assert deltas.keys() == {(step, step + 1) for step in range(17)} | spans
    for (start, end), data in deltas.items():
        assert applied(segments[start], data) == segments[end], (start, end)


@pytest.mark.parametrize("codec", ["auto", "gap8z", "full"])
def test_a_delta_leads_from_an_older_version_that_is_read_piece_by_piece(codec: str) -> None:
    segments = versions(*[0.01] * 3)
    encoder = PartEncoder(LAYOUT, codec, ())
    for step, pair in enumerate(itertools.pairwise(segments)):
        encoder.encode((0, step), (0, step + 1), pair, POOL)

    def read(start: int, into: memoryview) -> None:
        into[:] = segments[0][start : start + len(into)]

    found = encoder.encode_from((0, 0), read, segments[3], POOL)
    assert found.start == (0, 0)
    assert applied(segments[0], b"".join(found.parts)) == segments[3]


def test_a_merged_delta_is_smaller_than_those_that_it_stands_for() -> None:
    deltas = all_deltas(versions(*[0.01] * 4))
    assert len(deltas[0, 4]) < 0.8 * sum(len(deltas[step, step + 1]) for step in range(4))


def test_a_span_is_given_up_where_its_log_would_cost_too_much_and_the_next_one_begins_anew() -> None:
    deltas = all_deltas(versions(*[0.5] * 4, *[0.001] * 4))
    assert (0, 4) not in deltas
    assert (4, 8) in deltas


def test_a_log_takes_little_memory_even_of_a_version_in_which_all_changes() -> None:
    layout = PartLayout.build("rank-00000", [whole("large", "BF16", (1000, 1000))], bucket_bytes=1 << 16)
    encoder, pair = PartEncoder(layout, "full"), (bytearray(layout.nbytes), bytearray(b"\1") * layout.nbytes)
    assert peak_of(encoder, 0, pair) < layout.nbytes


def peak_of(encoder: PartEncoder, base: int, pair: tuple[bytearray, bytearray]) -> int:
    """The bytes that a call takes at its peak."""
    tracemalloc.start()
    try:
        encoder.encode((0, base), (0, base + 1), pair, POOL)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


VECTOR_LAYOUT = (
    '{"bucket_bytes":64,"entries":[{"dtype":"BF16","name":"a","offset":0,"rects":[[0,0,0,2,3]],"shape":[2'
    ',3]},{"dtype":"F32","name":"b","offset":64,"rects":[[0,0,0,1,2]],"shape":[2]}],"nbytes":72,"part":"r'
    'ank-00000"}'
)
VECTOR = (
    "545350314a777b9449defa4ff1d1b6e1442a8a4a17ebfce18d7cd3b7ed2ffeb1"
    "b59a66e800000000000000000400000000000000010000000000000005000000"
    "000000004400000000000000499ef6814f7586eb5c5fcfd807565eba01000000"
    "000000002c0a8a99dc147d5445c3b49d035665b2125453440700000006000000"
    "000000000100000000000000e6674c25262712b2faca856ad20a2da8499ef681"
    "4f7586eb5c5fcfd807565eba98f15d78584369f60100010010"
)
"""From version 0-4 of zeros to 1-5, in which the second element of `a` is 0x0001; docs/delta.md has both, too."""


def test_the_vector_of_the_file_of_a_part() -> None:
    layout = PartLayout.from_json(json.loads(VECTOR_LAYOUT))
    old, new = bytearray(layout.nbytes), bytearray(layout.nbytes)
    new[2] = 1
    [made] = PartEncoder(layout, "sparse", ()).encode((0, 4), (1, 5), (old, new), POOL)
    assert b"".join(made.parts).hex() == VECTOR
    assert applied(old, bytes.fromhex(VECTOR), layout) == new
    page = (Path(__file__).parents[2] / "docs" / "delta.md").read_text()
    assert f"| layout | `{VECTOR_LAYOUT}` |\n| file | `{VECTOR}` |" in page


def test_an_encoder_that_missed_a_version_begins_its_spans_anew() -> None:
    segments = versions(*[0.01] * 6)
    encoder = PartEncoder(LAYOUT, "auto")
    starts = []
    for base, step in [(0, 1), (0, 2), (2, 3), (3, 4), (4, 5)]:
        found = encoder.encode((0, base), (0, step), (segments[base], segments[step]), POOL)
        assert applied(segments[base], b"".join(found[0].parts)) == segments[step]
        starts.append([one.start[1] for one in found])
    assert starts == [[0], [0], [2], [3], [4, 0]]


def test_changed_elements_are_counted_whatever_the_codec() -> None:
    old, new = versions(0.3)
    for codec in ("class_gap", "sparse", "full"):
        encoder = PartEncoder(LAYOUT, codec)
        [found] = encoder.encode((0, 0), (0, 1), (old, new), POOL)
        differ = sum(int((a != b).sum()) for a, b in zip(arrays(old), arrays(new), strict=True))
        assert sum(found.changed.values()) == differ, codec


def test_changed_elements_are_counted_by_layer() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.11.norm.weight", "lm_head.weight"]
    layout = PartLayout.build("rank-00000", [whole(name, "BF16", (300, 3)) for name in names], bucket_bytes=1024)
    old, new = bytearray(layout.nbytes), bytearray(layout.nbytes)
    for count, (_, _, _, start, _) in zip((5, 0, 7, 900), layout.table, strict=True):
        new[start : start + 2 * count] = b"\1\1" * count
    encoder = PartEncoder(layout, "auto")
    [found] = encoder.encode((0, 0), (0, 1), (old, new), POOL)
    assert found.changed == {"embeddings": 5, "0": 0, "11": 7, "head": 900}
    assert encoder.elements == {"embeddings": 900, "0": 900, "11": 900, "head": 900}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.7.mlp.experts.3.up_proj.weight", "7"),
        ("transformer.h.12.attn.weight", "12"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "others"),
        (f"odd.{10**9}.weight", "others"),
    ],
)
def test_a_tensor_counts_for_the_layer_in_its_name(name: str, group: str) -> None:
    assert layer_group(name) == group


@pytest.mark.parametrize("cut", [0, 7, 9, 200, -1])
def test_a_truncated_delta_is_found(cut: int) -> None:
    data = all_deltas(versions(0.01))[0, 1]
    with pytest.raises(DeltaError):
        PartDelta(LAYOUT, data[:cut], "a file")


@pytest.mark.parametrize("byte", [0, 3, 4, 20, 36, 68, 80, -1])
def test_a_flipped_byte_is_found(byte: int) -> None:
    data = bytearray(all_deltas(versions(0.01))[0, 1])
    data[byte] ^= 1
    with pytest.raises(DeltaError, match="a file is "):
        PartDelta(LAYOUT, bytes(data), "a file")


def test_a_delta_of_another_layout_is_refused() -> None:
    other = PartLayout.build("rank-00001", LAYOUT.shards, LAYOUT.bucket_bytes)
    with pytest.raises(WrongBaseError, match="a file has layout"):
        PartDelta(other, all_deltas(versions(0.01))[0, 1], "a file")


def test_a_thousand_versions_end_bitwise_equal() -> None:
    layout = PartLayout.build("rank-00000", [whole("one", "BF16", (90, 3))], bucket_bytes=1024)
    segments = versions(*[0.02] * 50, layout=layout)
    walk = [*segments, *segments[-2:0:-1]] * 10 + segments[:2]
    encoder, held = PartEncoder(layout, "auto"), walk[0]
    for step, pair in enumerate(itertools.pairwise(walk)):
        held = applied(held, b"".join(encoder.encode((0, step), (0, step + 1), pair, POOL)[0].parts), layout)
    assert step >= 1000
    assert held == walk[-1] != walk[0]


@pytest.mark.parametrize("each", [False, True])
def test_steps_lead_to_the_last_version(tmp_path: Path, each: bool) -> None:
    segments = versions(0.01, 0.0, 0.01)
    segment, steps = walked(tmp_path, segments, each=each)
    assert segment == segments[-1]
    assert steps == [((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 2), (0, 3))]


def test_a_piece_that_the_last_step_leaves_as_it_is_is_compared_too(tmp_path: Path) -> None:
    segments = versions(0.01, 0.0)

    def damage(segment: bytearray, step: int) -> None:
        if step == 1:
            arrays(segment)[0][3] ^= 1

    with pytest.raises(DeltaError, match="another digest than its sender's"):
        walked(tmp_path, segments, damage)


def walked(
    folder: Path, segments: list[bytearray], between: Any = lambda segment, step: None, each: bool = False
) -> tuple[bytearray, list[Any]]:
    """Apply the single steps from the first version; `between` is called before each."""
    for (start, end), data in all_deltas(segments).items():
        (folder / str(end)).mkdir(exist_ok=True)
        (folder / str(end) / delta_file("rank-00000", (0, start))).write_bytes(data)
    steps = [((0, step), (0, step + 1)) for step in range(len(segments) - 1)]
    segment, seen = bytearray(segments[0]), []
    file_of = lambda part, step: folder / str(step[1][1]) / delta_file(part, step[0])  # noqa: E731
    for step in apply_steps(LAYOUT, segment, steps, file_of, POOL, each=each):
        between(segment, step[0][1])
        seen.append(step)
    return segment, seen
