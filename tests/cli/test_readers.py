"""Who reads checkpoints and runs needs no engine: those commands import neither verl nor Megatron, vLLM or Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_weights import commit
from tests.tracking import synthetic
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder

ENGINES = ("verl", "megatron", "mbridge", "vllm", "ray", "peft", "tensordict", "torchdata")

PROGRAM = """
import json, sys
from importlib.machinery import PathFinder

ENGINES, commands = json.loads(sys.argv[1])
real = PathFinder.find_spec

@staticmethod
def find_spec(name, *where, **more):
    return None if name.partition(".")[0] in ENGINES else real(name, *where, **more)

PathFinder.find_spec = find_spec
from trinity_sync.cli.main import main
for command in commands:
    code = main(command)
    assert code == 0, (command, code)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run / "checkpoints", step)
    with RunFolder.open(run, resume=False) as folder:
        recorder = Recorder.start(folder, command="", seed=1, config_digest=None, threads=1, total_steps=2, view="off")
        recorder.event(
            synthetic.event("commit", step=2, kind="full", digest=None, bytes=100, blocked_s=0.0, total_s=0.0)
        )
        recorder.finish("completed")
    return run


def test_readers_work_where_no_engine_is_installed(run: Path, tmp_path: Path) -> None:
    first = str(run / "checkpoints" / "global_step_1")
    commands = [
        ["list", str(tmp_path)],
        ["report", str(run)],
        ["trace", str(run)],
        ["watch", str(run), "--once"],
        ["ckpt", "list", str(run)],
        ["ckpt", "inspect", str(run)],
        ["ckpt", "verify", str(run)],
        ["ckpt", "export", str(run), "--output", str(tmp_path / "out")],
        ["ckpt", "diff", first, first],
        ["ckpt", "pin", str(run), "1"],
        ["ckpt", "prune", str(run), "--keep", "keep_last.n=1", "--dry-run"],
    ]
    asked = json.dumps([ENGINES, commands])
    done = subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
