"""`trinity-sync trace` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.test_trace import check
from tests.tracking import synthetic
from trinity_sync.cli import main as cli


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return synthetic.whole_run(tmp_path / "run", total=12)


def test_a_run_leaves_its_trace_in_its_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'trace.json'}\n"
    assert len(check(json.loads((run / "trace.json").read_bytes())["traceEvents"])) > 100


def test_or_where_it_is_told_to(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(run), "-o", str(tmp_path / "a.json")]) == 0
    assert cli.main(["trace", str(run), "-o", "-"]) == 0
    path, _, text = capsys.readouterr().out.partition("\n")
    assert path == str(tmp_path / "a.json")
    assert text == (tmp_path / "a.json").read_text()
    assert not (run / "trace.json").exists()


def test_a_run_that_goes_on_and_one_that_was_cut_off_have_a_trace(tmp_path: Path) -> None:
    clock = synthetic.Clock()
    with synthetic.recording(tmp_path / "run", clock) as recorder:
        synthetic.steps(recorder, clock, 1, 3)
        assert cli.main(["trace", str(tmp_path / "run")]) == 0
    events = tmp_path / "run" / "events.jsonl"
    events.write_text(events.read_text()[:-20])
    assert cli.main(["trace", str(tmp_path / "run")]) == 0
    check(json.loads((tmp_path / "run" / "trace.json").read_bytes())["traceEvents"])


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_text("nonsense\n{}\n")
    assert cli.main(["trace", str(run)]) == 0
    assert "note: metrics.jsonl could not be read" in capsys.readouterr().err


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    (empty / ".hydra").mkdir(parents=True)
    for folder, words in {
        tmp_path / "none": "is not a folder",
        run / ".hydra": "neither a run (run.json) nor a sweep",
        tmp_path: f"is a sweep; name one of its jobs, such as {empty}",
        empty: "has recorded no events to trace. There is no run.json: the run did not start.",
    }.items():
        assert cli.main(["trace", str(folder)]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert cli.main(["trace", str(run), "-o", str(tmp_path / "none" / "a.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json.*"))
