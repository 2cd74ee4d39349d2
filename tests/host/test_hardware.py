"""What the kernel says of the processor and the GPUs, as text; what it does not say is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.host import hardware


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "x86_64")
    return tmp_path


def test_processor_vectors_and_gpus(kernel: Path) -> None:
    (kernel / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some  CPU\nflags\t\t: fpu avx2 avx512f sse\n\n"
        "processor\t: 1\nmodel name\t: Other\n"
    )
    for number in range(2):
        (kernel / "gpus" / f"0000:0{number}").mkdir(parents=True)
        (kernel / "gpus" / f"0000:0{number}" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 3\n")
    assert hardware.describe() == {
        "machine": "x86_64",
        "cpu": "Some CPU",
        "vectors": "avx512f",
        "gpus": "2 x NVIDIA H200",
    }


def test_arm(kernel: Path) -> None:
    (kernel / "cpuinfo").write_text("processor: 0\nFeatures: fp asimd sve\n")
    assert hardware.describe() == {"machine": "x86_64", "vectors": "sve"}


def test_a_kernel_that_says_nothing(kernel: Path) -> None:
    assert hardware.describe() == {"machine": "x86_64"}
