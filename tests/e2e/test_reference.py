"""A policy that is held near to a reference, as a user asks for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import Run, completed, launch, resume

NEAR = ("algorithm.kl.coeff=0.2", "trainer.lr=5e-3")


def assert_held(run: Run) -> None:
    """The policy begins as the reference, bit for bit, and leaves it; the loss has what was measured."""
    assert run.code == 0, run.output
    steps = run.lines("metrics.jsonl")
    assert (steps[0]["reference/kl"], steps[0]["reference/k3_kl"], steps[0]["actor/kl_loss"]) == (0.0, 0.0, 0.0)
    for line in steps[1:]:
        assert line["reference/k3_kl"] == pytest.approx(line["actor/kl_loss"]) != 0.0
        assert line["loss"] == pytest.approx(line["actor/pg_loss"] + 0.2 * line["actor/kl_loss"], rel=1e-4, abs=1e-7)


near = completed(*NEAR, "backend=fsdp2", "sync=checkpoint", "backend.ranks=1", "explorer.replicas=2")


@pytest.mark.all
def test_a_run_is_held_near_to_the_model_that_it_began_with(near: Run) -> None:
    assert_held(near)
    near.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], explorers=2)
    noted = {manifest["reference"]["path"] for manifest in near.manifests.values()}
    assert noted == {str(near.folder / "model")}


@pytest.mark.all
def test_a_resume_is_held_near_to_the_same_one(near: Run, tmp_path: Path) -> None:
    folder = tmp_path / near.folder.name
    shutil.copytree(near.folder, folder)
    run = Run(folder, 0, "")
    run.go_back_to(2)
    again = resume(folder, "--skip-unreadable")
    assert again.code == 0, again.output
    assert again.digests == near.digests
    figures = [
        [line[name] for name in ("loss", "reference/kl", "actor/kl_loss")] for line in again.lines("metrics.jsonl")
    ]
    assert figures == [
        [line[name] for name in ("loss", "reference/kl", "actor/kl_loss")] for line in near.lines("metrics.jsonl")
    ]


@pytest.mark.all
def test_a_resume_with_another_reference_is_refused(near: Run, tmp_path: Path) -> None:
    other = launch(tmp_path / "other", "seed=5", "trainer.steps=1")
    assert other.code == 0, other.output
    folder = tmp_path / near.folder.name
    shutil.copytree(near.folder, folder)
    again = resume(folder, f"algorithm.kl.reference={other.folder / 'model'}", "trainer.steps=5")
    assert again.code == 2, again.output
    assert "a run keeps its reference" in again.output
    begun = launch(tmp_path / "begun", *NEAR, f"algorithm.kl.reference={other.folder / 'model'}", "trainer.steps=1")
    assert begun.code == 0, begun.output
    assert begun.lines("metrics.jsonl")[0]["reference/k3_kl"] > 1e-4, "it begins as another model"


@pytest.mark.all
@pytest.mark.parametrize(
    "overrides",
    [
        ("backend=fsdp", "trainer.micro_batch_size=2"),
        ("backend=fsdp2", "backend.param_offload=true"),
        ("backend=megatron", "backend.tp=2"),
        ("backend=megatron", "backend.pp=2"),
        ("backend=fsdp2", "model.lora.rank=4"),
        ("backend=fsdp", "model.lora.rank=4"),
        ("backend=fsdp2", "explorer.temperature=0.5"),
    ],
    ids="-".join,
)
def test_all_engines_have_one(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = launch(tmp_path / "run", *NEAR, *overrides)
    assert_held(run)
    run.assert_reproduced()


@pytest.mark.all
def test_measuring_changes_nothing(tmp_path: Path) -> None:
    plain = launch(tmp_path / "plain", "trainer.lr=5e-3")
    measured = launch(tmp_path / "measured", "trainer.lr=5e-3", "algorithm.kl.measure=true")
    assert measured.code == 0, measured.output
    assert measured.digests == plain.digests
    assert measured.lines("metrics.jsonl")[-1]["reference/k3_kl"] > 0


@pytest.mark.all
def test_a_free_run_has_one_and_tells_ratios_apart_by_age(tmp_path: Path) -> None:
    free = ("trainer.schedule=free", "sync.max_staleness=2", "trainer.steps=8", "algorithm.kl.coeff=0.2")
    rules = ("algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2")
    run = launch(tmp_path / "run", *free, *rules)
    assert run.code == 0, run.output
    for line in run.lines("metrics.jsonl"):
        ages = [value for name, value in line.items() if name.startswith("rollout_corr/stale_") and "tokens" in name]
        assert sum(ages) == pytest.approx(1.0, rel=1e-5)
        assert 0 <= line["rollout_corr/rollout_rs_masked_fraction"] <= 1
        assert line["reference/k3_kl"] >= 0
