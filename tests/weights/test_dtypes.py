from __future__ import annotations

import pytest

from trinity_sync.weights import shards
from trinity_sync.weights.tensors import castable, from_torch, to_torch, wire_name


@pytest.mark.parametrize("name", shards.NAMES)
def test_every_name_agrees_with_torch(name: str) -> None:
    dtype = to_torch(name)
    assert (from_torch(dtype), dtype.itemsize, dtype.is_floating_point) == (
        name,
        shards.itemsize(name),
        shards.is_floating(name),
    )


@pytest.mark.parametrize("ask", [shards.itemsize, shards.is_floating, to_torch])
def test_an_unknown_name_is_refused_with_the_known_ones(ask: object) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'BF17': expected one of BF16, "):
        ask("BF17")  # type: ignore[operator]


def test_a_torch_dtype_without_a_name_is_refused() -> None:
    import torch

    with pytest.raises(ValueError, match=r"torch\.complex64 cannot travel"):
        from_torch(torch.complex64)


def test_the_wire_dtype_is_for_floating_tensors_only() -> None:
    assert [wire_name(name, "BF16") for name in ("F32", "F16", "I64", "BOOL")] == ["BF16", "BF16", "I64", "BOOL"]
    assert wire_name("F32", None) == "F32"
    with pytest.raises(ValueError, match="I64 is not a floating one"):
        wire_name("F32", "I64")


def test_values_are_cast_between_floating_dtypes_only() -> None:
    assert castable("F32", "BF16")
    assert castable("I64", "I64")
    assert not castable("I64", "I32")
    assert not castable("F32", "I32")
