"""The callback of verl's V1 trainer, with a real monitor and no engine: verl's call, and what is on the disk then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback

from tests.checkpoint.test_daemon import LIFETIME, LIMIT, begin, save, wait_until_let_go
from trinity_sync.actors.local import LocalHandle
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint.daemon import connect
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.integrations.verl import callback as callbacks
from trinity_sync.integrations.verl import local_run
from trinity_sync.integrations.verl.local_run import Program
from trinity_sync.integrations.verl.vendor import CALLBACK

BESIDE = ("actor/beside", "critic/beside")

OnSave = Callable[[int], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def engines(root: Path) -> Iterator[LocalHandle]:
    """What the engines of a program have opened; the newest two checkpoints stay."""
    config = MonitorConfig(timeout_s=LIMIT, fsync=False, policies={"keep_last": {"n": 2}})
    handle = connect(root, program="one", may_start=True, timeout_s=LIMIT, lifetime=LIFETIME, config=config)
    yield handle
    handle.close()


@pytest.fixture
def on_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnSave]:
    """What verl's trainer does after a save."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "trinity")
    monkeypatch.setattr(local_run, "this_program", lambda: Program(word="one", address="127.0.0.1"))
    opened: list[LocalHandle] = []

    def connect_too(*args: Any, **kwargs: Any) -> LocalHandle:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(local_run, "connect", connect_too)
    monkeypatch.setattr(callbacks, "finish_at_exit", lambda record: None)  # this process ends later
    made = build_checkpoint_callback(OmegaConf.create({"trainer": {"checkpoint_callback_class": CALLBACK}}))

    def on_save(step: int) -> None:
        folder = step_dir(root, step)
        folder.mkdir(parents=True)
        (folder / "data.pt").write_text("the trainer's own")
        made.on_save(trainer=SimpleNamespace(), global_step=step, checkpoint_dir=str(folder), async_save=False, new=1)

    yield on_save
    for handle in opened:
        handle.close()
    wait_until_let_go(root)


def events(root: Path, number: int) -> list[dict[str, Any]]:
    """Wait until so many are recorded."""
    file, deadline = root / callbacks.EVENTS, time.monotonic() + LIMIT
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "nothing is recorded"
        time.sleep(0.02)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_step_is_committed_though_no_engine_is_used_again(root: Path, on_save: OnSave, engines: LocalHandle) -> None:
    for step in (1, 2, 3):
        save(engines, begin(engines, step, "model", *BESIDE), step, "model")
        assert not (step_dir(root, step)).exists()
        on_save(step)
        found = events(root, step if step < 3 else 4)
    assert [(one["event"], one["step"]) for one in found] == [("commit", 1), ("commit", 2), ("commit", 3), ("prune", 1)]
    assert {one["attempt"] for one in found} == {0}
    assert (found[2]["kind"], found[2]["bytes"]) == ("full", len("model") + len("the trainer's own"))
    assert {"digest", "total_s", "written_s", "time"} <= found[2].keys()
    assert read_manifest(step_dir(root, 3)).paths == {"model", "data.pt"}


def test_the_trainer_does_not_wait_for_the_commit_and_hears_aloud_that_it_failed(
    root: Path, on_save: OnSave, engines: LocalHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(engines, 1, "model", *BESIDE)
    on_save(1)
    assert MonitorClient(engines).status(1).result(LIMIT)["missing"] == ["part 'model'"]
    MonitorClient(engines).fail_step(1, "planted", attempt=None).result(LIMIT)
    [fault] = events(root, 1)
    assert fault["event"] == "fault"
    assert "planted" in fault["error"]
    assert "the checkpoint of step 1 is not committed: " in capsys.readouterr().err


PROGRAM = """
import sys
from trinity_sync.integrations.verl import at_exit, callback, local_run
from trinity_sync.integrations.verl.local_run import Program

local_run.this_program = lambda: Program(word="one", address="127.0.0.1")
callback._END_S = float(sys.argv[2])
print("imported", flush=True)
sys.stdin.readline()
callback.CheckpointCallback().on_save(None, 1, sys.argv[1])
import atexit
atexit.register(at_exit.end_as_failed)
print("main ends", flush=True)
"""


@contextmanager
def driver(root: Path, engines: LocalHandle, limit_s: float) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A program that has saved step 1 and is at its end, and where the step's engines write."""
    step_dir(root, 1).mkdir(parents=True)
    command = [sys.executable, "-c", PROGRAM, str(step_dir(root, 1)), str(limit_s)]
    environment = {**os.environ, "VERL_ENGINE_VENDOR": "trinity"}
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environment) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert any(line == "imported\n" for line in process.stdout)
            folder = begin(engines, 1, "model", *BESIDE)
            print(file=process.stdin, flush=True)
            assert any(line == "main ends\n" for line in process.stdout)
            yield process, folder
        finally:
            process.kill()


def test_the_last_step_is_recorded_at_the_end_of_the_program(root: Path, engines: LocalHandle) -> None:
    with driver(root, engines, LIMIT) as (process, folder):
        save(engines, folder, 1, "model")
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 0
    assert [(one["event"], one["step"]) for one in events(root, 1)] == [("commit", 1)]


@pytest.mark.all
def test_what_is_not_committed_at_the_end_of_the_program_is_told(root: Path, engines: LocalHandle) -> None:
    with driver(root, engines, 0.2) as (process, _):
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 1
    assert "a checkpoint was lost at the end of the program: " in said
    assert "commit step 1, which is not recorded" in said


def test_a_monitor_that_is_not_there_does_not_end_the_training(
    on_save: OnSave, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks, "ANSWER_S", 0.2)
    on_save(1)
    assert "step 1 is committed when its engines are used again" in capsys.readouterr().err


def test_without_our_engines_it_does_nothing_and_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    callbacks.CheckpointCallback().on_save(None, 1, str(step_dir(root, 1)))
    assert "VERL_ENGINE_VENDOR" in capsys.readouterr().err
    assert not root.exists()
