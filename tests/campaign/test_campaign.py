"""The campaign: a hundred thousand steps of random programs, and no promise is broken. `make test` runs a quarter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SEED = "make test"
PROCESSES = 2


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.campaign", *arguments]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [4_000, pytest.param(100_000, marks=pytest.mark.all)])
def test_so_many_steps_break_no_promise(steps: int) -> None:
    share = str(-(-steps // PROCESSES))
    started = [
        start("--seed", SEED, "--first", str(number), "--every", str(PROCESSES), "--steps", share)
        for number in range(PROCESSES)
    ]
    told = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0] * PROCESSES, "\n".join(told)
    print(*told)


SAID_BY_A_SEED = """
from tests.campaign.trials import run_trial
for _ in range(2):
    outcome = run_trial("again", 3)
    print(repr((outcome.failure, outcome.steps, outcome.operations, outcome.log)))
"""


def test_a_seed_says_it_all() -> None:
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", SAID_BY_A_SEED]
    found = subprocess.run(command, cwd=REPO, env=environment, timeout=120, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    first, second = found.stdout.splitlines()
    assert first == second
    assert first.startswith("(None, "), found.stdout
