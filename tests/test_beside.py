"""Lint beside the tests: what is said of both, and the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parts import ROOT

# A shell may miss an interrupt that comes while it starts a program.
LONG = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60); print('not interrupted')"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time\n"
    "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
    "print('begun', flush=True); time.sleep(60)",
]


def beside(lint: str, *tests: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.beside", lint, *tests],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("lint", "tests", "code", "words"),
    [
        (0, 0, 0, "lint passed; tests passed"),
        (3, 0, 3, "lint failed (exit code 3); tests passed"),
        (0, 1, 1, "lint passed; tests failed (exit code 1)"),
        (3, 1, 1, "lint failed (exit code 3); tests failed (exit code 1)"),
    ],
)
def test_the_last_line_says_of_both_how_they_ended(lint: int, tests: int, code: int, words: str) -> None:
    program = beside(f"echo of lint; echo its error >&2; exit {lint}", "sh", "-c", f"echo of tests; exit {tests}")
    output, _ = program.communicate(timeout=60)
    assert program.returncode == code
    assert output.splitlines()[-1] == words
    assert "of tests\n" in output
    assert "of lint\nits error\n" in output


def test_a_failing_lint_is_told_while_the_tests_run_on() -> None:
    program = beside("echo of lint; exit 3", *LONG)
    assert program.stdout is not None
    seen: list[str] = []
    while not {"lint failed (exit code 3)\n", "begun\n"} <= set(seen):
        seen.append(program.stdout.readline())
        assert seen[-1], seen
    assert program.poll() is None
    os.killpg(program.pid, signal.SIGINT)
    rest, _ = program.communicate(timeout=30)
    assert "not interrupted" not in rest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("tell", [os.kill, os.killpg])
def test_who_is_told_to_end_ends_both(signum: int, tell: Callable[[int, int], None], tmp_path: Path) -> None:
    """Whether a terminal tells all of its processes, or somebody this program alone."""
    os.mkfifo(tmp_path / "pid")
    program = beside(f"echo $$ > {tmp_path}/pid; exec sleep 60", *LONG)
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    lint = int((tmp_path / "pid").read_text())  # waits for it
    tell(program.pid, signum)
    output, _ = program.communicate(timeout=30)
    assert program.returncode == 128 + signum
    assert output.splitlines()[-1] == "lint failed (exit code 143); tests failed (exit code 130)"
    assert not Path(f"/proc/{lint}").exists()


def test_tests_that_take_no_notice_of_an_interrupt_end_at_the_second() -> None:
    program = beside("sleep 60", *DEAF)
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.terminate()
    told = {"interrupted\n", "lint failed (exit code 143)\n"}  # a kill overtakes what has not been answered by then
    while told and (line := program.stdout.readline()):
        told.discard(line)
    program.terminate()
    output, _ = program.communicate(timeout=30)
    assert program.returncode == 128 + signal.SIGTERM
    assert output.splitlines()[-1] == "lint failed (exit code 143); tests failed (exit code 137)"
