"""`backend=megatron` as a user runs it: every layout with every sync mode, resumes in other layouts and backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Run, initial_digest, kill_at, launch, resume, start

LAYOUTS = {
    "tp2": ["backend.tp=2"],
    "pp2": ["backend.pp=2"],
    "dp2": [],
    "tp2pp2": ["backend.ranks=4", "backend.tp=2", "backend.pp=2"],
}
MODES = ("checkpoint", "memory", "nccl")

# Each costs a start of Ray and of the ranks; for every change the engine's own tests go through the layouts.
pytestmark = pytest.mark.all

CASES = [pytest.param(layout, mode, id=f"{layout}-{mode}") for layout in LAYOUTS for mode in MODES]


def _started(folder: Path, layout: str, *overrides: str) -> Run:
    return launch(folder, "backend=megatron", *LAYOUTS[layout], *overrides)


@pytest.mark.parametrize(("layout", "mode"), CASES)
def test_a_run_completes_with_equal_digests_at_trainer_explorer_and_checkpoint(
    tmp_path: Path, layout: str, mode: str
) -> None:
    run = _started(tmp_path / "run", layout, f"sync={mode}")
    assert run.code == 0, run.output
    assert sorted(run.digests) == [0, 1, 2, 3]
    assert run.digests[0] == initial_digest(run.folder), "the model is the one that fsdp and fsdp2 start from"
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    full = [event["step"] for event in run.events("commit") if event["kind"] == "full"]
    assert sorted(full) == [2, 3]
    assert {step: run.manifests[step]["digest"] for step in full} == {step: run.digests[step] for step in full}
    assert not run.events("fault")
    run.assert_reproduced()


def test_a_free_run_copies_versions_beside_the_next_step(tmp_path: Path) -> None:
    settings = ["trainer.schedule=free", "sync.max_staleness=1", "trainer.steps=6", "retention=[keep_all]"]
    run = _started(tmp_path / "run", "dp2", *settings)
    assert run.code == 0, run.output
    assert run.digests[0] == initial_digest(run.folder)
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    full = [event["step"] for event in run.events("commit") if event["kind"] == "full"]
    assert full
    assert {step: run.manifests[step]["digest"] for step in full} == {step: run.digests[step] for step in full}
    assert not run.events("fault")


def test_a_rank_that_is_killed_while_a_save_is_under_way_costs_that_save_only(tmp_path: Path) -> None:
    settings = [
        "backend=megatron",
        "backend.tp=2",
        "trainer.steps=400",
        "checkpoint.interval=1",
        "retention=[keep_all]",
        "trainer.max_restarts=0",
    ]
    started = start(tmp_path / "run", *settings)
    kill_at(started, "step 40/400", lambda run: run.pid_of("trainer-rank-1"))
    run = started.finish()
    assert run.code == 1
    assert "trainer rank 1 died" in run.output
    newest = int((run.folder / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    again = resume(run.folder, f"trainer.steps={newest + 2}")
    assert again.code == 0, again.output
    again.assert_begins_with(newest)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    settings = ("backend=megatron", "backend.tp=2", "trainer.lr_scheduler=cosine", "checkpoint.interval=2")
    whole = launch(tmp_path / "whole", *settings, "trainer.steps=5", "retention=[keep_all]")
    assert whole.code == 0, whole.output
    whole.go_back_to(2)
    again = resume(whole.folder, "--skip-unreadable", "trainer.steps=5")
    assert again.code == 0, again.output
    assert again.digests == whole.digests


def test_a_run_goes_on_in_other_layouts_and_backends(tmp_path: Path) -> None:
    run = _started(tmp_path / "run", "tp2", "retention=[keep_all]")
    assert run.code == 0, run.output

    refused = resume(run.folder, "trainer.steps=4", "backend.tp=1", "backend.pp=2")
    assert refused.code == 2
    assert "set backend.restore_rng=false" in refused.output
    moved = resume(run.folder, "trainer.steps=4", "backend.tp=1", "backend.pp=2", "backend.restore_rng=false")
    assert moved.code == 0, moved.output
    moved.assert_begins_with(3)

    with_fsdp = resume(moved.folder, "trainer.steps=5", "backend=fsdp2")
    assert with_fsdp.code == 0, with_fsdp.output
    assert "averages start at zero" in with_fsdp.output
    with_fsdp.assert_begins_with(4)

    back = resume(with_fsdp.folder, "trainer.steps=6", "backend=megatron", "backend.ranks=2")
    assert back.code == 0, back.output
    assert "averages start at zero" in back.output
    back.assert_begins_with(5)
