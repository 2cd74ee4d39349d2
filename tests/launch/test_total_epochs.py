"""`trainer.total_epochs`: passes over the rows in place of a number of steps."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import launch
from tests.launch.test_launcher import Idle
from trinity_sync.cli import main as cli
from trinity_sync.config import RunConfig, compose
from trinity_sync.errors import ConfigError
from trinity_sync.launch import app, launcher, row_scan, sweeps
from trinity_sync.tracking.run_record import read_record

FILTERED = row_scan.RowCounts(11, 4, 99, "filter")


@pytest.fixture(autouse=True)
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process that checks the rows answers, and stand-ins for Ray and the job."""
    answers: list[Any] = [row_scan._ScanAnswer(None, [], [])]
    monkeypatch.setattr(row_scan, "_ask", lambda request, path: answers[0])
    monkeypatch.setattr(launcher, "cluster", lambda *args, **given: nullcontext())
    monkeypatch.setattr(launcher, "Job", Idle)
    monkeypatch.chdir(tmp_path)
    write(11)
    return answers


def write(rows: int) -> None:
    row = {"prompt": "1=", "response": "1", "answer": "1"}
    Path("rows.jsonl").write_text("".join(json.dumps(row | {"number": number}) + "\n" for number in range(rows)))


GRPO = ("task=jsonl", "task.path=rows.jsonl", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")
SFT = ("algorithm=sft", "task=pairs", "task.path=rows.jsonl", "algorithm.batch_size=8")
QUIET = ("live=off", "hydra.run.dir=run")


def looked(*overrides: str) -> RunConfig:
    config = RunConfig(compose(["trainer.total_epochs=3", *overrides]))
    config.check_values()
    return launcher.look(config, Path("run")).config


def saved(run: Path, name: str = "config.yaml") -> Any:
    return OmegaConf.load(run / ".hydra" / name)


@pytest.mark.parametrize(("task", "steps", "per_step"), [(GRPO, 9, 4), (SFT, 5, 8)])
def test_passes_over_the_rows_are_a_number_of_steps(
    task: tuple[str, ...], steps: int, per_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert looked(*task).settings.trainer.steps == steps
    assert f"trainer.total_epochs=3: {steps} steps for 11 rows, {per_step} a step (" in capsys.readouterr().err


def test_rows_that_are_left_out_do_not_count(found: list[Any]) -> None:
    found[0] = row_scan._ScanAnswer(FILTERED, [0, 2, 4, 6], [])
    assert looked(*GRPO, "task.too_long=filter").settings.trainer.steps == 6


def test_the_digest_is_that_of_the_number_of_steps() -> None:
    assert looked(*GRPO).digest == RunConfig(compose(["trainer.steps=9", *GRPO])).digest


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["task=copy_digits"], "trainer.total_epochs is 3, but task=trinity_sync.tasks.copy_digits.CopyDigits has no"),
        ([*GRPO, "trainer.steps=9"], "trainer.total_epochs is 3, but trainer.steps is 9; leave one of them out"),
        ([*GRPO, "trainer.warmup_steps=10"], "trainer.warmup_steps is 10, more than trainer.steps (9)"),
        (["workload=bytes", "model.shapes=qwen3-8b"], "trainer.total_epochs is 3, but"),
    ],
)
def test_what_cannot_be_counted_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        looked(*overrides)
    assert told in str(refused.value)


def test_more_warm_up_than_the_default_steps_is_fine_where_the_passes_have_more() -> None:
    write(400)
    assert looked(*GRPO, "trainer.warmup_steps=200").settings.trainer.steps == 300


def test_a_dry_run_tells_the_number_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run_main(launch.main, [*GRPO, *QUIET, "trainer.total_epochs=2", "--dry-run"]) == 0
    assert "6 steps for 11 rows" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_run_saves_the_number_and_a_resume_keeps_it_where_the_file_grew(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run_main(launch.main, [*GRPO, *QUIET, "trainer.total_epochs=2"]) == 0
    run = Path("run")
    assert saved(run, "overrides.yaml")[-2:] == ["trainer.steps=6", "trainer.total_epochs=null"]
    assert (saved(run).trainer.steps, saved(run).trainer.total_epochs) == (6, None)
    write(400)
    assert cli.main(["resume", "run"]) == 0
    assert saved(run).trainer.steps == read_record(run / "run.json")["total_steps"] == 6
    capsys.readouterr()
    assert cli.main(["resume", "run", "trainer.total_epochs=4"]) == 2
    assert "trainer.total_epochs is 4, but trainer.steps is 6" in capsys.readouterr().err
    assert saved(run).trainer.total_epochs is None


@pytest.mark.all
def test_a_job_that_a_queue_starts_again_keeps_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["-m", *GRPO, "live=off", "hydra.sweep.dir=sweep", "trainer.total_epochs=1,2"]
    assert app.run_main(launch.main, arguments) == 0
    jobs = [Path("sweep/0"), Path("sweep/1")]
    assert [saved(job).trainer.steps for job in jobs] == [3, 6]
    write(400)
    monkeypatch.setattr(sweeps, "started_again", lambda hydra, folder: True)
    monkeypatch.setattr(sweeps, "has_completed", lambda folder: False)
    monkeypatch.setattr(app, "sweep_problem", lambda hydra, jobs: None)
    monkeypatch.setattr(app, "_look_at", lambda jobs: None)
    assert app.run_main(launch.main, arguments) == 0
    assert [saved(job).trainer.steps for job in jobs] == [3, 6]
