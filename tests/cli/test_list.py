"""`trinity-sync list` as a user calls it, over folders that runs have left."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.cli import main as cli
from trinity_sync.report import run_data, run_page
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.run_record import RunFolder

CONFIG = """\
name: {name}
trainer: {{steps: 20}}
backend: {{strategy: fsdp2, ranks: 2}}
sync: {{mode: memory}}
task: {{path: "{task}"}}
model: {{path: /models/Qwen3-0.6B}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leave(
    place: str | Path,
    *,
    at: float = 1000.0,
    steps: int = 20,
    name: str = "try",
    task: str = "data/gsm8k.jsonl",
    **record: Any,
) -> Path:
    """Leave what a run leaves that began at `at` and took a second for each step."""
    folder = Path(place)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(CONFIG.format(name=name, task=task))
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(record.pop("overrides", [])))
    attempt = {"attempt": 0, "status": "completed", "started": at, "ended": at + steps, **record}
    (folder / "run.json").write_text(json.dumps({"attempts": [attempt], **attempt}))
    lines = [
        {"step": step, "attempt": 0, "time": at + step, "reward/mean": step / 10, "padding": "x" * 500}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder.absolute()


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The cells of the table, without its head."""
    capsys.readouterr()
    assert cli.main(["list", *arguments]) == 0
    return [[cell for cell in line.split("  ") if cell] for line in capsys.readouterr().out.splitlines()[1:]]


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert cli.main(["list", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def sweep(place: str, *statuses: str) -> Path:
    for number, status in enumerate(statuses):
        leave(f"{place}/{number}", status=status, overrides=["sync=memory", f"seed={number}"])
    (Path(place) / "multirun.yaml").write_text("")
    return Path(place).absolute()


def test_runs_are_listed_the_newest_last(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave("outputs/b/1", at=3000.0, steps=1800)
    leave("outputs/a/2", at=1000.0, steps=5, status="failed", task="math.parquet")
    leave("elsewhere/3")
    assert [[cell.strip() for cell in row] for row in listed(capsys)] == [
        ["outputs/a/2", "math", "Qwen3-0.6B", "failed", "5/20", "0.450", "5 s"],
        ["outputs/b/1", "gsm8k", "Qwen3-0.6B", "completed", "1800/20", "179.550", "30 min"],
    ]
    assert [row[0].strip() for row in listed(capsys, "elsewhere")] == ["elsewhere/3"]
    assert [row[0].strip() for row in listed(capsys, "outputs/b/1")] == ["outputs/b/1"]


def test_a_sweep_is_one_line_and_its_jobs_are_shown_on_demand(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep("multirun/try/x", "completed", "failed", "completed")
    (row,) = listed(capsys)
    assert [cell.strip() for cell in row[1:4]] == ["gsm8k", "Qwen3-0.6B", "3 jobs: 2 completed, 1 failed"]
    _, *jobs = listed(capsys, "--jobs")
    assert [[cell.strip() for cell in job[:4]] for job in jobs] == [
        ["multirun/try/x/0", "seed=0", "-", "completed"],
        ["multirun/try/x/1", "seed=1", "-", "failed"],
        ["multirun/try/x/2", "seed=2", "-", "completed"],
    ]


def test_a_program_is_told_all_of_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, swept = leave("outputs/a/1", at=9000.0), sweep("multirun/try/x", "completed")
    found = as_json(capsys)
    assert [line["path"] for line in found] == [str(swept), str(run)]
    assert found[0]["states"] == {"completed": 1}
    assert found[0]["jobs"][0]["overrides"] == ["sync=memory", "seed=0"]
    assert found[1] == {
        "path": str(run),
        "name": "try",
        "task": "gsm8k",
        "model": "Qwen3-0.6B",
        "status": "completed",
        "steps": 20,
        "total_steps": 20,
        "reward": pytest.approx(1.55),
        "loss": None,
        "backend": "fsdp2",
        "ranks": 2,
        "sync": "memory",
        "wall_s": 20.0,
        "started": 9000.0,
        "overrides": [],
        "problems": [],
    }


def test_whether_a_run_is_running_is_told_by_its_lock(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave("outputs/a/1", status="running", ended=None)
    assert as_json(capsys)[0]["status"] == "interrupted"
    with RunFolder.open(run, resume=True):
        assert as_json(capsys)[0]["status"] == "running"


def test_a_run_that_did_not_start_is_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (leave("outputs/a/1") / "run.json").unlink()
    assert as_json(capsys)[0]["status"] == "not started"


@pytest.mark.parametrize(
    ("spoil", "status", "told"),
    [
        (lambda run: (run / "run.json").write_text("["), "unreadable", "run.json cannot be read as the record"),
        (lambda run: (run / "run.json").write_text("[]"), "unreadable", "is not the record of a run"),
        *(
            (lambda run, text=text: (run / "run.json").write_text(text), "unreadable", "is not the record of a run: ")
            for text in (
                '{"attempt": 0, "started": "then"}',
                '{"attempt": 0, "error": {}}',
                '{"attempt": 0, "attempts": [{"ended": []}]}',
            )
        ),
        (lambda run: (run / ".hydra" / "config.yaml").write_text("a: [\n"), "completed", "config.yaml cannot be read"),
        (lambda run: (run / "metrics.jsonl").write_text("{}\nx\n{}\n"), "completed", "metrics.jsonl, line 2 is not"),
    ],
)
def test_what_cannot_be_read_is_named_and_hides_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], Any], status: str, told: str
) -> None:
    spoil(leave("outputs/a/1"))
    leave("outputs/a/2", at=2000.0)
    assert cli.main(["list"]) == 0
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 3
    assert f" {status} " in found.out
    assert told in found.err
    assert found.err.startswith(f"note: {here}/outputs/a/1")


def test_a_folder_that_cannot_be_looked_into_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave("outputs/a/1")
    Path("outputs/locked").mkdir()
    scandir = os.scandir

    def refusing(folder: Path) -> Any:
        if Path(folder).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(run_page.os, "scandir", refusing)
    found = {line["path"]: line["status"] for line in as_json(capsys)}
    assert found == {f"{here}/outputs/a/1": "completed", f"{here}/outputs/locked": "unreadable"}


def test_figures_are_those_of_the_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave("outputs/a/1", steps=200)
    killed = {"attempt": 0, "status": "interrupted", "started": 1000.0, "ended": None}
    again = {"attempt": 1, "status": "running", "started": 5000.0, "ended": None}
    (run / "run.json").write_text(json.dumps({"attempts": [killed, again], **again}))
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(201, 300):
            line = {"step": step, "attempt": 1, "time": 4800.0 + step, "reward/mean": 0.5, "padding": "x" * 500}
            file.write(json.dumps(line) + "\n")
        file.write('{"torn')
    (line,) = as_json(capsys)
    summary = run_data.load_run(run).summary
    assert (line["steps"], line["reward"], line["wall_s"]) == (299, 0.5, 200.0 + 99.0)
    assert (line["steps"], line["reward"], line["wall_s"]) == (
        summary["steps"],
        summary["reward_last"],
        summary["wall_s"],
    )


def test_a_run_without_rewards_shows_its_loss(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave("outputs/a/1", steps=8)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("reward/mean", "loss"))
    assert listed(capsys)[0][5].strip() == "loss 0.650"


def test_names_that_refer_to_others_are_resolved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave("outputs/a/1")
    (run / ".hydra" / "config.yaml").write_text("name: ${task}-x\ntask: sums\n")
    assert as_json(capsys)[0]["name"] == "sums-x"


@pytest.mark.parametrize("arguments", [[], ["nowhere"]])
def test_a_folder_that_is_not_there_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main(["list", *arguments]) == 2
    assert "name " in capsys.readouterr().err


def test_many_runs_are_listed_without_reading_all_of_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = leave("outputs/a/1", steps=1000)
    monkeypatch.setattr(json_lines, "read", None)
    (line,) = run_page.find([here])
    assert line.path == run
    assert (run / "metrics.jsonl").stat().st_size > 500_000
    began = time.process_time()
    for _ in range(100):
        run_page.find([here])
    assert time.process_time() - began < 2.0


def on_terminal(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **environ: str) -> str:
    """What a terminal of so many columns is shown."""
    for name, value in {"COLUMNS": str(width), "TERM": "xterm", **environ}.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert cli.main(["list"]) == 0
    return capsys.readouterr().out


def test_a_narrow_terminal_is_shown_all_of_a_run_in_several_lines(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave("outputs/copy-digits/2026-11-21_12-00-00", status="failed", at=9000.0)
    sweep("multirun/try/x", "completed")
    wide = on_terminal(200, capsys, monkeypatch, NO_COLOR="1").splitlines()
    assert [re.sub("\x1b.*?m", "", line).split()[:1] for line in wide] == [
        *(["folder"], ["multirun/try/x"], ["outputs/copy-digits/2026-11-21_12-00-00"])
    ]
    narrow = [re.sub("\x1b.*?m", "", line) for line in on_terminal(50, capsys, monkeypatch).splitlines()]
    assert narrow[-3:] == [
        "outputs/copy-digits/2026-11-21_12-00-00",
        "  failed  20/20 steps  reward 1.550  gsm8k",
        "  Qwen3-0.6B  20 s",
    ]
    assert "  1 job: 1 completed  gsm8k  Qwen3-0.6B  20 s" in narrow


def test_a_run_of_hours_fits_100_columns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave("outputs/gsm8k-Qwen3-0.6B/2026-11-21_12-00-00", ended=20000.0)
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-2:] == ["5.3", "h"]
    assert max(map(len, lines)) <= 100


def test_colours_tell_how_runs_stand_on_a_terminal_that_wants_them(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave("outputs/a/1", status="failed")
    assert "\x1b[31mfailed" in on_terminal(200, capsys, monkeypatch)
    assert "\x1b[31m" not in on_terminal(200, capsys, monkeypatch, NO_COLOR="1")
    capsys.readouterr()
    assert cli.main(["list"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_text_of_others_does_not_command_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave("outputs/a/1\x1b[2J", task=r"\e]0;mine\a\nb")
    ((folder, task, *_),) = listed(capsys)
    assert (folder.strip(), task.strip()) == ("outputs/a/1?[2J", "0-mine-b")
