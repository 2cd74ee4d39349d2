"""Runs that train a LoRA adapter: it alone travels, is saved and is loaded."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch

BACKENDS, MODES = ("fsdp", "fsdp2"), ("checkpoint", "memory", "nccl")
SHORT = ("fsdp2", "memory")

CASES = [
    pytest.param(*case, marks=() if case == SHORT else pytest.mark.all, id="-".join(case))
    for case in itertools.product(BACKENDS, MODES)
]


@pytest.mark.parametrize(("backend", "mode"), CASES)
def test_the_adapter_is_the_same_at_trainer_explorer_and_checkpoint(tmp_path: Path, backend: str, mode: str) -> None:
    ranks = 1 if (backend, mode) == SHORT else 2
    run = launch(tmp_path / "run", f"backend={backend}", f"sync={mode}", f"backend.ranks={ranks}", "model.lora.rank=4")
    assert run.code == 0, run.output
    assert sorted(run.digests) == [0, 1, 2, 3]
    assert len(set(run.digests.values())) == 4
    loads = run.events("load")
    assert [load["version"] for load in loads] == [0, 1, 2, 3]
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    # q, k, v, o, gate, up, down of two layers, in bf16
    wanted = 2 * 2 * 4 * sum((128 + 128, 128 + 64, 128 + 64, 128 + 128, 128 + 256, 128 + 256, 256 + 128))
    assert {publish["bytes_full"] for publish in run.events("publish")} == {wanted}
    run.assert_what_is_saved_is_what_was_published(last=3)


@pytest.mark.all
@pytest.mark.parametrize("mode", MODES)
def test_the_default_task_is_learnt(tmp_path: Path, mode: str) -> None:
    overrides = ["live=line", f"sync={mode}", "model.lora.rank=16", "trainer.lr=5e-3", "trainer.steps=60"]
    run = launch(tmp_path / "run", *overrides, small=False)
    assert run.code == 0, run.output
    assert run.summary["reward_last"] > run.summary["reward_first"] + 0.2


def test_targets_that_the_model_does_not_have_are_refused_before_training(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "model.lora.rank=4", "model.lora.targets=[qq_proj]")
    assert run.code == 2
    assert "model.lora.targets=[qq_proj]" in run.output
    assert "its linear layers are down_proj, gate_proj" in run.output
    assert "Traceback" not in run.output
