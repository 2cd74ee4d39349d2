"""A LoRA run names its base, goes on bit for bit upon that base and no other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Run, completed, initial_digest, launch, resume, start
from trinity_sync.checkpoint.export import export_checkpoint

SETTINGS = (
    "backend=fsdp2",
    "sync=memory",
    "backend.ranks=2",
    "explorer.replicas=1",
    "trainer.steps=8",
    "checkpoint.interval=2",
    "model.lora.rank=4",
    "trainer.lr=5e-3",
    "seed=7",
)


uninterrupted = completed(*SETTINGS)


@pytest.mark.all
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("memory", "backend.ranks=1"), ("nccl", "backend.ranks=2"), ("memory", "backend.fsdp_size=1")],
)
def test_merged_versions_are_what_is_exported_of_the_adapters_that_are_saved(
    tmp_path: Path, mode: str, ranks: str
) -> None:
    run = launch(tmp_path / "run", "backend=fsdp2", f"sync={mode}", ranks, "model.lora.rank=4", "sync.what=merged")
    assert run.code == 0, run.output
    assert run.digests[0] == initial_digest(run.folder)  # B is zero
    loads = run.events("load")
    assert loads
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    assert not any("base" in event for event in (*loads, *run.events("publish")))
    manifest = run.manifests[3]
    assert manifest["digest"] is None
    adapter = manifest["base"].pop("adapter")
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 16)
    assert manifest["base"] == {
        "digest": initial_digest(run.folder),
        "path": str(run.folder / "model"),
        "what": "lora",
        "wire": {"dtype": "BF16", "keep_fp32": []},
    }
    step = run.folder / "checkpoints" / "global_step_3"
    assert export_checkpoint(step, tmp_path / "merged", dtype="bf16", form="merged").digest == run.digests[3]


@pytest.mark.all
def test_base_and_adapter_are_named_together(uninterrupted: Run) -> None:
    base = initial_digest(uninterrupted.folder)
    for event in ("publish", "load", "commit"):
        assert {one["base"] for one in uninterrupted.events(event)} == {base}
    for step, manifest in uninterrupted.manifests.items():
        assert manifest["base"]["digest"] == base
        assert manifest["digest"] == uninterrupted.digests[step]


def killed_and_resumed(folder: Path, *overrides: str) -> Run:
    started = start(folder, *SETTINGS, *overrides)
    started.wait_for_line("step 5/8")
    os.killpg(started.process.pid, signal.SIGKILL)
    assert started.finish().code == -signal.SIGKILL
    resumed = resume(started.folder)
    assert resumed.code == 0, resumed.output
    return resumed


@pytest.mark.all
def test_a_killed_run_goes_on_bit_for_bit(uninterrupted: Run, tmp_path: Path) -> None:
    resumed = killed_and_resumed(tmp_path / "run")
    assert resumed.digests == uninterrupted.digests
    assert resumed.manifests[8]["digest"] == uninterrupted.manifests[8]["digest"]


@pytest.mark.all
def test_so_does_one_whose_versions_are_merged(tmp_path: Path) -> None:
    reference = launch(tmp_path / "reference", *SETTINGS, "sync.what=merged")
    assert reference.code == 0, reference.output
    assert killed_and_resumed(tmp_path / "run", "sync.what=merged").digests == reference.digests


@pytest.mark.all
def test_another_base_and_other_things_to_train_are_refused(uninterrupted: Run, tmp_path: Path) -> None:
    step = uninterrupted.folder / "checkpoints" / "global_step_8"

    def refused(*overrides: str) -> str:
        name = f"run-{len(list(tmp_path.iterdir()))}"
        settings = [
            one for one in SETTINGS if one.partition("=")[0] not in ("trainer.steps", "seed", "model.lora.rank")
        ]
        run = launch(tmp_path / name, *settings, "trainer.steps=10", f"checkpoint.resume_from={step}", *overrides)
        assert run.code == 2, run.output
        assert "Traceback" not in run.output
        return " ".join(run.output.split())

    text = refused("seed=8", "model.lora.rank=4")
    assert f"was trained on a base with the digest {initial_digest(uninterrupted.folder)}" in text
    assert f"the base of this run has {initial_digest(tmp_path / 'run-0')}" in text
    assert "is of a LoRA adapter on" in refused("seed=7")
    assert "holds an adapter of rank 4, this run asks for model.lora.rank=8" in refused("seed=7", "model.lora.rank=8")
