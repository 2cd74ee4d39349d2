"""Models go through whole runs and come back as they came. `tests.round_trips` tries all families, this file some."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.round_trips import RESULTS, results_of

KNOWN = json.loads(RESULTS.read_text())

pytestmark = pytest.mark.all


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(family: str) -> dict[str, Any]:
    return results_of([family])[family]


def test_trainers_and_explorers_take_a_family_or_refuse_it_as_documented(family: str, found: dict[str, Any]) -> None:
    assert found["runs"] == KNOWN[family]["runs"]


def test_files_beside_the_weights_come_back_as_they_came(family: str, found: dict[str, Any]) -> None:
    assert found["files"] == KNOWN[family]["files"]


@pytest.mark.parametrize("library", ["transformers 5", "transformers 4", "vllm"])
def test_a_library_loads_what_is_exported(family: str, found: dict[str, Any], library: str) -> None:
    if library == "transformers 4" and "TRANSFORMERS_4" not in os.environ:
        pytest.skip("TRANSFORMERS_4 does not name the Python of an environment with transformers 4")
    now, known = (
        [loads for name, loads in of["loads"].items() if name.startswith(library)] for of in (found, KNOWN[family])
    )
    assert now == known
