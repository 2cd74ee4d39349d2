"""`sync.encoding=delta` as a user runs it: the same weights as with full versions, everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import Run, launch, resume
from tests.models.test_shapes import SMALL
from trinity_sync.cli import main as cli

pytestmark = pytest.mark.all  # tests/sync tries the same parts, test_short_runs.py a run

MODES = ("checkpoint", "memory", "nccl")
DELTA = ("sync.encoding=delta", "sync.delta.full_every=2", "trainer.lr=1e-5")
CASES = {
    "fsdp2-hf": ("backend=fsdp2", "explorer.replicas=2"),
    "fsdp2-fp32": ("backend=fsdp2", "explorer.dtype=fp32"),
    "fsdp2-lora": ("backend=fsdp2", "model.lora.rank=4"),
    "fsdp2-vllm": ("backend=fsdp2", "explorer=vllm"),
    "fsdp2-vllm-tp2": ("backend=fsdp2", "explorer=vllm", "explorer.tp=2"),
    "megatron-tp2-hf": ("backend=megatron", "backend.tp=2"),
    "megatron-tp2-vllm": ("backend=megatron", "backend.tp=2", "explorer=vllm"),
}


def assert_followed_by_deltas(run: Run) -> None:
    assert run.code == 0, run.output
    assert not run.events("fault")
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    published = run.events("publish")
    assert [event["encoding"] for event in published if event["version"]] == ["delta"] * (len(published) - 1)
    assert all(0 <= event["changed"] <= 1 and event["codec"] for event in published if event["version"])
    last = published[-1]
    assert last["encode_s"] > 0
    assert last["changed_ppm"]["0"] >= 0
    by_deltas = [load for load in run.events("load") if "apply_s" in load]
    assert by_deltas
    assert all(0 < load["apply_s"] < load["total_s"] for load in by_deltas)
    moved = [load["bytes"] for load in run.events("load") if load["version"] == last["version"]]
    assert all(nbytes < last["bytes_full"] for nbytes in moved)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_versions_are_those_of_a_run_with_full_ones(tmp_path: Path, case: str, mode: str) -> None:
    deltas = launch(tmp_path / "deltas", f"sync={mode}", *CASES[case], *DELTA)
    assert_followed_by_deltas(deltas)
    full = launch(tmp_path / "full", f"sync={mode}", *CASES[case], *DELTA, "sync.encoding=full")
    assert full.code == 0, full.output
    assert deltas.digests == full.digests
    assert len(set(full.digests.values())) > 1
    if "vllm" not in case:  # whose log-probs depend on how requests meet
        deltas.assert_reproduced()


@pytest.mark.parametrize("mode", MODES)
def test_weights_without_an_engine_travel_as_deltas(tmp_path: Path, mode: str) -> None:
    shapes = tmp_path / "config.json"
    shapes.write_text(json.dumps(SMALL))
    given = (f"model.shapes={shapes}", "backend.ranks=2", "trainer.steps=6", "workload.changed=0.01")
    run = launch(tmp_path / "run", "workload=bytes", f"sync={mode}", *given, *DELTA[:1], small=False)
    assert_followed_by_deltas(run)


@pytest.mark.parametrize("mode", ["checkpoint", "memory"])
def test_explorers_of_a_free_run_follow_at_their_own_pace(tmp_path: Path, mode: str) -> None:
    free = ("trainer.schedule=free", "sync.max_staleness=4", "trainer.steps=30", "explorer.replicas=2")
    run = launch(tmp_path / "run", f"sync={mode}", *DELTA, *free, "sync.delta.full_every=8")
    assert_followed_by_deltas(run)
    if mode == "memory":
        return
    steps = {event["step"] for event in run.events("commit") if event["kind"] == "state_dict"}
    assert 0 < len(steps) < len(run.digests) / 4
    assert not (run.folder / "checkpoints" / ".deltas").exists()


def test_a_resume_from_an_older_step_begins_with_a_full_version(tmp_path: Path) -> None:
    given = ("sync=checkpoint", *DELTA, "trainer.steps=5", "sync.delta.full_every=16", "retention=[keep_all]")
    run = launch(tmp_path / "run", *given)
    assert_followed_by_deltas(run)
    run.go_back_to(2)
    again = resume(run.folder, "--skip-unreadable")
    assert again.code == 0, again.output
    again.assert_begins_with(2)
    mine = [event for event in again.events("publish") if event["attempt"] == 1]
    assert [event["encoding"] for event in mine] == ["full", "delta", "delta", "delta"]
    assert [event["digest"] for event in mine[1:]] == [run.digests[step] for step in (3, 4, 5)]
    assert not again.events("fault")


def test_every_version_of_a_run_is_written_again_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of an attempt that a resume went behind, and those after a lost delta. Samples name them."""

    def written(version: str) -> str | None:
        code = cli.main(["weights", str(run.folder), version, "-o", str(tmp_path / version), "--json"])
        told, _ = capsys.readouterr()
        shutil.rmtree(tmp_path / version, ignore_errors=True)
        return json.loads(told)["digest"] if code == 0 else None

    keep = ("retention=[keep_last,keep_versions]", "retention.policies.keep_versions.base_every=4")
    run = launch(
        *(tmp_path / "run", "sync=checkpoint", *DELTA, *keep, "trainer.steps=7", "retention.policies.keep_last.n=9"),
        "samples.record_interval=1",
    )
    assert_followed_by_deltas(run)
    first = run.digests
    assert {step: written(str(step)) for step in first} == first
    run.go_back_to(2)
    again = resume(run.folder, "--skip-unreadable")
    assert again.code == 0, again.output
    second = {event["version"]: event["digest"] for event in again.events("publish") if event["attempt"] == 1}
    assert sorted(second) == [2, 3, 4, 5, 6, 7]
    assert {step: written(f"0-{step}") for step in first} == first
    assert {step: written(f"1-{step}") for step in second} == second
    published = {(0, step): digest for step, digest in first.items()} | {(1, step): second[step] for step in second}
    lines = again.lines("samples.jsonl")
    assert {line["attempt"] for line in lines} == {0, 1}
    named = {(line["version_attempt"], line["version"]) for line in lines}
    assert all(written(f"{attempt}-{step}") == published[attempt, step] for attempt, step in named)
    deltas = run.folder / "checkpoints" / ".deltas"
    assert {path.parent.name for path in deltas.glob("*/global_step_*")} == {"0-0", "0-4", "1-2", "1-6"}
    for path in deltas.glob("1-4/*-from-1-3.delta"):
        path.unlink()
    assert not any(written(str(step)) for step in (4, 5))
    assert written(str(6)) == second[6]
