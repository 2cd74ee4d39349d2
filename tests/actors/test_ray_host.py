"""The end of a worker of Ray's: not by a signal, but with its raylet. Processes stand in for both."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest
import ray

from trinity_sync.actors.calls import RayHost
from trinity_sync.host.interrupts import ENDING, left_to_driver
from trinity_sync.host.process import DRIVER

WORKER = """
import os, sys, time
from trinity_sync.actors import calls
calls._ORPHAN_S = 0.1
calls.end_with_raylet()
print("watches", os.getpid(), flush=True)
time.sleep(60)  # a task that does not return
"""

RAYLET = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"


def test_a_worker_that_does_not_end_by_itself_is_killed_after_its_raylet() -> None:
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET, WORKER], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    worker = psutil.Process(int(raylet.stdout.readline().split()[1]))
    assert worker.is_running()
    raylet.send_signal(signal.SIGKILL)
    raylet.wait()
    try:
        assert raylet.stdout.read() == ""  # at its end
        worker.wait(10.0)
    finally:
        if worker.is_running():
            worker.kill()


def test_a_worker_lives_as_long_as_its_raylet() -> None:
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET, WORKER], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    worker = psutil.Process(int(raylet.stdout.readline().split()[1]))
    try:
        with pytest.raises(psutil.TimeoutExpired):
            worker.wait(2.0)  # two looks at it
    finally:
        worker.kill()
        raylet.kill()
        raylet.wait()


@pytest.mark.all
def test_a_worker_that_ends_with_its_driver_does_not_look_at_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a fork of a server that may go."""
    monkeypatch.setenv(DRIVER, "/tmp/lifeline")
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET, WORKER], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    worker = psutil.Process(int(raylet.stdout.readline().split()[1]))
    try:
        raylet.kill()
        raylet.wait()
        with pytest.raises(psutil.TimeoutExpired):
            worker.wait(2.0)
    finally:
        worker.kill()


PREPARED = """
import subprocess, sys
from ray._private import utils
from trinity_sync.actors import calls

calls.prepare_worker()
utils.set_sigterm_handler(lambda signum, frame: sys.exit(1))  # as Ray does afterwards
print("up", flush=True)
for line in sys.stdin:
    with subprocess.Popen(["sleep", "20"]) as program:
        program.send_signal(int(line))
    print(program.returncode, flush=True)
"""


def test_a_worker_leaves_signals_to_the_driver_and_its_programs_do_not() -> None:
    with left_to_driver():  # as of Ray's own processes
        worker = subprocess.Popen(
            [sys.executable, "-c", PREPARED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "up\n"
    for signum in ENDING:
        worker.send_signal(signum)
    said, _ = worker.communicate("".join(f"{signum:d}\n" for signum in ENDING), timeout=100)
    assert (said, worker.returncode) == ("".join(f"{-signum}\n" for signum in ENDING), 0)


def test_a_reference_that_fails_with_its_process_is_outlived_and_one_that_ends_is_not() -> None:
    async def gone() -> None:
        raise ray.exceptions.RayError

    async def ended() -> None:
        pass

    host = RayHost.__new__(RayHost)
    assert asyncio.run(host.outlived([gone()])) is True
    assert asyncio.run(host.outlived([ended()])) is False
