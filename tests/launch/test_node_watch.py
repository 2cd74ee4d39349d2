"""Deaths of a raylet and of a node are told, with plain processes and answers in the place of Ray's."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from trinity_sync.launch import node_watch
from trinity_sync.launch.node_watch import ended_with_its_node, raylet_watched, starting_raylets_watched

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process whose name is that of a raylet, with such arguments."""
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("sh") or "/bin/sh", program)
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        running.append(
            subprocess.Popen(
                [program, "-c", "echo up; read line", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        stdout = running[-1].stdout
        assert stdout is not None
        stdout.readline()
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(node_watch, "_say", said.append)
    return said


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_death_of_a_raylet_that_starts_is_said_at_once(start: Start, said: list[str]) -> None:
    start("/tmp/session-1", "of a try before").kill()
    earlier = start("/tmp/session-1", "of a try before")
    with starting_raylets_watched("/tmp/session-1"):
        other = start("/tmp/session-2")
        raylet = start("/tmp/session-1")
        time.sleep(2 * node_watch._LOOK_S)
        for process in (earlier, other):
            process.kill()
            process.wait()
        time.sleep(2 * node_watch._LOOK_S)
        assert said == []
        raylet.kill()
        wait_until(lambda: said)
    assert said == [f"Ray's raylet on this node (pid {raylet.pid}) has died while Ray was starting"]


def test_the_death_of_a_nodes_raylet_is_said_at_once(start: Start, said: list[str]) -> None:
    other = subprocess.Popen(["sh", "-c", "read line", "--node_id=abc"], stdin=subprocess.PIPE)
    raylet = start("--node_id=abc")
    start("--node_id=def")
    with raylet_watched("abc", ours=True):
        raylet.kill()
        wait_until(lambda: said)
    other.communicate()
    assert said == [f"Ray's raylet on this node (pid {raylet.pid}) has died and the run ends; it can be resumed"]


def test_one_that_is_ended_on_purpose_has_not_died(start: Start, said: list[str]) -> None:
    raylet = start("--node_id=abc")
    with raylet_watched("abc", ours=False) as expected:
        expected.set()
        raylet.kill()
        raylet.wait()
        time.sleep(0.2)
    assert said == []


def test_the_watch_ends_with_its_block_and_leaves_nothing_open(start: Start, said: list[str]) -> None:
    raylet = start("--node_id=abc")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with raylet_watched("abc", ours=True):
        assert any(thread.name == "raylet-watch" for thread in threading.enumerate())
    with starting_raylets_watched("/tmp/session-that-never-starts"):
        pass
    assert not any(thread.name == "raylet-watch" for thread in threading.enumerate())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    raylet.kill()
    raylet.wait()
    assert said == []


def test_a_raylet_that_does_not_start_yet_is_looked_for_without_haste() -> None:
    asleep, wake = os.pipe()
    began = time.monotonic()
    assert node_watch._ready(asleep, limit_s=0.2) == set()
    assert 0.15 < time.monotonic() - began < 10
    os.close(wake)
    os.close(asleep)


def test_of_somebody_elses_raylet_that_is_out_of_sight_nothing_is_said(said: list[str]) -> None:
    with raylet_watched("none", ours=False):
        pass
    assert said == []


class _Ended(list[int]):
    """Exit codes with which the program would have ended; the first one ends the wait."""

    def __call__(self, code: int) -> None:
        self.append(code)
        raise SystemExit


@contextmanager
def node(monkeypatch: pytest.MonkeyPatch, nodes: Callable[[], Any]) -> Iterator[_Ended]:
    ended = _Ended()
    monkeypatch.setattr(node_watch, "_ASK_S", 0.05)
    monkeypatch.setattr(node_watch, "_END_S", 0.3)
    monkeypatch.setattr(node_watch.os, "_exit", ended)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "abc"))
    monkeypatch.setattr(ray, "nodes", nodes)
    yield ended


def alive(*ids: str, dead: tuple[str, ...] = ()) -> list[dict[str, object]]:
    return [{"NodeID": name, "Alive": name not in dead} for name in (*ids, *dead)]


def test_a_program_whose_node_is_given_up_ends_with_1_after_its_last_words(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    kept: list[str] = []

    def end(error: str) -> None:
        kept.append(error)
        raise RuntimeError("what ends it may fail")

    answers = iter([alive("abc", "def"), alive("abc", dead=("def",)), alive("def", dead=("abc",))])
    with node(monkeypatch, lambda: next(answers)) as ended, ended_with_its_node(end):
        wait_until(lambda: ended)
    assert ended == [1]
    assert said == kept
    assert said[0].startswith("Ray has given up this node: its raylet died")


def test_a_gcs_that_does_not_answer_ends_the_program(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    silent = threading.Event()
    monkeypatch.setattr(node_watch, "_SILENT", 4)
    began = time.monotonic()
    with node(monkeypatch, lambda: silent.wait(30)) as ended, ended_with_its_node(lambda error: None):
        wait_until(lambda: ended)
        assert time.monotonic() - began > 4 * 0.05
        silent.set()
    assert said == ["Ray's GCS has not answered for 0.2 s; the run ends, and can be resumed"]


def test_a_question_that_fails_is_asked_again_and_a_slow_answer_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    asked: list[float] = []

    def nodes() -> list[dict[str, object]]:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise ConnectionError("Ray is ending")
        time.sleep(0.12)  # two looks
        return alive("abc")

    monkeypatch.setattr(node_watch, "_SILENT", 4)
    with node(monkeypatch, nodes) as ended, ended_with_its_node(lambda error: said.append("ended")):
        wait_until(lambda: len(asked) > 5)
    assert (ended, said) == ([], [])


def test_the_last_question_is_waited_for_as_ray_is_not_to_end_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def nodes() -> list[dict[str, object]]:
        asked.set()
        answer.wait(30)
        return alive("abc")

    with node(monkeypatch, nodes) as ended:
        monkeypatch.setattr(node_watch, "_END_S", 60.0)
        began = time.monotonic()
        with ended_with_its_node(lambda error: None):
            asked.wait(30)
            threading.Timer(0.5, answer.set).start()
        assert 0.3 < time.monotonic() - began < 25
        assert not any(thread.name == "node-watch" for thread in threading.enumerate())
    assert ended == []


def test_the_gcs_has_the_minute_that_the_page_of_faults_promises() -> None:
    assert node_watch._SILENT * node_watch._ASK_S == 60
