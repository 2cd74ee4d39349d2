"""What commands say to someone who named no run, no step, or wants to see before anything happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cli.stand_in import StandIn, standing_in
from tests.cli.test_list import leave
from trinity_sync import __version__
from trinity_sync.cli import main as cli
from trinity_sync.tracking.run_record import RunFolder

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(StandIn(), tmp_path, monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", [[], ["trainer.steps=200"]])
def test_a_resume_of_no_run_names_the_newest_that_was_cut_off(here: Path, capsys: Capture, given: list[str]) -> None:
    leave("outputs/a/old", at=1000.0, status="failed")
    leave("outputs/a/cut off", at=2000.0, steps=7, status="interrupted")
    leave("outputs/a/new", at=3000.0)
    assert cli.main(["resume", *given]) == 2
    said = capsys.readouterr().err
    assert "(interrupted after 7 steps)" in said
    assert "trinity-sync resume 'outputs/a/cut off'" in said


def test_where_none_was_cut_off_a_resume_says_so(here: Path, capsys: Capture) -> None:
    assert cli.main(["resume"]) == 2
    assert "neither outputs nor multirun" in capsys.readouterr().err
    leave("outputs/a/new")
    assert cli.main(["resume"]) == 2
    assert "no run below outputs and multirun was cut off" in capsys.readouterr().err


def test_what_a_resume_would_go_on_with_is_shown_and_nothing_begins(launcher: StandIn, capfd: Capture) -> None:
    assert cli.main(["run", "sync=nccl", "trainer.steps=10", "hydra.run.dir=one"]) == 0
    before = sorted(path for path in Path("one").rglob("*"))
    capfd.readouterr()
    assert cli.main(["resume", "one", "trainer.lr=0.5", "--cfg", "job", "--resolve"]) == 0
    shown = OmegaConf.create(capfd.readouterr().out)
    assert (shown.sync.mode, shown.trainer.steps, shown.trainer.lr) == ("nccl", 10, 0.5)
    assert len(launcher.calls) == 1
    assert sorted(path for path in Path("one").rglob("*")) == before


def test_a_sweep_has_no_settings_of_its_own_to_show(here: Path, capsys: Capture) -> None:
    (here / "multirun.yaml").touch()
    assert cli.main(["resume", str(here), "--cfg", "job"]) == 2
    assert f"name that: {here / '0'}" in capsys.readouterr().err


def test_the_version_is_that_of_this_program(capsys: Capture) -> None:
    assert cli.main(["run", "--version"]) == 0
    assert capsys.readouterr().out == f"trinity-sync {__version__}\n"


def test_a_report_of_a_run_that_goes_on_names_what_shows_it(here: Path, capsys: Capture) -> None:
    run = leave("outputs/a/b", status="running", ended=None)
    assert cli.main(["report", str(run)]) == 0
    assert "trinity-sync watch" not in capsys.readouterr().out  # its process is gone
    with RunFolder.open(run, resume=True):
        assert cli.main(["report", str(run)]) == 0
    assert "trinity-sync watch outputs/a/b" in capsys.readouterr().out
