"""Digests of rows on a GPU: the same bytes as on the CPU.

Without a GPU they run in Triton's interpreter, where Triton is installed and ``TRITON_INTERPRET=1`` was set before.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from xxhash import xxh3_128_digest

from tests.extra_packages import fetch
from trinity_sync import weights
from trinity_sync.weights import tensors
from trinity_sync.weights.tensors import from_torch, row_digests

NAME = "trinity_sync.weights.cuda_digests"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def digests() -> ModuleType:
    if DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("needs a GPU, or Triton's interpreter")
    return importlib.import_module(NAME)


@pytest.mark.parametrize("row_bytes", [248, 256, 1024, 1032, 1088, 2048, 2056, 6008])
def test_rows_have_the_digests_that_the_cpu_gives_them(digests: ModuleType, row_bytes: int) -> None:
    torch.manual_seed(row_bytes)
    matrix = torch.randint(0, 256, (11, row_bytes), dtype=torch.uint8)
    right = b"".join(xxh3_128_digest(row.numpy().data) for row in matrix)
    assert digests.row_digests(matrix.to(DEVICE), torch.uint8) == right


@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(5, 160).bfloat16(),
        torch.randn(5, 64, 3),
        torch.randn(160, 5).t(),
        torch.randn(1601)[1:].view(10, 160).bfloat16(),
        torch.randn(803).bfloat16()[3:].view(5, 160),
        torch.randn(3, 125).bfloat16()[:1, :124],
    ],
    ids=["plain", "experts", "turned", "cast", "odd address", "one row of odd stride"],
)
def test_a_cast_a_view_and_an_odd_address_change_nothing(digests: ModuleType, matrix: torch.Tensor) -> None:
    on_device = matrix.to(DEVICE) if DEVICE == "cuda" else matrix
    for dtype in (matrix.dtype, torch.bfloat16):
        assert digests.row_digests(on_device, dtype) == row_digests(matrix, from_torch(dtype))


def test_parts_of_a_matrix_are_digested_one_after_another(digests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 1000)
    matrix = torch.randn(7, 160)
    assert digests.row_digests(matrix.to(DEVICE), torch.float32) == row_digests(matrix, "F32")


def test_digests_of_several_matrices_are_read_from_a_gpu_at_once(
    digests: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not for it are digested by the CPU, in their places."""
    monkeypatch.setattr(tensors, "_gpu_digests", lambda: digests)
    read = Mock(wraps=digests.read)
    monkeypatch.setattr(digests, "read", read)
    some = [torch.randn(5, 160), torch.randn(3, 7), torch.zeros(0, 160), torch.randn(400), torch.randn(9, 128)]
    if DEVICE == "cpu":
        found = tensors._digests_on_gpu(dict(enumerate((one.reshape(-1, one.shape[-1]), "BF16") for one in some)))
        assert found == {number: row_digests(some[number], "BF16") for number in (0, 3, 4)}
    else:
        found = tensors.each_row_digests((one.to(DEVICE), "BF16") for one in some)
        assert found == [row_digests(one, "BF16") for one in some]
    assert read.call_count == 1


@pytest.mark.parametrize("row_bytes", [0, 8, 240, 250, (256 << 10) + 8])
def test_other_rows_are_for_the_cpu(digests: ModuleType, row_bytes: int) -> None:
    assert not digests.takes(row_bytes)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_digests_its_own_rows() -> None:
    assert tensors._gpu_digests() is not None


def test_a_gpu_without_triton_has_its_rows_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.delattr(weights, "cuda_digests", raising=False)
    tensors._gpu_digests.cache_clear()
    assert tensors._gpu_digests() is None
    assert "digests are not computed on the GPU" in caplog.text
    tensors._gpu_digests.cache_clear()


def test_a_kernel_that_fails_later_has_its_rows_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Mock(takes=lambda row_bytes: True, queue=Mock(side_effect=RuntimeError("out of disk")))
    monkeypatch.setattr(tensors, "_gpu_digests", lambda: broken)
    for _ in range(2):
        assert tensors._digests_on_gpu({0: (torch.zeros(2, 160), "BF16")}) == {}
    assert caplog.text.count("RuntimeError: out of disk") == 1


@pytest.mark.all
@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="this is the interpreter")
def test_the_kernel_gives_the_same_bytes_in_tritons_interpreter(tmp_path: Path) -> None:
    """The installation for CPUs leaves Triton out."""
    fetch(tmp_path, "triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
