"""Where a run begins, decided from folders alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint import store
from trinity_sync.checkpoint.layout import Manifest
from trinity_sync.checkpoint.lock import hold_as_writer, holder, locked
from trinity_sync.config import compose
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.starting import Start


def config(*overrides: str) -> Any:
    return compose(["trainer.steps=100", *overrides])


def saved(root: Path, step: int, *, backend: str = "fsdp2", ranks: int = 2, dcp: bool = False) -> Path:
    """A committed full checkpoint."""
    files = {"actor/dcp/.metadata": "x"} if dcp else {"actor/model_world_size_2_rank_0.pt": "x"}
    folder = store.prepare_staging(root, step, 0)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    draft = Manifest(step=step, attempt=0, kind="full", backend=backend, world_size=ranks)
    store.commit_folder(root, draft)
    return root / f"global_step_{step}"


def verls(root: Path, *, ranks: int = 2, version: int = 2) -> Path:
    """A checkpoint as verl writes it."""
    actor = root / "global_step_30" / "actor"
    actor.mkdir(parents=True)
    for rank in range(ranks):
        for name in ("model", "optim", "extra_state"):
            (actor / f"{name}_world_size_{ranks}_rank_{rank}.pt").write_text("x")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    return root / "global_step_30"


def test_a_new_run_begins_at_the_model(tmp_path: Path) -> None:
    assert Start.find(config(), tmp_path, resume=False) == Start(0, False, tmp_path, None)


def test_a_new_run_leaves_the_checkpoints_of_another_one_alone(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        Start.find(config(), tmp_path, resume=False)


def test_a_resume_takes_the_newest_that_verifies_and_says_what_it_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = saved(tmp_path, 10), saved(tmp_path, 20)
    (bad / "actor" / "model_world_size_2_rank_0.pt").write_text("y")
    assert Start.find(config(), tmp_path, resume=True) == Start(10, True, tmp_path, good)
    assert "step 20 is passed over" in capsys.readouterr().err


def test_a_resume_without_a_checkpoint_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Start.find(config(), tmp_path, resume=True) == Start(0, True, tmp_path, None)
    assert "begins again at step 1" in capsys.readouterr().err


def test_a_run_at_its_end_needs_more_steps(tmp_path: Path) -> None:
    saved(tmp_path, 100)
    with pytest.raises(ConfigError, match=r"trainer\.steps=200"):
        Start.find(config(), tmp_path, resume=True)


@pytest.mark.parametrize("wanted", [["backend.ranks=1"], ["backend=fsdp"], ["backend=fsdp", "backend.ranks=4"]])
def test_another_engine_needs_the_format_for_it(
    tmp_path: Path, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "verl", 10)
    with pytest.raises(ConfigError, match=r"checkpoint\.format=dcp"):
        Start.find(config(*wanted), tmp_path / "verl", resume=True)
    saved(tmp_path / "dcp", 10, dcp=True)
    assert Start.find(config(*wanted), tmp_path / "dcp", resume=True).step == 10
    assert ("random numbers" in capsys.readouterr().err) == any("ranks" in text for text in wanted)


def test_a_new_run_may_go_on_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "other", 10)
    start = Start.find(config(f"checkpoint.resume_from={folder}"), tmp_path / "own", resume=False)
    assert start == Start(10, False, tmp_path / "own", folder)


@pytest.mark.parametrize(("version", "backend"), [(1, "fsdp"), (2, "fsdp2")])
def test_a_new_run_may_go_on_from_a_checkpoint_of_verls(tmp_path: Path, version: int, backend: str) -> None:
    folder = verls(tmp_path / "verl", version=version)
    asked = config(f"checkpoint.resume_from={folder}", f"backend={backend}")
    assert Start.find(asked, tmp_path / "own", resume=False) == Start(30, False, tmp_path / "own", folder)
    with pytest.raises(ConfigError, match=r"backend\.ranks=2, this run asks for .*backend\.ranks=1"):
        Start.find(
            config(f"checkpoint.resume_from={folder}", f"backend={backend}", "backend.ranks=1"),
            tmp_path / "own",
            resume=False,
        )


def test_what_cannot_be_gone_on_from_is_named(tmp_path: Path) -> None:
    def refused(folder: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=rf"checkpoint\.resume_from.*{text}"):
            Start.find(config(f"checkpoint.resume_from={folder}"), tmp_path / "own", resume=False)

    refused(tmp_path / "nothing", "no step folder")
    (tmp_path / "global_step_1").mkdir()
    refused(tmp_path / "global_step_1", "neither manifest.json nor")
    folder = verls(tmp_path / "verl")
    (folder / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    refused(folder, "optim_world_size_2_rank_1.pt is missing")
    (folder / "actor" / "optim_world_size_2_rank_1.pt").write_text("x")
    (folder / "actor" / "fsdp_config.json").write_text("{")
    refused(folder, "fsdp_config.json cannot be read")
    weights = tmp_path / "weights"
    commit(weights, 10, kind="state_dict")
    refused(weights / "global_step_10", "holds weights only")
    damaged = saved(tmp_path / "damaged", 10)
    (damaged / "actor" / "model_world_size_2_rank_0.pt").write_text("")
    refused(damaged, "0 bytes instead of 1")


def test_two_runs_do_not_share_a_checkpoint_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trinity_sync.checkpoint.lock import locked\n"
        "with locked(Path(sys.argv[1]), Path('first')): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=rf"in use by the run in first \(pid {other.pid} "),
            locked(tmp_path / "checkpoints", tmp_path),
        ):
            pass
        other.kill()
    with locked(tmp_path / "checkpoints", tmp_path):
        pass


def test_a_run_waits_until_the_monitor_of_a_killed_one_has_ended(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trinity_sync.checkpoint.lock import hold_as_writer\n"
        "held = hold_as_writer(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as monitor:
        assert monitor.stdout is not None
        assert monitor.stdout.readline() == "held\n"
        refusal = rf"the checkpoint monitor of the run before \(pid {monitor.pid} on .*\) still writes there after 0 s"
        with pytest.raises(ConfigError, match=refusal), locked(tmp_path, tmp_path, timeout_s=0.2):
            pass
        entered = threading.Event()

        def enter() -> None:
            with locked(tmp_path, tmp_path):
                entered.set()

        run = threading.Thread(target=enter)
        run.start()
        assert not entered.wait(0.3)
        monitor.kill()
        monitor.wait()
        run.join(30)
        assert entered.is_set()


def test_a_monitor_that_comes_up_after_another_run_took_over_ends(tmp_path: Path) -> None:
    with locked(tmp_path, Path("first")):
        first = holder(tmp_path)
        hold_as_writer(tmp_path, first).close()
    with locked(tmp_path, Path("first")):
        assert holder(tmp_path) != first, "another run of the same process in the same folder is another one"
        refusal = rf"^{tmp_path} has been taken over by the run in first \(pid \d+ on [^)]*\)$"
        with pytest.raises(RunError, match=refusal):
            hold_as_writer(tmp_path, first)
    with locked(tmp_path, Path("third"), timeout_s=0.0):
        pass


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"checkpoint\.dir=.*name a folder"), locked(path, tmp_path):
            pass
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "closed" / "x", tmp_path):
            pass
