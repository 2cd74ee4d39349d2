"""A run that loses a process goes on by itself, and ends as one that was never disturbed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import LIMIT_S, Run, Started, completed, kill_at, start
from tests.e2e.test_faults import assert_ended_clean

STEPS = 40
SETTINGS = (f"trainer.steps={STEPS}", "checkpoint.interval=6")
undisturbed = completed(*SETTINGS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def assert_the_same(run: Run, undisturbed: Run, pid: int, heals: int = 1) -> None:
    """It has completed with the digests and steps of the undisturbed run, and tells each healing."""
    assert run.code == 0, run.output
    assert run.record["status"] == "completed"
    assert run.digests == undisturbed.digests
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, STEPS + 1))
    assert len(run.events("heal")) == heals
    assert_ended_clean(run, pid)


@pytest.mark.all
@pytest.mark.parametrize(
    ("victim", "named"),
    [
        ("trainer-rank-1", "trainer rank 1 died"),
        ("node-agent", "the agent of node"),
        ("synchronizer", "the synchronizer died"),
        ("explorer-0", "explorer-0 died"),
    ],
)
def test_a_run_that_loses_a_process_goes_on_bit_for_bit(
    folder: Path, undisturbed: Run, victim: str, named: str
) -> None:
    started = start(folder, *SETTINGS)
    kill_at(started, f"step 20/{STEPS}", lambda run: run.pid_of(victim))
    run = started.finish()
    assert_the_same(run, undisturbed, started.process.pid)
    assert "the run goes on from its newest checkpoint (restart 1 of 3 within 3600 s" in run.output
    (heal,) = run.events("heal")
    assert named in heal["died"]
    assert heal["resumed_from"] >= 12
    assert 0 <= heal["lost"] <= 8
    assert heal["total_s"] > 0
    first, second = run.record["attempts"]
    assert (first["status"], second["resumed_from"]) == ("failed", heal["resumed_from"])
    assert named in first["error"]


@pytest.mark.all
def test_a_run_whose_monitor_dies_needs_no_other_attempt(folder: Path, undisturbed: Run) -> None:
    started = start(folder, *SETTINGS)
    kill_at(started, f"step 20/{STEPS}", lambda run: run.pid_of("checkpoint_monitor"))
    run = started.finish()
    assert_the_same(run, undisturbed, started.process.pid, heals=0)
    assert len(run.record["attempts"]) == 1


@pytest.mark.all
def test_a_run_goes_on_without_a_rank_that_stands_still(folder: Path, undisturbed: Run) -> None:
    started = start(folder, *SETTINGS, "backend.timeout_s=20")
    kill_at(started, f"step 20/{STEPS}", lambda run: run.pid_of("trainer-rank-1"), signal.SIGSTOP)
    run = started.finish()
    assert_the_same(run, undisturbed, started.process.pid)
    assert "no answer from trainer rank 1" in run.events("heal")[0]["died"]


@pytest.mark.all
def test_a_death_before_the_first_step_and_one_within_the_healing_are_healed_too(
    folder: Path, undisturbed: Run
) -> None:
    started = start(folder, *SETTINGS)
    kill_at(started, "loading trainer and explorers", lambda run: run.pid_of("trainer-rank-0"))
    kill_at(started, "loading trainer and explorers", lambda run: run.pid_of("trainer-rank-1"))
    run = started.finish()
    assert_the_same(run, undisturbed, started.process.pid)
    (heal,) = run.events("heal")
    assert "; then " in heal["died"]
    assert [attempt["attempt"] for attempt in run.record["attempts"]] == [0, 1, 2]
    assert "the run begins again at step 1" in run.output


def wait_for_another(started: Started, name: str, before: int) -> int:
    """The process of an actor in the next attempt."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        try:
            if (pid := started.pid_of(name)) != before:
                return pid
        except AssertionError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"no other {name} was started")


@pytest.mark.all
def test_a_run_with_no_restart_left_ends_and_tells_each_attempt(folder: Path) -> None:
    started = start(folder, *SETTINGS, "trainer.max_restarts=1")
    started.wait_for_line(f"step 8/{STEPS}")
    os.kill(first := started.pid_of("trainer-rank-1"), signal.SIGKILL)
    wait_for_another(started, "trainer-rank-1", first)
    kill_at(started, f"step 20/{STEPS}", lambda run: run.pid_of("synchronizer"))
    run = started.finish()
    assert run.code == 1
    told = run.output[run.output.rindex("error: ") :]
    assert told.startswith("error: the synchronizer died before it could")
    assert "The restarts are used up (trainer.max_restarts=1" in told
    assert "attempt 0: trainer rank 1 died before it could" in told
    assert run.record["status"] == "failed"
    assert "trinity-sync resume" in run.output
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
def test_a_signal_ends_a_run_that_is_about_to_go_on(folder: Path) -> None:
    started = start(folder, *SETTINGS)
    kill_at(started, f"step 20/{STEPS}", lambda run: run.pid_of("trainer-rank-1"))
    started.wait_for_line("the run goes on from its newest checkpoint")
    started.process.send_signal(signal.SIGTERM)
    run = started.finish()
    assert run.code == 130, run.output
    assert_ended_clean(run, started.process.pid)
