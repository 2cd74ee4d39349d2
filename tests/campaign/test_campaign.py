"""The campaign: a hundred thousand steps of random programs, and no promise is broken. `make test` runs a quarter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign.trials import run_trial

REPO = Path(__file__).parents[2]
SEED = "make test"
PROCESSES = 2


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.campaign", *arguments]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.all)])
def test_so_many_steps_break_no_promise(steps: int) -> None:
    share = str(-(-steps // PROCESSES))
    started = [
        start("--seed", SEED, "--first", str(number), "--every", str(PROCESSES), "--steps", share)
        for number in range(PROCESSES)
    ]
    told = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0] * PROCESSES, "\n".join(told)
    print(*told)


@pytest.mark.skipif(os.environ.get("PYTHONHASHSEED") != "0", reason="see the test below")
def test_a_seed_says_it_all_here() -> None:
    first, second = run_trial("again", 3), run_trial("again", 3)
    assert (first.failure, first.steps, first.operations, first.log) == (
        second.failure, second.steps, second.operations, second.log,
    )  # fmt: skip


def test_a_seed_says_it_all() -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__, "-k", "says_it_all_here"]
    found = subprocess.run(
        command, cwd=REPO, env=os.environ | {"PYTHONHASHSEED": "0"}, timeout=120, capture_output=True, text=True
    )
    assert "1 passed" in found.stdout, found.stdout
