"""What a user meets before a run begins: own modules, paths and names as they are typed, refusals, and a dry run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.stand_in import StandIn, standing_in
from trinity_sync.cli import main as cli
from trinity_sync.config import RunConfig, conf_dir
from trinity_sync.errors import ConfigError
from trinity_sync.host.hardware import own_module_folders
from trinity_sync.launch import launcher as real_launcher

TASK = """
from trinity_sync.tasks.base import RewardResult

class Sums:
    def __init__(self, largest: int, seed: int, *, response_length: int) -> None:
        self.largest = largest

    def prompts(self, step, count):
        return []

    def reward(self, prompt, text, finished):
        return RewardResult(0.0, exact=0.0)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    with standing_in(StandIn(), tmp_path / "here", monkeypatch) as stand_in:
        yield stand_in
    for name in [name for name in sys.modules if name.startswith("door_")]:
        del sys.modules[name]


def run(*arguments: str) -> int:
    return cli.main(["run", *arguments])


@pytest.mark.parametrize(
    "refused",
    [
        ["trainer.steps=0"],
        ["trainer.steps=0", "hydra.job.chdir=true"],
        ["trainer.steps=0", "hydra.run.dir=a/b/c"],
        ["task._target_=door_nowhere.Task"],
        ["-m", "trainer.steps=0,1"],
    ],
    ids=" ".join,
)
def test_a_refused_configuration_leaves_no_folder(launcher: StandIn, refused: list[str]) -> None:
    assert run(*refused) == 2
    assert list(Path.cwd().iterdir()) == []


def test_a_folder_of_the_users_stays_where_a_run_in_it_is_refused(launcher: StandIn) -> None:
    Path("mine").mkdir()
    Path("mine/notes").touch()
    assert run("trainer.steps=0", "hydra.run.dir=mine") == 2
    assert Path("mine/notes").exists()


def test_a_dry_run_looks_and_leaves_nothing(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(StandIn, "look", lambda self, cfg, run_dir: looked.append(run_dir), raising=True)
    assert run("--dry-run", "hydra.run.dir=a/b") == 0
    assert "dry run: copy-digits could begin, in " in capsys.readouterr().out
    assert run("-m", "seed=1,2", "--dry-run", "hydra.sweep.dir=s") == 0
    assert looked == [Path("a/b").absolute(), Path("s/0").absolute(), Path("s/1").absolute()]
    assert launcher.calls == []
    assert list(Path.cwd().iterdir()) == []


def test_a_sweep_looks_once_at_jobs_that_are_alike_and_leaves_nothing_where_one_is_refused(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[str] = []

    def refuse(self: StandIn, cfg: RunConfig, run_dir: Path) -> None:
        looked.append(run_dir.name)
        if cfg.settings.model.lora.rank == 4:
            raise ConfigError("no layer is called q_prj")

    monkeypatch.setattr(StandIn, "look", refuse)
    assert run("-m", "trainer.lr=1e-3,1e-4", "model.lora.rank=0,4") == 2
    assert looked == ["0", "1"]
    assert capsys.readouterr().err == (
        "error: job 1 of the sweep (trainer.lr=0.001 model.lora.rank=4) cannot run, so nothing was started: no layer "
        "is called q_prj\n"
    )
    assert launcher.calls == []
    assert list(Path.cwd().iterdir()) == []


def test_a_dry_run_refuses_what_the_run_would(launcher: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "look", lambda self, cfg, run_dir: real_launcher.look(cfg, run_dir))
    assert run("--dry-run") == 0
    Path("store/global_step_3").mkdir(parents=True)
    assert run("--dry-run", "checkpoint.resume_from=store/global_step_3") == 2
    assert run("-m", "--dry-run", "seed=1,2", "checkpoint.resume_from=store/global_step_3") == 2
    assert [path.name for path in Path.cwd().iterdir()] == ["store"]


def test_a_module_in_the_current_folder_is_found_and_only_while_the_command_runs(launcher: StandIn) -> None:
    Path("door_tasks.py").write_text(TASK)
    Path("my_conf/task").mkdir(parents=True)
    Path("my_conf/task/sums.yaml").write_text("_target_: door_tasks.Sums\nlargest: 9\nresponse_length: 4\n")
    seen: list[list[str]] = []
    launcher.behave = lambda cfg: seen.append(own_module_folders()) or 0
    before = list(sys.path)
    here = str(Path.cwd())
    assert run("--config-path", "my_conf", "task=sums", "hydra.job.chdir=true") == 0
    assert seen == [[here]]
    assert sys.path == before
    assert own_module_folders() == []


def test_what_is_installed_is_not_hidden_by_a_file_in_the_current_folder(launcher: StandIn) -> None:
    Path("xxhash.py").write_text("raise SystemExit('this one')")
    sys.modules.pop("xxhash", None)
    assert run() == 0


def test_a_task_of_ones_own_is_named_without_an_option_file(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("door_tasks.py").write_text(TASK)
    assert run("task._target_=door_tasks.Sums", "+task.largest=9") == 0
    assert run("task._target_=door_tasks.Sums") == 2
    assert "missing 1 required positional argument: 'largest'" in capsys.readouterr().err
    assert run("task._target_=door_tasks.Sums", "+task.largest=9", "+task.colour=3") == 2
    assert "unexpected keyword argument 'colour'" in capsys.readouterr().err


def test_names_of_any_language_and_paths_from_home_are_taken(launcher: StandIn, tmp_path: Path) -> None:
    assert run("name=größe", "checkpoint.dir=~/store", "cluster.temp_dir='~/t'") == 0
    (call,) = launcher.calls
    assert call.run_dir.parent == Path("outputs/größe").absolute()
    assert call.cfg.checkpoint.dir == f"{tmp_path}/home/store"
    assert call.cfg.cluster.temp_dir == f"{tmp_path}/home/t"
    assert run("name=a/b") == 2


@pytest.mark.parametrize("option", ["mine", "deeper/mine"])
def test_an_experiment_without_its_header_is_told_so(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    file = Path(f"my_conf/experiment/{option}.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("trainer:\n  steps: 3\n")
    assert run("--config-dir=my_conf", f"experiment={option}") == 2
    assert f"experiment/{option}.yaml: its first line has to be '# @package _global_'" in capsys.readouterr().err
    file.write_text("# @package _global_\n" + file.read_text())
    assert run("--config-dir=my_conf", f"experiment={option}") == 0
    assert launcher.calls[0].cfg.trainer.steps == 3


@pytest.mark.parametrize("program", [["launch.py"], ["-m", "trinity_sync.cli", "run"]], ids=["launch.py", "command"])
def test_ctrl_c_in_the_first_moments_is_told_in_one_line(tmp_path: Path, program: list[str]) -> None:
    """While Hydra is imported: nothing of ours can answer yet."""
    (tmp_path / "hydra").mkdir()
    (tmp_path / "hydra/__init__.py").write_text("raise KeyboardInterrupt\n")
    root = conf_dir().parent
    ended = subprocess.run(
        [sys.executable, *program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) in [(-signal.SIGINT, "error: interrupted\n"), (130, "error: interrupted\n")]
