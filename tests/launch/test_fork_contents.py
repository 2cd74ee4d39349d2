"""What the fork server imports leaves Ray's generator of ids alone: else all forks would draw the same ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trinity_sync.backends.option import platform_env

PROGRAM = """
import importlib, os, sys
import trinity_sync.launch.fork_contents as contents
from ray._raylet import ObjectRef, TaskID, WorkerID

assert "verl.workers.engine_workers" in sys.modules
for _ in range(3):
    if os.fork() == 0:
        print("drawn", WorkerID.from_random().hex(), ObjectRef.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
WorkerID.from_random()
importlib.reload(contents)
"""


@pytest.mark.all
@pytest.mark.timeout(120)
def test_forks_draw_ids_of_their_own_and_one_who_cannot_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **platform_env(False)}, capture_output=True, text=True
    )
    drawn = [word for line in done.stdout.splitlines() if line.startswith("drawn") for word in line.split()[1:]]
    assert len(drawn) == len(set(drawn)) == 6, done.stderr
    assert done.returncode == 1
    assert "ImportError: forks of this process would all draw the same ids" in done.stderr
