"""Hydra's own tools work with `launch.py`: a job is pickled, and run again from the file. The run is a stand-in."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import launch
from tests.cli.stand_in import StandIn, standing_in
from trinity_sync import config
from trinity_sync.config import schema
from trinity_sync.launch import app

PICKLES = "+hydra.callbacks.pickle._target_=hydra.experimental.callbacks.PickleJobInfoCallback"

pytestmark = pytest.mark.filterwarnings("ignore:Experimental rerun CLI option")


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(StandIn(), tmp_path, monkeypatch) as stand_in:
        yield stand_in


def start(*arguments: str) -> int:
    return app.run_main(launch.main, arguments)


def test_another_process_reads_what_a_job_has_pickled(launcher: StandIn, tmp_path: Path) -> None:
    assert start("retention=[keep_last,keep_best]", "seed=7", "hydra.run.dir=run", PICKLES) == 0
    program = "import pickle, sys; cfg = pickle.load(open(sys.argv[1], 'rb')); print(cfg.seed, *cfg.retention.policies)"
    command = [sys.executable, "-c", program, str(tmp_path / "run" / ".hydra" / "config.pickle")]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(launch.__file__).parent)
    assert read.stdout.split() == ["7", "keep_last", "keep_best"], read.stderr


def test_what_a_job_has_returned_is_pickled(launcher: StandIn, tmp_path: Path) -> None:
    start("seed=7", "hydra.run.dir=run", PICKLES)
    returned = pickle.loads((tmp_path / "run" / ".hydra" / "job_return.pickle").read_bytes())
    assert returned.cfg == config.compose(["seed=7"])


def test_a_rerun_has_the_same_configuration_in_a_folder_beside_the_first(launcher: StandIn, tmp_path: Path) -> None:
    start("sync=nccl", "hydra.run.dir=run", PICKLES)
    for _ in range(2):
        assert start("--experimental-rerun", "run/.hydra/config.pickle") == 0
    first, *again = launcher.calls
    assert [call.run_dir for call in again] == [tmp_path / "run-rerun", tmp_path / "run-rerun-2"]
    assert all((call.cfg, call.resume) == (first.cfg, None) for call in again)


def test_a_configuration_that_an_earlier_release_has_pickled_runs_again(launcher: StandIn, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        of_trainer, of_policies = "trinity_sync.config.training_schema", "trinity_sync.config.retention"
        for kind, module in ((schema.TrainerConfig, of_trainer), (config.SCHEMA["keep_last"], of_policies)):
            patch.setattr(kind, "__module__", module)
            patch.setitem(sys.modules, module, schema)
        start("hydra.run.dir=run", PICKLES)
    assert of_trainer.encode() in (tmp_path / "run" / ".hydra" / "config.pickle").read_bytes()
    assert start("--experimental-rerun", "run/.hydra/config.pickle") == 0


def test_a_rerun_has_the_files_that_a_resume_goes_by(launcher: StandIn, tmp_path: Path) -> None:
    start("sync=nccl", "hydra.run.dir=run", PICKLES)
    start("--experimental-rerun", "run/.hydra/config.pickle")
    first, again = tmp_path / "run" / ".hydra", tmp_path / "run-rerun" / ".hydra"
    for name in ("config.yaml", "overrides.yaml"):
        assert (again / name).read_text() == (first / name).read_text()
    assert OmegaConf.load(again / "hydra.yaml").hydra.run.dir == str(again.parent)
    assert (again / "recorded.json").exists()


def test_a_rerun_logs_to_its_own_folder(launcher: StandIn, tmp_path: Path) -> None:
    start("hydra.run.dir=run", PICKLES)
    launcher.behave = lambda cfg: 1 // 0
    assert start("--experimental-rerun", "run/.hydra/config.pickle") == 1
    assert "ZeroDivisionError" in (tmp_path / "run-rerun" / "logs" / "driver.log").read_text()


def test_where_the_first_run_never_began_a_rerun_takes_its_folder(launcher: StandIn, tmp_path: Path) -> None:
    start("hydra.run.dir=run", PICKLES)
    (tmp_path / "run" / "run.json").unlink()
    start("--experimental-rerun", "run/.hydra/config.pickle")
    assert launcher.calls[1].run_dir == tmp_path / "run"


def test_a_job_of_a_sweep_is_run_again_beside_the_sweep(launcher: StandIn, tmp_path: Path) -> None:
    start("-m", "seed=1,2", "hydra.sweep.dir=sweep", PICKLES)
    assert start("--experimental-rerun", "sweep/1/.hydra/config.pickle") == 0
    assert (launcher.calls[2].run_dir, launcher.calls[2].cfg.seed) == (tmp_path / "sweep-1", 2)


def test_a_rerun_that_is_refused_leaves_no_folder(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    start("task=jsonl", "task.path=rows.jsonl", "model.path=none", "hydra.run.dir=run", PICKLES)
    (tmp_path / "rows.jsonl").unlink()
    assert start("--experimental-rerun", "run/.hydra/config.pickle") == 2
    assert "rows.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "run-rerun").exists()


def test_a_dry_run_of_a_rerun_starts_nothing(launcher: StandIn, tmp_path: Path) -> None:
    start("hydra.run.dir=run", PICKLES)
    assert start("--dry-run", "--experimental-rerun", "run/.hydra/config.pickle") == 0
    assert len(launcher.calls) == 1
    assert not (tmp_path / "run-rerun").exists()
