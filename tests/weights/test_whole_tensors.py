"""Whole tensors, read from parts that were cut at random."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.helpers import CutVersion, cut_versions, local_elements, raw
from trinity_sync.weights.digests import RowPlan, digest_rows
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.loans import Loans
from trinity_sync.weights.shards import row_slice, whole
from trinity_sync.weights.staging import stage
from trinity_sync.weights.whole_tensors import WholeTensors


def staged(version: CutVersion) -> list[bytearray]:
    """The segments of all parts."""
    segments = []
    for layout, sources in zip(version.layouts, version.sources, strict=True):
        segments.append(bytearray(max(layout.nbytes, 1)))
        stage(layout, sources, segments[-1])
    return segments


@given(cut_versions(), st.one_of(st.none(), st.integers(1, 40)))
def test_tensors_are_what_was_cut(version: CutVersion, rows: int | None) -> None:
    wanted = version.on_wire
    plan = WholeTensors(version.layouts, {name: tensor.dtype for name, tensor in wanted.items()})
    tensors = plan.of(staged(version))
    for name, tensor in wanted.items():
        found = tensors.read(name, rows)
        first = tensor if rows is None or tensor.dim() < 2 else tensor[:rows]
        assert (found.dtype, found.shape, found.is_contiguous()) == (first.dtype, first.shape, True)
        assert raw(found) == raw(first)


@given(cut_versions(), st.sampled_from([torch.float32, torch.float64]))
def test_tensors_are_cast_to_what_they_are_to_be(version: CutVersion, dtype: torch.dtype) -> None:
    wanted = {name: one.to(dtype) for name, one in version.on_wire.items() if one.is_floating_point()}
    plan = WholeTensors(version.layouts, {name: dtype for name in wanted})
    tensors = plan.of(staged(version))
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors.read(name), tensor, rtol=0, atol=0, equal_nan=True)


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
    tensors = plan.of([view])
    del view
    found = tensors.read("matrix")
    assert found.untyped_storage().data_ptr() == tensors.parts[0].untyped_storage().data_ptr()
    segment[layout.entries[1][1]] ^= 1
    assert not torch.equal(found, MATRIX)
    segment[layout.entries[1][1]] ^= 1
    slice_of_it = found[2:, 1:3]
    del tensors, found
    gc.collect()
    with pytest.raises(BufferError):
        segment.append(0)  # a slice holds all of it
    assert torch.equal(slice_of_it, MATRIX[2:, 1:3])
    del slice_of_it
    gc.collect()
    assert alive() is None
    segment.append(0)


def test_what_has_to_be_cast_or_put_together_is_memory_of_its_own() -> None:
    kind = ("matrix", "BF16", (4, 6))
    halves = [row_slice(*kind, 0, 2), row_slice(*kind, 2, 4)]
    for shards, dtype in ((halves, torch.bfloat16), ([whole(*kind)], torch.float32)):
        layouts = [PartLayout.build(f"rank-{number:05d}", [shard], 64) for number, shard in enumerate(shards)]
        sources = [{"matrix": local_elements(MATRIX, shard)} for shard in shards]
        segments = staged(CutVersion({"matrix": MATRIX}, "BF16", layouts, sources))
        plan = WholeTensors(layouts, {"matrix": dtype})
        tensors = plan.of(segments)
        found = tensors.read("matrix")
        before = found.clone()
        for one in segments:
            one[:] = bytes(len(one))
        assert torch.equal(found, before)
        assert not torch.equal(tensors.read("matrix"), before)


def test_memory_is_lent_again_when_nothing_refers_to_it_and_not_before() -> None:
    loans = Loans()
    first, second = loans.lend(64), loans.lend(64)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    piece = first.view(torch.bfloat16)[4:6]
    del first
    gc.collect()
    third = loans.lend(64)
    assert third.data_ptr() not in places
    third.zero_()
    del piece, second
    gc.collect()
    assert {loans.lend(64).data_ptr() for _ in range(3)} <= places
    assert loans.lend(128).data_ptr() not in places
    kept = [loans.lend(64), loans.lend(64)]
    assert {one.data_ptr() for one in kept} == places
    kept[0].fill_(7)
    del loans
    gc.collect()
    assert kept[0].sum() == 7 * 64


def test_a_segment_that_is_too_short_is_refused() -> None:
    layout = PartLayout.build("rank-00000", [whole("matrix", "BF16", (4, 6))], 64)
    with pytest.raises(LayoutError, match="torn"):
        WholeTensors([layout], {"matrix": torch.bfloat16}).of([bytes(47)])
