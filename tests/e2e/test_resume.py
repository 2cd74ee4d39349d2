"""A run that is killed and resumed ends as one that was never interrupted."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.runs import Run, launch, resume, start

SETTINGS = ("trainer.steps=30", "checkpoint.interval=5", "trainer.lr_scheduler=cosine", "seed=7")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = launch(tmp_path_factory.mktemp("reference") / "run", *SETTINGS)
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Killed with SIGKILL after step 12, then resumed in place."""
    started = start(tmp_path_factory.mktemp("killed") / "run", *SETTINGS)
    started.wait_for_line("step 12/30")
    os.killpg(started.process.pid, signal.SIGKILL)
    killed = started.finish()
    assert killed.code == -signal.SIGKILL
    run = resume(started.folder)
    assert run.code == 0, run.output
    return run


def test_a_resumed_run_ends_with_the_same_digests(uninterrupted: Run, resumed: Run) -> None:
    assert resumed.digests == uninterrupted.digests
    assert resumed.manifests[30]["digest"] == uninterrupted.manifests[30]["digest"]


def test_a_resumed_run_has_the_same_metrics(uninterrupted: Run, resumed: Run) -> None:
    def figures(run: Run) -> list[tuple[float, ...]]:
        return [(line["step"], line["reward/mean"], line["loss"], line["lr"]) for line in run.lines("metrics.jsonl")]

    assert [line[0] for line in figures(resumed)] == list(range(1, 31))
    assert figures(resumed) == figures(uninterrupted)


def test_a_resume_is_a_new_attempt_of_the_same_run(uninterrupted: Run, resumed: Run) -> None:
    assert resumed.record["attempt"] == 1
    assert resumed.record["status"] == "completed"
    assert resumed.record["config_digest"] == uninterrupted.record["config_digest"]
    steps = {line["step"]: line["attempt"] for line in resumed.lines("metrics.jsonl")}
    assert (steps[10], steps[11]) == (0, 1)


def test_a_completed_run_goes_on_with_more_steps_only(resumed: Run) -> None:
    again = resume(resumed.folder)
    assert again.code == 2
    assert "has reached step 30 of trainer.steps=30" in again.output
