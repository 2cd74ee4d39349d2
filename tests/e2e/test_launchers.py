"""Sweeps by `launch.py` with each launcher and the search, with real runs: side by side, preempted by a queue, and
looking for the best.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.e2e.runs import Run, Started, start

pytestmark = pytest.mark.all
SHORT = ["backend.ranks=1", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "checkpoint.interval=2"]


def sweep(folder: Path, *overrides: str) -> Started:
    arguments = ["-m", f"hydra.sweep.dir={folder}", *SHORT, *overrides]
    return start(folder, *arguments, command=[str(Path(__file__).parents[2] / "launch.py")])


def jobs(folder: Path, number: int) -> list[Run]:
    return [Run(folder / str(job), 0, "") for job in range(number)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sweep"


def test_two_runs_side_by_side_are_what_each_is_alone(folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = sweep(folder, "hydra/launcher=parallel", "trainer.steps=3", "sync=memory,checkpoint").finish()
    assert done.code == 0, done.output
    assert "job 1  completed: 3 of 3 steps" in done.output
    assert "digests agree: 2 jobs, 4 versions" in done.output
    first, second = jobs(folder, 2)
    first.assert_the_same_weights_everywhere(versions=[0, 1, 2, 3], saved=[2, 3], explorers=1)
    assert second.digests == first.digests
    assert not second.events("fault")


def test_a_run_that_a_queue_takes_from_its_place_saves_and_goes_on_there(folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    overrides = ["trainer.steps=40", "checkpoint.interval=0", "hydra/launcher=submitit_local"]
    started = sweep(folder, *overrides)
    (run,) = jobs(folder, 1)
    lines = run.folder / "metrics.jsonl"
    while not lines.exists() or len(lines.read_text().splitlines()) < 3:
        assert started.process.poll() is None, started.finish().output
        time.sleep(0.1)  # it prints into a file of the queue's
    os.kill(json.loads((run.folder / ".lock").read_text())["pid"], signal.SIGUSR2)
    done = started.finish()
    assert done.code == 0, done.output
    assert (run.record["status"], run.record["attempt"]) == ("completed", 1)
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, 41))
    saved, last = (event["step"] for event in run.events("commit") if event["kind"] == "full")
    assert 3 <= saved < last == 40
    assert not run.events("fault")


def test_a_search_runs_its_jobs_and_names_the_best(folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    overrides = ["hydra/sweeper=search", "hydra.sweeper.n_trials=2", "trainer.steps=2"]
    done = sweep(folder, *overrides, "trainer.lr=tag(log, interval(0.0001, 0.01))").finish()
    assert done.code == 0, done.output
    found = OmegaConf.load(folder / "optimization_results.yaml")
    assert found.best_value == max(run.summary["reward_last"] for run in jobs(folder, 2))
    assert (folder / "report.html").exists()
