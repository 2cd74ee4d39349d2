"""Processes killed at random instants of saves: whatever is listed afterwards is whole, and saving goes on.

Ranks are processes of their own whose engine is a tensor; agent, monitor, segments, files and deaths are real. Runs
through `launch.py` that are killed are in tests/e2e.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests import local_ray
from tests.trainer.test_agent_saver import LIMIT, PretendBackend, Saves
from trinity_sync.checkpoint.folder import catalog, resume_point
from trinity_sync.checkpoint.folder.contents import read_tracker
from trinity_sync.checkpoint.folder.lock import locked
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL

cluster = local_ray.cluster

NUMEL = 1 << 19
START_LIMIT = 240.0
STEPS = 6
PARTS = ["rank-00000", "rank-00001"]

TRIALS = [(victim, seed) for victim in ("rank", "agent", "monitor") for seed in range(16)]
FEW = {("rank", 0), ("agent", 0), ("monitor", 0)}


@ray.remote(num_cpus=0)
class Rank:
    """A rank in a process of its own."""

    def begin(self, saves: Saves, part: str) -> int:
        """Be a rank of this run from now on; the process id."""
        self._backend = PretendBackend(NUMEL)
        self._saver = saves.saver(self._backend, part=part)
        return os.getpid()

    def train_and_save(self, step: int, folder: Path) -> None:
        self._backend.train(step)
        self._saver.save(step, folder)


class Ranks:
    """The processes of two ranks, for one run after another: each takes seconds to load torch."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def begin(self, saves: Saves) -> list[int]:
        """Let them be the ranks of this run; their process ids."""
        for part in PARTS:
            self._actors.setdefault(part, Rank.remote())
        calls = [self._actors[part].begin.remote(saves, part) for part in PARTS]
        return ray.get(calls, timeout=START_LIMIT)

    def train_and_save(self, step: int, folder: Path) -> None:
        ray.get([rank.train_and_save.remote(step, folder) for rank in self._actors.values()], timeout=LIMIT)

    def end_the_first(self) -> None:
        """It is killed, if it has not been yet; the next run gets another."""
        local_ray.kill(self._actors.pop(PARTS[0]))


@pytest.fixture(scope="module")
def ranks(cluster: None) -> Ranks:
    return Ranks()


def drive(saves: Saves, ranks: Ranks, first: int = 1) -> list[int]:
    """Train and save some steps until it fails; the steps that were reported committed."""
    pids = {"rank": ranks.begin(saves)[0]}
    pids["agent"] = saves.agent.memory().result(LIMIT)["pid"]
    pids["monitor"] = ray.get(saves.monitor.describe.remote(), timeout=LIMIT)["pid"]
    saves.ready(pids)
    committed = []
    for step in range(first, first + STEPS):
        folder = saves.begin(step, PARTS)
        waiting = saves.monitor.wait_committed.remote(step, saves.attempt, LIMIT)
        ranks.train_and_save(step, folder)
        committed.append(ray.get(waiting, timeout=LIMIT)["step"])
    return committed


def assert_whole(root: Path, told: list[int]) -> None:
    """What is listed verifies and holds what its label says, and nothing that was reported is lost."""
    named = read_tracker(root, FULL).step  # first: where the driver was killed, its monitor may commit one more
    listed = [info for info in catalog.scan(root) if info.manifest is not None]
    for info in listed:
        assert catalog.verify(info.path).ok
        for part in PARTS:
            weights = torch.load(info.path / "actor" / f"model_{part}.pt", weights_only=True)["weight"]
            assert weights.eq(info.step).all()
    steps = [info.step for info in listed]
    assert set(told) <= set(steps)
    assert named is None or named in steps
    assert named is not None or not told


def kill_later(pid: int, delay_s: float) -> None:
    """Kill a process after a while, unless it has ended by then: another one may have its number."""
    process = os.pidfd_open(pid)

    def kill() -> None:
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)

    threading.Timer(delay_s, kill).start()


@pytest.mark.parametrize(
    ("victim", "seed"),
    [pytest.param(*trial, marks=() if trial in FEW else pytest.mark.all) for trial in TRIALS],
)
def test_a_process_killed_at_any_instant_of_a_save_tears_nothing(
    ranks: Ranks, tmp_path: Path, victim: str, seed: int
) -> None:
    draw = random.Random(f"{victim}-{seed}")
    delay = draw.uniform(0.0, 0.6)
    saves = Saves(tmp_path, ready=lambda pids: kill_later(pids[victim], delay))
    told: list[int] = []
    try:
        told = drive(saves, ranks)
    except (RunError, ray.exceptions.RayError):
        assert victim != "monitor", "it is started again, and nobody notices"
    finally:
        if victim == "rank":
            ranks.end_the_first()
    assert victim != "monitor" or told == list(range(1, STEPS + 1))
    saves.end()
    assert_whole(saves.root, told)

    start = catalog.newest_good(saves.root)
    first = start.step if start is not None else 0
    resume_point.set_start(saves.root, first, 1)
    again = Saves(tmp_path, attempt=1)
    assert drive(again, ranks, first + 1) == list(range(first + 1, first + 1 + STEPS))
    again.end()
    assert_whole(again.root, list(range(first + 1, first + 1 + STEPS)))
    assert list((again.root / ".staging").glob("*/")) == []


@pytest.mark.all
@pytest.mark.parametrize("seed", range(8))
def test_a_driver_killed_at_any_instant_of_a_save_tears_nothing(tmp_path: Path, seed: int) -> None:
    """With it goes all of Ray."""
    delay = random.Random(f"driver-{seed}").uniform(0.0, 0.6)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.test_kills", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(delay)  # the instant is the test
    child.kill()
    told = [int(line) for line in child.stdout.read().split()]
    child.wait(LIMIT)
    root = tmp_path / "checkpoints"
    assert_whole(root, told)
    with locked(root, tmp_path):  # as every run does; the monitor may live a moment longer than its driver
        start = catalog.newest_good(root)
        resume_point.set_start(root, start.step if start is not None else 0, 1)
    assert_whole(root, told)


def _child(root: Path) -> None:
    def ready(_: dict[str, int]) -> None:
        print("ready", flush=True)

    with local_ray.running():
        saves = Saves(root, ready=ready)
        ranks_done: list[Any] = drive(saves, Ranks())
        print(*ranks_done, flush=True)


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
