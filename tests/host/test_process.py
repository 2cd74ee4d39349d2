"""A process of a run ends with its driver, whatever either of them does at that moment."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trinity_sync.host.process import DRIVER, driver_lifeline, end_with_driver, environment

_DRIVER = """
import subprocess, sys, os
from pathlib import Path
from trinity_sync.host.process import driver_lifeline

with driver_lifeline(Path(sys.argv[1])) as env:
    subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=os.environ | env)
    sys.stdin.read()
print("over", flush=True)
"""
_ACTOR = """
import os, subprocess, time
from trinity_sync.host.process import end_with_driver

end_with_driver()
end_with_driver()  # a second actor in the process
program = subprocess.Popen(["sleep", "600"])
print(os.getpid(), program.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _DRIVER, str(tmp_path / "lifeline"), _ACTOR]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes(driver: subprocess.Popen[str]) -> list[int]:
    """File descriptors of the actor and of the program that it has started."""
    assert driver.stdout is not None
    return [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]


def all_ended(pidfds: list[int], within_s: float) -> bool:
    return all(select.select([pidfd], [], [], within_s)[0] for pidfd in pidfds)


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_what_it_started_when_its_driver_is_killed(driver: subprocess.Popen[str], stopped: bool) -> None:
    pidfds = processes(driver)
    if stopped:
        signal.pidfd_send_signal(pidfds[0], signal.SIGSTOP)
    assert not all_ended(pidfds, 0.2)
    driver.kill()
    assert all_ended(pidfds, 20.0)


def test_it_ends_when_the_drivers_run_is_over(driver: subprocess.Popen[str]) -> None:
    pidfds = processes(driver)
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.close()
    assert driver.stdout.readline() == "over\n"
    assert all_ended(pidfds, 20.0)


@pytest.mark.parametrize("folder", ["is there", "is gone"])
def test_one_that_begins_after_its_drivers_end_ends_at_once(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "lifeline"
    with driver_lifeline(path) as env:
        pass
    if folder == "is gone":
        path.unlink()
    done = subprocess.run([sys.executable, "-c", _ACTOR], env=os.environ | env, timeout=60, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_a_program_that_it_starts_has_nothing_of_the_lifeline(tmp_path: Path) -> None:
    script = (
        "import os\nfrom trinity_sync.host.process import end_with_driver\n"
        "end_with_driver()\nos.system('ls -l /proc/self/fd')"
    )
    with driver_lifeline(tmp_path / "lifeline") as env:
        done = subprocess.run([sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "/proc/" in done.stdout
    assert "lifeline" not in done.stdout


def test_where_ray_is_another_programs_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRIVER, raising=False)
    end_with_driver()


def test_an_environment_is_as_before_afterwards_but_for_what_others_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWN", "before")
    monkeypatch.delenv("NEW", raising=False)
    with environment({"KNOWN": "within", "NEW": "within"}):
        assert (os.environ["KNOWN"], os.environ["NEW"]) == ("within", "within")
        monkeypatch.setenv("OF_OTHERS", "stays")
    assert os.environ["KNOWN"] == "before"
    assert "NEW" not in os.environ
    assert os.environ["OF_OTHERS"] == "stays"
