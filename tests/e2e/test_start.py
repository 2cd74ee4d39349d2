"""A run begins with what lies in the user's folder, and one that is told to stop while it starts leaves nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, start
from tests.e2e.test_faults import leftovers

TASK = """
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import RewardResult


class Digits:
    def __init__(self, seed: int, *, response_length: int) -> None:
        pass

    def prompts(self, step, count):
        return [Prompt(index=index, text=str(index), answer="1") for index in range(count)]

    def reward(self, prompt, text, finished):
        return RewardResult(float(len(text)), exact=0.0)
"""


@pytest.mark.parametrize(
    "phase", ["starting Ray", pytest.param("importing the engines", marks=pytest.mark.all)], ids=["ray", "engines"]
)
def test_ctrl_c_while_a_run_starts_is_answered_and_leaves_nothing_even_when_it_is_pressed_again(
    tmp_path: Path, phase: str
) -> None:
    started = start(tmp_path / "run", "trainer.steps=400")
    started.wait_for_line(phase)
    pid = started.process.pid
    os.killpg(pid, signal.SIGINT)
    started.wait_for_line("stopping ...")
    os.killpg(pid, signal.SIGINT)
    run = started.finish(limit_s=60)
    assert (run.code, run.record["status"]) == (130, "interrupted"), run.output
    assert "Traceback" not in run.output
    assert "ray" not in run.output.lower().replace("starting ray", "")
    assert leftovers(pid) == []


@pytest.mark.all
def test_a_task_in_the_current_folder_is_found_by_all_processes_wherever_they_work(tmp_path: Path) -> None:
    (tmp_path / "own_digits.py").write_text(TASK)
    folder = tmp_path / "größe"
    own = ["task._target_=own_digits.Digits", "hydra.job.chdir=true", f"hydra.run.dir={folder}", "name=größe"]
    done = start(folder, "run", *SMALL, *own, command=["-m", "trinity_sync.cli"]).finish()
    assert done.code == 0, done.output
    assert done.record["status"] == "completed"
