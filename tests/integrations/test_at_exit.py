"""The end of a verl program: its last saves are finished in the order in which they wait for each other."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from trinity_sync.integrations.verl import at_exit

class Manager:
    def __init__(self, name, other=None):
        self.name, self.other, self.settled = name, other, threading.Event()

    def settle_at_exit(self):
        print(self.name, "settles", flush=True)
        self.settled.set()

    def finish_at_exit(self):
        worked = threading.Thread(target=lambda: None)  # which Python 3.12 refuses in atexit
        worked.start()
        worked.join()
        assert self.other is None or self.other.settled.wait(10)
        print(self.name, "ends", flush=True)
        {failure}

critic = Manager("critic")
at_exit.finish_at_exit(Manager("actor", critic))
at_exit.finish_at_exit(critic)
import atexit
atexit.register(at_exit.end_as_failed)
print("main ends", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_all_are_settled_before_one_is_waited_for(end: str) -> None:
    done = run("pass", end)
    assert done.stdout.split("\n")[:-1] == [
        "main ends",
        "actor settles",
        "critic settles",
        "actor ends",
        "critic ends",
    ]
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_is_told_and_is_the_exit_code_and_the_others_are_finished() -> None:
    done = run("raise RuntimeError('planted') if self.name == 'actor' else None", "")
    assert done.returncode == 1
    assert "trinity-sync: a checkpoint was lost at the end of the program: planted" in done.stderr
    assert "critic ends" in done.stdout


def run(failure: str, end: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(failure=failure, end=end)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
