"""Whole tensors, in parts that were cut at random and in the segment in which they are put together."""

from __future__ import annotations

import gc
import weakref
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.helpers import CutVersion, cut_versions, raw
from trinity_sync.weights.apply import Receiver
from trinity_sync.weights.digests import RowPlan, digest_rows
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.packing import WholeTensors
from trinity_sync.weights.shards import row_slice, whole
from trinity_sync.weights.staging import stage


def staged(version: CutVersion) -> list[bytearray]:
    """The segments of all parts."""
    segments = []
    for layout, sources in zip(version.layouts, version.sources, strict=True):
        segments.append(bytearray(max(layout.nbytes, 1)))
        stage(layout, sources, segments[-1])
    return segments


def put_together(plan: WholeTensors, version: CutVersion, segments: list[bytearray]) -> dict[str, torch.Tensor]:
    """The tensors, those that no part holds whole by a receiver."""
    views = plan.views([*segments, bytearray(plan.together.nbytes)])
    spread = {shard.name for shard in plan.together.shards}
    receiver = Receiver({name: views[name] for name in spread})
    for layout, segment in zip(version.layouts, segments, strict=True):
        receiver.apply(layout.only(spread), segment)
    return views


@given(cut_versions())
def test_tensors_are_what_was_cut(version: CutVersion) -> None:
    wanted = version.on_wire
    plan = WholeTensors(version.layouts, {name: tensor.dtype for name, tensor in wanted.items()})
    found = put_together(plan, version, staged(version))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        one = found[name]
        assert (one.dtype, one.shape, one.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert raw(one) == raw(tensor)


@given(cut_versions(), st.sampled_from([torch.float32, torch.float64]))
def test_tensors_are_cast_to_what_they_are_to_be(version: CutVersion, dtype: torch.dtype) -> None:
    wanted = {
        name: one.to(dtype) if one.is_floating_point() and one.dtype != torch.float64 else one
        for name, one in version.on_wire.items()
    }
    plan = WholeTensors(version.layouts, {name: one.dtype for name, one in wanted.items()})
    found = put_together(plan, version, staged(version))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


@given(cut_versions(), st.randoms(use_true_random=False))
def test_what_is_put_together_is_laid_out_alike_for_all(version: CutVersion, rng: Random) -> None:
    dtypes = {name: tensor.dtype for name, tensor in version.on_wire.items()}
    mixed = rng.sample(version.layouts, len(version.layouts))
    assert WholeTensors(version.layouts, dtypes).together == WholeTensors(mixed, dtypes).together


@given(cut_versions(), st.integers(1, 4))
def test_shares_of_a_layout_digest_to_what_the_whole_does(version: CutVersion, shares: int) -> None:
    segments = staged(version)
    pairs = list(zip(version.layouts, segments, strict=True))
    names = sorted(version.tensors)
    joined: dict[str, bytes] = {}
    for number in range(shares):
        plan = RowPlan([layout.only(set(names[number::shares])) for layout in version.layouts])
        digests = plan.digest(segments).tensor_digests()
        assert sorted(digests) == names[number::shares]
        joined |= digests
    assert joined == digest_rows(pairs).tensor_digests()


MATRIX = torch.arange(24.0).bfloat16().view(4, 6)


def test_what_one_part_holds_whole_is_a_view_of_it_and_keeps_it_mapped_for_no_longer_than_it_is_there() -> None:
    layout = PartLayout.build("rank-00000", [whole("first", "I64", (3,)), whole("matrix", "BF16", (4, 6))], 64)
    segment = bytearray(layout.nbytes)
    stage(layout, {"first": torch.arange(3), "matrix": MATRIX}, segment)
    view = memoryview(segment)
    alive = weakref.ref(view)
    plan = WholeTensors([layout], {"first": torch.int64, "matrix": torch.bfloat16})
    assert plan.together.nbytes == 0
    found = plan.views([view, b""])["matrix"]
    del view
    segment[layout.entries[1][1]] ^= 1
    assert not torch.equal(found, MATRIX)
    segment[layout.entries[1][1]] ^= 1
    slice_of_it = found[2:, 1:3]
    del found
    gc.collect(1)
    with pytest.raises(BufferError):
        segment.append(0)  # a slice holds all of it
    assert torch.equal(slice_of_it, MATRIX[2:, 1:3])
    del slice_of_it
    gc.collect(1)
    assert alive() is None
    segment.append(0)


def test_what_has_to_be_cast_or_is_spread_and_nothing_else_is_put_together() -> None:
    kind = ("matrix", "BF16", (4, 6))
    parts = [
        PartLayout.build(
            "rank-00000", [row_slice(*kind, 0, 2), whole("wide", "F32", (5,)), whole("cast", "BF16", ())], 64
        ),
        PartLayout.build("rank-00001", [row_slice(*kind, 2, 4)], 64),
    ]
    plan = WholeTensors(parts, {"matrix": torch.bfloat16, "wide": torch.float32, "cast": torch.float32})
    assert [(one.name, one.dtype, one.shape) for one in plan.together.shards] == [
        ("cast", "F32", ()),
        ("matrix", "BF16", (4, 6)),
    ]


def test_a_segment_that_is_too_short_is_refused() -> None:
    layout = PartLayout.build("rank-00000", [whole("matrix", "BF16", (4, 6))], 64)
    with pytest.raises(LayoutError, match="torn"):
        WholeTensors([layout], {"matrix": torch.bfloat16}).views([bytes(47), b""])
