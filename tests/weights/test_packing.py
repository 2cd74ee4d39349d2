"""Buckets of whole tensors: both ends agree on them, and what comes out is what went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.weights.apply import ChecksumError, check_bytes
from trinity_sync.weights.layout import ALIGNMENT, PartLayout
from trinity_sync.weights.packing import describe, layouts, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    described = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes, st.booleans()), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = {}
    for number, (dtype, shape, reversed_dims) in enumerate(described):
        tensor = torch.randint(0, 2 if dtype is torch.bool else 99, shape, generator=generator).to(dtype)
        # Not contiguous where it has more dimensions than one.
        found[f"tensor {number}"] = tensor.permute(tuple(range(tensor.ndim - 1, -1, -1))) if reversed_dims else tensor
    return found


def packed(state: dict[str, torch.Tensor], bucket_bytes: int) -> list[tuple[PartLayout, torch.Tensor]]:
    return [(bucket, data.clone()) for bucket, data in pack(state.items(), bucket_bytes=bucket_bytes)]


@settings(max_examples=40, deadline=None)
@given(state=states(), bucket_bytes=st.sampled_from([1, 64, 256, 1 << 16]))
def test_what_comes_out_is_what_went_in(state: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    found = {}
    for bucket, data in packed(state, bucket_bytes):
        assert data.numel() == bucket.nbytes
        assert bucket.nbytes <= bucket_bytes or len(bucket.entries) == 1
        assert all(offset % ALIGNMENT == 0 for _, offset in bucket.entries)
        found.update(unpack(bucket, data))
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())


@settings(max_examples=20, deadline=None)
@given(state=states(), bucket_bytes=st.sampled_from([64, 256]))
def test_the_receiver_knows_the_buckets_beforehand(state: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    assert list(layouts(describe(state.items()), bucket_bytes)) == [bucket for bucket, _ in packed(state, bucket_bytes)]


@settings(max_examples=20, deadline=None)
@given(state=states())
def test_the_bytes_of_a_bucket_depend_on_its_tensors_alone(state: dict[str, torch.Tensor]) -> None:
    """The room is used again and again, and what an earlier bucket left must not show."""
    again = {"first": torch.full((100,), 255, dtype=torch.uint8), **state}
    alone = [bytes(data.tolist()) for _, data in packed(state, 64)]
    assert [bytes(data.tolist()) for _, data in packed(again, 64)][1:] == alone


def test_floating_tensors_are_cast_for_the_wire() -> None:
    state = {"weight": torch.randn(3, 5), "count": torch.arange(3)}
    ((bucket, data),) = pack(state.items(), wire_dtype="BF16")
    found = dict(unpack(bucket, data))
    assert torch.equal(found["weight"], state["weight"].to(torch.bfloat16))
    assert torch.equal(found["count"], state["count"])


def test_damage_and_reordering_are_seen() -> None:
    state = {"weight": torch.randn(4, 4)}
    ((bucket, data),) = packed(state, 1 << 16)
    digest = xxh3_128_digest(data.numpy().data)
    check_bytes("bucket 0", data.numpy().data, bucket.nbytes, digest)
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    with pytest.raises(ChecksumError, match="bucket 0 is damaged"):
        check_bytes("bucket 0", swapped.numpy().data, bucket.nbytes, digest)
    with pytest.raises(ChecksumError, match=f"63 bytes instead of {bucket.nbytes}"):
        check_bytes("bucket 0", data[:63].numpy().data, bucket.nbytes, None)


def test_a_name_that_comes_twice_and_a_dtype_that_does_not_travel_are_refused() -> None:
    twice = [("weight", torch.zeros(2)), ("weight", torch.ones(2))]
    with pytest.raises(RunError, match="has weight twice"):
        list(pack(twice))
    with pytest.raises(ValueError, match=r"torch\.complex64 cannot travel"):
        list(pack([("weight", torch.zeros(2, dtype=torch.complex64))]))


def test_nothing_makes_no_bucket() -> None:
    assert list(pack([])) == []
    assert list(layouts([], 64)) == []
