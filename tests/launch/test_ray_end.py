"""The end of Ray in a program, with plain processes in the place of Ray's."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.node import Node

from trinity_sync.host import interrupts
from trinity_sync.launch import local_ray
from trinity_sync.launch.local_ray import give_up, kill_all, lives, processes_of, shut_down, wait_for_ends

_RAYLET = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
time.sleep(600)
"""
_WORKER = """
import os, subprocess, sys, time
pids = [subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]).pid for code in (%r, %r)]
print(*pids, flush=True)
time.sleep(600)
"""
_NOTICES = "import os, sys, time\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)"
_STUBBORN = "import time\ntime.sleep(600)"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "_SHUTDOWN_S", 0.3)
    monkeypatch.setattr(local_ray, "_PROCESS_END_S", 1.5)


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What stands for a raylet of the session in the folder, with one worker that has started two processes."""
    worker = _WORKER % (_NOTICES, _STUBBORN)
    process = subprocess.Popen([sys.executable, "-c", _RAYLET, str(tmp_path), worker], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.readline().split()) == 2  # all four are there
    left = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    yield process
    kill_all(left)
    process.wait()
    process.stdout.close()


def ends_with(monkeypatch: pytest.MonkeyPatch, shutdown: Callable[[], object]) -> None:
    monkeypatch.setattr(ray, "shutdown", shutdown)


def test_processes_are_found_by_the_folder_that_their_command_names(
    raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        found = processes_of(tmp_path)
        assert found[0].pid == raylet.pid
        assert len(found) == 4
        assert other.pid not in {process.pid for process in found}
        assert processes_of(tmp_path / "another") == []
    finally:
        other.kill()
        other.wait()


def test_forks_are_found_by_their_session_though_their_server_has_gone(tmp_path: Path) -> None:
    server = subprocess.Popen(
        ["sh", "-c", "sh -c 'echo up; exec sleep 600' & read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    server.stdout.readline()
    (tmp_path / "forks.session").write_text(str(server.pid))
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    server.stdout.close()
    (fork,) = processes_of(tmp_path)
    assert lives(fork)
    give_up(tmp_path)
    assert not lives(fork)


@pytest.mark.usefixtures("quick")
def test_workers_are_killed_what_they_started_is_waited_for_and_what_is_stubborn_is_killed(
    monkeypatch: pytest.MonkeyPatch, raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    _, worker, *started = processes = processes_of(tmp_path)
    killed: list[int] = []
    kill = psutil.Process.kill
    monkeypatch.setattr(psutil.Process, "kill", lambda self: killed.append(self.pid) or kill(self))
    ends_with(monkeypatch, raylet.kill)
    began = time.monotonic()
    shut_down(tmp_path, lambda: killed.append(0))
    assert not any(map(lives, processes))
    stubborn = next(process for process in started if killed[-1] == process.pid)
    assert killed == [0, worker.pid, stubborn.pid]
    assert time.monotonic() - began > 1.5


@pytest.mark.usefixtures("quick")
def test_what_stands_still_of_ray_is_killed(
    monkeypatch: pytest.MonkeyPatch, raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    processes = processes_of(tmp_path)
    ends_with(monkeypatch, raylet.wait)  # until somebody kills it
    shut_down(tmp_path)
    assert not any(map(lives, processes))


def test_after_an_interrupt_ray_has_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    monkeypatch.setattr(interrupts, "_deadline", time.monotonic() + local_ray._KILL_S + 0.5)
    monkeypatch.setattr(interrupts, "interrupted", lambda: True)
    processes = processes_of(tmp_path)
    ends_with(monkeypatch, raylet.wait)
    began = time.monotonic()
    shut_down(tmp_path)
    assert not any(map(lives, processes))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("own", [True, False])
def test_a_program_that_ray_does_not_let_go_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, own: bool
) -> None:
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(local_ray.os, "_exit", end)
    monkeypatch.setattr(local_ray, "_SHUTDOWN_S", 0.1)
    monkeypatch.setattr(local_ray, "_NOTICE_S", 0.5)
    ends_with(monkeypatch, lambda: ended.wait(30))
    began = time.monotonic()
    shut_down(tmp_path if own else None)
    assert codes == [1]
    assert (time.monotonic() - began > 0.5) == own
    assert re.fullmatch(r"error: Ray did not let this program go within \d s; it ends\n", capsys.readouterr().err)


def test_ray_kills_its_processes_and_does_not_ask_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(Node, "kill_all_processes", lambda self, **kwargs: asked.append(kwargs))
    before = Node.kill_all_processes
    ends_with(monkeypatch, lambda: Node.kill_all_processes(None, check_alive=False, allow_graceful=True))
    shut_down(None)
    assert asked == [{"check_alive": False, "allow_graceful": False}]
    assert Node.kill_all_processes is before


def test_a_ray_that_is_given_up_leaves_neither_processes_nor_its_folder(
    raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    processes = processes_of(tmp_path)
    give_up(tmp_path)
    assert not any(map(lives, processes))
    assert not tmp_path.exists()
    give_up(None)


def test_a_ray_whose_folder_is_gone_is_given_up_in_silence(tmp_path: Path) -> None:
    give_up(tmp_path / "gone")


def test_one_that_has_ended_does_not_live_even_where_nobody_took_note_of_it() -> None:
    process = subprocess.Popen(["sleep", "600"])
    seen = psutil.Process(process.pid)
    assert lives(seen)
    assert wait_for_ends([seen], 0.1) == [seen]
    process.kill()
    assert wait_for_ends([seen], 20.0) == []
    assert seen.status() == psutil.STATUS_ZOMBIE
    process.wait()
    assert not lives(seen)
    kill_all([seen])


def test_the_watch_over_the_end_does_not_keep_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[bool] = []
    ends_with(monkeypatch, lambda: watches.extend(one.daemon for one in threading.enumerate() if one.name == "ray-end"))
    shut_down(None)
    assert watches[-1:] == [True]
