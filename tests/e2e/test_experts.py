"""A mixture of experts through `launch.py`: one digest of version 0 over FSDP engines and sync modes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch

EXPERTS = [
    "model.architecture.model_type=qwen3_moe",
    "+model.architecture.num_experts=4",
    "+model.architecture.num_experts_per_tok=2",
    "+model.architecture.moe_intermediate_size=64",
    "+model.architecture.norm_topk_prob=true",
]

# The engines' own tests go through experts at every change; these cost a start of Ray each.
pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def first_digests() -> set[str]:
    """Of version 0 of the runs so far."""
    return set()


@pytest.mark.parametrize(
    ("backend", "mode"), [*itertools.product(("fsdp2",), ("memory", "checkpoint", "nccl")), ("fsdp", "memory")]
)
def test_experts_have_equal_digests_at_trainer_explorer_and_checkpoint(
    tmp_path: Path, first_digests: set[str], backend: str, mode: str
) -> None:
    run = launch(tmp_path / "run", f"backend={backend}", f"sync={mode}", "backend.ranks=2", *EXPERTS)
    run.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], 1)
    first_digests.add(run.digests[0])
    assert len(first_digests) == 1
