"""A mixture of experts through `launch.py`: the weights of one model have one digest over engines, layouts and sync
modes; it is saved, resumed, moved and exported.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch, resume
from tests.families import EXPERTS

LAYOUTS = {
    "fsdp": ["backend=fsdp"],
    "fsdp2": ["backend=fsdp2"],
    "megatron-dp2": ["backend=megatron"],
    "megatron-ep2": ["backend=megatron", "backend.ep=2"],
}
MORE = {
    "megatron-tp2": ["backend=megatron", "backend.tp=2"],
    "megatron-pp2": ["backend=megatron", "backend.pp=2"],
}
MODES = ("checkpoint", "memory", "nccl")

# The engines' own tests go through experts at every change; these cost a start of Ray each.
pytestmark = pytest.mark.all

CASES = [*itertools.product(LAYOUTS, MODES), *((layout, "memory") for layout in MORE)]


@pytest.fixture(scope="module")
def first_digests() -> set[str]:
    """Of version 0 of the runs so far."""
    return set()


@pytest.mark.parametrize(("layout", "mode"), CASES)
def test_experts_have_equal_digests_at_trainer_explorer_checkpoint_and_export(
    tmp_path: Path, first_digests: set[str], layout: str, mode: str
) -> None:
    run = launch(tmp_path / "run", *(LAYOUTS | MORE)[layout], f"sync={mode}", "backend.ranks=2", *EXPERTS)
    run.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], 1)
    assert len(set(run.digests.values())) == 4, "it does not train"
    first_digests.add(run.digests[0])
    assert len(first_digests) == 1
    run.assert_reproduced()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_of_experts_is_the_uninterrupted_one(tmp_path: Path, layout: str) -> None:
    settings = [*LAYOUTS[layout], "backend.ranks=2", "trainer.lr_scheduler=cosine", "trainer.steps=5"]
    whole = launch(tmp_path / "whole", *settings, "checkpoint.interval=2", "retention=[keep_all]", *EXPERTS)
    assert whole.code == 0, whole.output
    whole.go_back_to(2)
    again = resume(whole.folder, "--skip-unreadable", "trainer.steps=5")
    assert again.code == 0, again.output
    assert sorted(whole.digests) == [0, 1, 2, 3, 4, 5]
    assert again.digests == whole.digests
    again.assert_what_is_saved_is_what_was_published(last=5)


def test_a_run_of_experts_goes_on_with_other_expert_ranks_and_backends(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *LAYOUTS["megatron-dp2"], "backend.ranks=2", "retention=[keep_all]", *EXPERTS)
    assert run.code == 0, run.output

    refused = resume(run.folder, "trainer.steps=4", "backend.ep=2")
    assert refused.code == 2
    assert "set backend.restore_rng=false" in refused.output
    step = 3
    for settings in (
        ["backend.ep=2", "backend.restore_rng=false"],
        ["backend.ep=1", "backend.restore_rng=false"],
        ["backend=fsdp2"],
        ["backend=megatron", "backend.ranks=2", "backend.ep=2"],
    ):
        run = resume(run.folder, f"trainer.steps={step + 1}", *settings)
        assert run.code == 0, run.output
        run.assert_begins_with(step)
        step += 1
        run.assert_what_is_saved_is_what_was_published(last=step)


def test_buckets_of_the_optimizer_keep_the_number_of_expert_ranks(tmp_path: Path) -> None:
    settings = ["backend.optimizer_format=dp_reshardable", "backend.ranks=2", "retention=[keep_all]"]
    run = launch(tmp_path / "run", *LAYOUTS["megatron-ep2"], *settings, *EXPERTS)
    assert run.code == 0, run.output
    before = run.manifests
    refused = resume(run.folder, "trainer.steps=4", "backend.ep=1", "backend.restore_rng=false")
    assert refused.code == 2
    assert "set backend.tp=1 backend.pp=1 backend.ep=2" in refused.output
    assert refused.manifests == before
    again = resume(run.folder, "trainer.steps=4")
    assert again.code == 0, again.output
    again.assert_begins_with(3)
