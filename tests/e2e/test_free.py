"""`trainer.schedule=free`: explorers and trainer at their own pace, while explorers die, hang and come back."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.runs import Run, kill_at, launch, resume, start

FREE = ("trainer.schedule=free", "sync.max_staleness=1", "backend.ranks=1", "explorer.replicas=2")
LONG = ("trainer.steps=400", "checkpoint.interval=100")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def assert_sound(run: Run, steps: int, bound: int = 1) -> None:
    """All steps were trained within the bound, and every label stands on the weights of its version."""
    assert run.code == 0, run.output
    assert run.record["status"] == "completed"
    assert run.record["reproducible"] is False
    metrics = run.lines("metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert max(line["staleness/max"] for line in metrics) <= bound
    assert run.summary["samples"]["staleness_max"] <= bound
    assert run.summary["sync"]["mismatched"] == 0
    assert steps in run.digests
    loads = run.events("load")
    assert loads
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    for name in run.summary["sync"]["explorers"]:
        versions = [load["version"] for load in loads if load["explorer"] == name]
        assert all(older < newer for older, newer in pairwise(versions)) or run.events("fault") or run.record["attempt"]
    for step, manifest in run.manifests.items():
        if step in run.digests:
            assert manifest["digest"] == run.digests[step]
    state = json.loads((run.folder / f"checkpoints/global_step_{steps}/trainer_state.json").read_text())
    groups = len({tuple(group) for group in state["data"]["waiting"]})
    last, prompt = state["data"]["next"]
    assert (last - 1) * 4 + prompt - groups == 4 * steps  # every prompt that was given out and is not left, once


@pytest.mark.all
@pytest.mark.parametrize("over_stale", ["wait", "drop"])
def test_three_explorers_read_versions_from_the_checkpoint_folder(folder: Path, over_stale: str) -> None:
    run = launch(
        folder,
        *FREE[:-1],
        "explorer.replicas=3",
        "sync=checkpoint",
        "sync.slots=3",
        "trainer.steps=40",
        f"samples.over_stale={over_stale}",
        "samples.buffer=4",
    )
    assert_sound(run, 40)
    assert run.summary["sync"]["explorers"] == ["explorer-0", "explorer-1", "explorer-2"]
    # Of a version that was replaced meanwhile the folder may be gone: that load is repeated, and told.
    assert all("could not load the newest version" in fault["error"] for fault in run.events("fault"))


@pytest.mark.all
def test_a_killed_explorer_costs_the_others_nothing_and_comes_back(folder: Path) -> None:
    started = start(folder, *FREE, *LONG, "explorer.max_restarts=1")
    kill_at(started, "step 80/400", lambda run: run.pid_of("explorer-0"))
    run = started.finish()
    assert_sound(run, 400)
    (fault,) = run.events("fault")
    assert fault["where"] == "explorer-0"
    assert re.search(r"^explorer-0 died before it could generate \(Worker .+\)$", fault["error"])
    loads = [load for load in run.events("load") if load["explorer"] == "explorer-0"]
    assert any(load["time"] > fault["time"] for load in loads)
    alive = [line["samples/explorers"] for line in run.lines("metrics.jsonl")]
    assert 1 in alive  # the trainer went on meanwhile; it comes back within a few steps
    assert alive[-1] == 2


@pytest.mark.all
def test_without_restarts_the_run_goes_on_with_those_left_and_ends_with_the_last(folder: Path) -> None:
    started = start(folder, *FREE, *LONG, "trainer.max_restarts=0")
    kill_at(started, "step 40/400", lambda run: run.pid_of("explorer-0"))
    kill_at(started, "step 200/400", lambda run: run.pid_of("explorer-1"))
    run = started.finish(limit_s=60)
    assert run.code == 1
    (fault,) = run.events("fault")
    assert fault["where"] == "explorer-0"
    assert "the run goes on with explorer-1" in fault["error"]
    assert re.search(r"(?s)explorer-1 died before it could .*generate.+, and no other explorer is left", run.output)
    assert "explorer.max_restarts" in run.output
    assert run.record["status"] == "failed"


@pytest.mark.all
def test_a_stopped_explorer_holds_the_trainer_no_longer_than_the_limit(folder: Path) -> None:
    limits = ("sync.timeout_s=8", "sync.lease_s=4", "explorer.timeout_s=12")
    started = start(folder, *FREE, *LONG, *limits)
    kill_at(started, "step 80/400", lambda run: run.pid_of("explorer-0"), signal.SIGSTOP)
    run = started.finish()
    assert_sound(run, 400)
    assert max(line["timing/step"] for line in run.lines("metrics.jsonl")[1:]) < 8 + 6
    faults = run.events("fault")
    assert [fault["where"] for fault in faults] in ([], ["explorer-0"])  # the run may end before the limit
    if faults:
        said = r"explorer-0 did not generate within 12[.\d]* s \(explorer\.timeout_s=12, .*; the run goes on with"
        assert re.search(said, faults[0]["error"])


@pytest.mark.all
def test_an_interrupted_free_run_goes_on_with_the_prompts_it_had_not_trained_on(folder: Path) -> None:
    started = start(folder, *FREE, "trainer.steps=400", "checkpoint.interval=5")
    kill_at(started, "step 40/400", lambda run: run.process.pid, signal.SIGINT)
    first = started.finish()
    assert first.code == 130, first.output
    last = max(first.manifests)
    again = resume(folder, f"trainer.steps={last + 10}")
    assert_sound(again, last + 10)
    assert again.record["attempt"] == 1


@pytest.mark.all
def test_a_preempted_free_run_saves_the_step_it_is_in(folder: Path) -> None:
    started = start(folder, *FREE, *LONG, "checkpoint.save_on_sigterm=true")
    started.wait_for_line("step 40/400")
    os.kill(started.process.pid, signal.SIGTERM)
    run = started.finish()
    assert run.code == 130, run.output
    (saved,) = run.manifests
    assert saved >= 40
