"""`trinity-sync resume SWEEP_DIR`: what has completed stays, all else goes on or begins. Runs are stand-ins."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.stand_in import StandIn, standing_in
from trinity_sync.cli import main as cli
from trinity_sync.config import RunConfig
from trinity_sync.errors import RunError

SWEEP = Path("multirun/x/y")


class Jobs(StandIn):
    """Runs that end as `ends` says for their seed: ``completed`` or ``failed``, or ``interrupt`` the program."""

    ends: dict[int, str] = {}  # noqa: RUF012 - replaced, never changed

    def run(self, checked: RunConfig, run_dir: Path, **given: Any) -> int:
        super().run(checked, run_dir, **given)
        end = self.ends.get(checked.settings.seed, "completed")
        status = "failed" if end == "failed" else "completed" if end == "completed" else "running"
        (run_dir / "run.json").write_text(json.dumps({"attempt": 0, "status": status}))
        if end == "interrupt":
            raise KeyboardInterrupt
        if end == "failed":
            raise RunError("rank 0 died")
        return 0

    @property
    def done(self) -> list[tuple[int, bool]]:
        """Seed of each run, and whether it went on."""
        return [(call.cfg.seed, call.resume is not None) for call in self.calls]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    with standing_in(Jobs(), tmp_path, monkeypatch) as jobs:
        yield jobs


def sweep(*overrides: str) -> int:
    return cli.main(["run", "-m", f"hydra.sweep.dir={SWEEP}", "seed=1,2,3,4", *overrides])


def resume(*arguments: str) -> int:
    return cli.main(["resume", str(SWEEP), *arguments])


def test_an_interrupted_sweep_goes_on_where_it_stopped(launcher: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.ends = {2: "failed", 3: "interrupt"}
    assert sweep("sync=nccl") == 130
    assert launcher.done == [(1, False), (2, False), (3, False)]
    launcher.ends, launcher.calls = {}, []
    capsys.readouterr()
    assert resume() == 0
    assert launcher.done == [(2, True), (3, True), (4, False)]
    assert {call.cfg.sync.mode for call in launcher.calls} == {"nccl"}
    assert [call.run_dir for call in launcher.calls] == [(SWEEP / number).absolute() for number in "123"]
    found = capsys.readouterr()
    assert "4 jobs: 1 completed, 2 begun, 1 not begun" in found.err
    assert (SWEEP / "report.html").exists()
    launcher.calls = []
    assert (resume(), launcher.done) == (0, [])


def test_a_job_that_fails_again_is_told_and_the_others_go_on(
    launcher: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.ends = {2: "failed", 3: "interrupt"}
    sweep()
    launcher.ends = {2: "failed"}
    assert resume() == 1
    found = capsys.readouterr().err
    assert "rank 0 died" in found
    assert "1 of 4 jobs did not end well: 1 in " in found
    assert launcher.done[-1] == (4, False)


@pytest.mark.all
def test_an_interrupt_ends_it_again(launcher: Jobs) -> None:
    launcher.ends = {2: "interrupt"}
    sweep()
    launcher.ends = {3: "interrupt"}
    assert resume() == 130
    assert launcher.done[-1] == (3, False)


def test_a_job_in_use_is_left_alone(launcher: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.ends = {2: "interrupt"}
    sweep()
    launcher.ends, launcher.calls = {}, []
    with (SWEEP / "1" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert resume() == 1
    assert launcher.done == [(3, False), (4, False)]
    assert "job 1: " in (told := capsys.readouterr().err)
    assert "is in use by another process" in told


def test_settings_of_somebody_else_run_nothing_of_theirs(launcher: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.ends = {2: "interrupt"}
    sweep()
    launcher.ends, launcher.calls = {}, []
    text = (SWEEP / "multirun.yaml").read_text()
    (SWEEP / "multirun.yaml").write_text(
        text.replace("- seed=1,2,3,4", "- seed=1,2,3,4\n    - task._target_=os.system")
    )
    assert resume() == 1
    assert launcher.done == [(2, True)]
    assert "job 2: task._target_ is os.system" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["trainer.steps=9"], ["--from-scratch"]])
@pytest.mark.few(1)
def test_a_sweep_goes_on_as_it_was(launcher: Jobs, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    launcher.ends = {1: "interrupt"}
    sweep()
    assert resume(*more) == 2
    assert "is a sweep, which resumes without changes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("subdir: ${hydra.job.num}", "subdir: ${hydra.job.override_dirname}", "hydra.sweep.subdir"),
        ("basic_sweeper.BasicSweeper", "other.Sweeper", "chooses values while it runs"),
        ("hydra:", "hydra: [", "multirun.yaml cannot be read"),
        ("- seed=1,2,3,4", "- seed=[1", "multirun.yaml: "),
    ],
)
@pytest.mark.few(1)
def test_a_sweep_whose_jobs_are_not_known_is_refused(
    launcher: Jobs, old: str, new: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.ends = {1: "interrupt"}
    sweep()
    text = (SWEEP / "multirun.yaml").read_text()
    assert old in text
    (SWEEP / "multirun.yaml").write_text(text.replace(old, new))
    assert resume() == 2
    assert told in capsys.readouterr().err


@pytest.mark.all
def test_relative_paths_count_from_where_the_sweep_was_started(
    launcher: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.ends = {3: "interrupt"}
    sweep("checkpoint.mirror=copies/${seed}")
    launcher.ends, launcher.calls = {}, []
    there = (tmp_path / "elsewhere").absolute()
    there.mkdir()
    monkeypatch.chdir(there)
    assert cli.main(["resume", str(tmp_path / SWEEP)]) == 1
    assert launcher.done == [(3, True)]
    assert f"paths relative to {tmp_path}" in capsys.readouterr().err


def test_option_files_are_found_where_the_sweep_had_looked(launcher: Jobs, tmp_path: Path) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    (tmp_path / "more" / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  steps: 17\n")
    launcher.ends = {1: "interrupt"}
    assert sweep(f"hydra.searchpath=[file://{tmp_path}/more]", "experiment=mine") == 130
    launcher.ends, launcher.calls = {}, []
    assert resume() == 0
    assert launcher.done == [(1, True), (2, False), (3, False), (4, False)]
    assert {call.cfg.trainer.steps for call in launcher.calls} == {17}
