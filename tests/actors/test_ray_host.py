"""The end of a worker of Ray's, which is not left behind by its raylet. Processes stand in for both."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

WORKER = """
import os, sys, time
from trinity_sync.actors import ray_host
ray_host._ORPHAN_S = 0.1
ray_host.end_with_raylet()
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
