"""verl's own tests, where they are at hand: `VERL_TESTS` names the folder. The installed package has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.verl_programs.own_tests import files, lost

FOLDER = Path(os.environ.get("VERL_TESTS", ""))

FAILS_WITH_US = """
import os

def test_without():
    assert "VERL_ENGINE_VENDOR" not in os.environ

def test_both():
    pass

def test_neither():
    assert False
"""


@pytest.mark.all
@pytest.mark.skipif("VERL_TESTS" not in os.environ, reason="VERL_TESTS does not name verl's folder of tests")
def test_what_passes_without_the_plug_in_passes_with_it() -> None:
    assert files(FOLDER), f"{FOLDER} has no tests for CPUs"
    assert lost(FOLDER, files(FOLDER)) == []


def test_what_the_plug_in_breaks_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_some_on_cpu.py").write_text(FAILS_WITH_US)
    (tmp_path / "test_gpu.py").write_text("")
    assert files(tmp_path) == ["test_some_on_cpu.py"]
    (name,) = lost(tmp_path, files(tmp_path))
    assert name.endswith("::test_without")
