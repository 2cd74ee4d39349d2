"""Comparing weights: bit by bit, with numbers that a NaN does not spoil."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trinity_sync.checkpoint import difference
from trinity_sync.checkpoint.difference import TensorDifference, compare
from trinity_sync.checkpoint.reading import open_weights

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "_CHUNK", 3)


def compared(
    folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], dtype: str | None = None
) -> dict[str, TensorDifference]:
    opened = []
    for name, tensors in (("a", a), ("b", b)):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        opened.append(open_weights(folder / name))
    return {found.name: found for found in compare(*opened, dtype=dtype)}


def one(folder: Path, a: torch.Tensor, b: torch.Tensor, dtype: str | None = None) -> TensorDifference:
    return compared(folder, {"x": a}, {"x": b}, dtype)["x"]


def test_equal_weights_do_not_differ_nan_or_not(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, NAN, -INF, -0.0, 3.0])
    found = one(tmp_path, tensor, tensor.clone())
    assert not found.differs
    assert (found.elements, found.changed, found.max_abs, found.relative) == (5, 0, 0.0, 0.0)


def test_what_changed_is_counted_and_measured(tmp_path: Path) -> None:
    found = one(
        tmp_path,
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [-10.0, 0.0]]),
        torch.tensor([[1.0, 2.5], [3.0, 3.0], [-10.0, 0.0]]),
    )
    assert found.differs
    assert (found.elements, found.changed, found.max_abs) == (6, 2, 1.0)
    assert found.mean_abs == pytest.approx(1.5 / 6)
    assert found.relative == pytest.approx(1.5 / 20)


def test_the_sign_of_zero_and_the_bits_of_a_nan_are_differences(tmp_path: Path) -> None:
    other = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    found = one(tmp_path, torch.tensor([NAN, -0.0]), other)
    assert (found.changed, found.max_abs, found.not_finite, found.relative) == (2, 0.0, 1, 0.0)


def test_what_is_not_finite_does_not_spoil_the_numbers(tmp_path: Path) -> None:
    found = one(tmp_path, torch.tensor([NAN, INF, 2.0, INF]), torch.tensor([1.0, 1.0, 3.0, INF]))
    assert (found.changed, found.not_finite, found.max_abs, found.mean_abs, found.relative) == (3, 2, 1.0, 0.25, 0.5)


def test_relative_to_nothing_there_is_no_number(tmp_path: Path) -> None:
    assert one(tmp_path, torch.zeros(3), torch.ones(3)).relative is None


def test_tensors_of_one_only_are_named(tmp_path: Path) -> None:
    found = compared(tmp_path, {"x": torch.ones(2), "y": torch.ones(1)}, {"x": torch.ones(2), "z": torch.ones(1)})
    assert {name: (of.a is None, of.b is None, of.differs) for name, of in found.items()} == {
        "x": (False, False, False),
        "y": (False, True, True),
        "z": (True, False, True),
    }


def test_shapes_differ(tmp_path: Path) -> None:
    found = one(tmp_path, torch.ones(2, 3), torch.ones(3, 2))
    assert found.differs
    assert found.elements == 0


def test_dtypes_differ_and_values_are_compared(tmp_path: Path) -> None:
    found = one(tmp_path, torch.tensor([1.0, NAN, 0.1]), torch.tensor([1.0, NAN, 0.1]).bfloat16())
    assert found.differs
    assert (found.changed, found.elements) == (1, 3)


def test_both_can_be_cast_first(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        {"x": torch.tensor([0.1]), "count": torch.tensor([300])},
        {"x": torch.tensor([0.1]).bfloat16(), "count": torch.tensor([300])},
        "BF16",
    )
    assert not any(of.differs for of in found.values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float64])
def test_all_dtypes_are_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    found = one(tmp_path, torch.tensor([0, 1, 1, 0]).to(dtype), torch.tensor([0, 1, 0, 0]).to(dtype))
    assert (found.changed, found.max_abs) == (1, 1.0)


def test_scalars_and_empty_tensors_are_compared(tmp_path: Path) -> None:
    found = compared(
        tmp_path, {"s": torch.tensor(1.0), "e": torch.empty(0, 3)}, {"s": torch.tensor(2.0), "e": torch.empty(0, 3)}
    )
    assert (found["s"].changed, found["e"].differs, found["e"].elements) == (1, False, 0)
