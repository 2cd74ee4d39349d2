from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracking import synthetic
from tests.tracking.synthetic import Clock
from trinity_sync.cli import watchers
from trinity_sync.cli.watchers import FollowedRun, ReplacedError, Tail, standing
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import Event, SaveEvent, event_name
from trinity_sync.tracking.run_record import RunFolder


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    tail, parsed = Tail(path), []
    monkeypatch.setattr(watchers.json, "loads", lambda line, loads=json.loads: parsed.append(line) or loads(line))
    assert list(tail.read()) == []
    add(path, '{"a": 1}\n{"a": 2}\n')
    assert list(tail.read()) == [{"a": 1}, {"a": 2}]
    add(path, '{"a": 3}\n')
    assert list(tail.read()) == [{"a": 3}]
    assert list(tail.read()) == []
    assert len(parsed) == 3


def test_a_line_that_is_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    whole = json.dumps({"a": "ä" * 10}, ensure_ascii=False).encode() + b"\n"
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        assert list(tail.read()) == []
    path.write_bytes(whole)
    assert list(tail.read()) == [{"a": "ä" * 10}]


def test_lines_that_cross_the_pieces_in_which_a_file_is_read_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "_CHUNK", 7)
    path = tmp_path / "log.jsonl"
    lines = [{"number": number} for number in range(50)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(Tail(path).read()) == lines


@pytest.mark.parametrize("text", ["oops", "[1]", "\x00\x00", '{"a": '])
def test_a_damaged_line_is_passed_over_and_told(tmp_path: Path, text: str) -> None:
    run = FollowedRun(tmp_path)
    add(tmp_path / "events.jsonl", f'{{"a": 1}}\n{text}\n\n{{"a": 2}}\n')
    assert list(run.lines()) == [{"a": 1}, {"a": 2}]
    assert [note for note in run.notes if "1 line of" in note and "events.jsonl" in note] == run.notes != []


@pytest.mark.parametrize("becomes", ["", '{"b": 1}\n' * 9, None])
def test_a_log_that_is_another_one_now_is_noticed(tmp_path: Path, becomes: str | None) -> None:
    path, other = tmp_path / "log.jsonl", tmp_path / "other"
    tail = Tail(path)
    add(path, '{"a": 1}\n{"a": 2}\n')
    assert len(list(tail.read())) == 2
    if becomes is None:
        path.unlink()
    else:
        other.write_text(becomes)
        other.replace(path)
    with pytest.raises(ReplacedError):
        list(tail.read())


def test_a_log_that_was_cut_in_place_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    add(path, '{"a": 1}\n{"a": 2}\n')
    list(tail.read())
    with path.open("r+") as file:
        file.truncate(9)
    with pytest.raises(ReplacedError):
        list(tail.read())


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(RunError, match=r"log\.jsonl cannot be read: Is a directory"):
        list(Tail(tmp_path / "log.jsonl").read())


def test_a_followed_run_gives_what_it_wrote_in_order(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock) as recorder:
        run = FollowedRun(tmp_path)
        recorder.phase("starting Ray")
        synthetic.steps(recorder, clock, 1, 2, explorers=1)
        assert [event_name(line) if isinstance(line, Event) else line["step"] for line in run.lines()] == [
            *("phase", "publish", "generate", "load", 1, "publish", "generate", "load", 2)
        ]
        recorder.saving(2)
        assert [type(line) for line in run.lines()] == [SaveEvent]


def test_a_resume_is_noticed_by_who_follows(tmp_path: Path) -> None:
    clock = Clock()
    run = FollowedRun(tmp_path)
    with synthetic.recording(tmp_path, clock) as recorder:
        synthetic.steps(recorder, clock, 1, 5)
        list(run.lines())
    with synthetic.recording(tmp_path, clock, resumed_from=3) as recorder:
        synthetic.steps(recorder, clock, 4, 9)  # more than there was before
        with pytest.raises(ReplacedError):
            list(run.lines())


def record(folder: Path, **content: Any) -> None:
    (folder / "run.json").write_text(json.dumps({"attempt": 0, **content}))


def test_how_a_run_stands_is_told_by_its_lock_and_its_record(tmp_path: Path) -> None:
    assert standing(tmp_path).stand == "not begun"
    with RunFolder.open(tmp_path, resume=False):
        assert standing(tmp_path).stand == "starting"
        record(tmp_path, status="running")
        assert (standing(tmp_path).stand, standing(tmp_path).over) == ("running", False)
        record(tmp_path, status="completed")
        assert standing(tmp_path).stand == "starting"  # or about to let go
    for status in ("completed", "failed", "interrupted"):
        record(tmp_path, status=status, error="why")
        found = standing(tmp_path)
        assert (found.stand, found.over, found.error) == (status, True, "why")
    record(tmp_path, status="running")
    assert (standing(tmp_path).stand, standing(tmp_path).over) == ("killed", True)


def test_a_run_that_begins_during_the_look_was_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, status="running")
    owners = iter([None, watchers.LockOwner(pid=1, host="here")])
    monkeypatch.setattr(watchers, "lock_owner", lambda folder: next(owners))
    assert standing(tmp_path).stand == "running"


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"run\.json is not the record of a run"):
        standing(tmp_path)


def test_lines_of_two_logs_come_in_the_order_of_their_times() -> None:
    first, second = [{"time": 1.0}, {"time": 4.0}], [{"time": 2.0}, {"time": 3.0}, {"time": 5.0}]
    assert [line["time"] for line in json_lines.by_time(first, second)] == [1.0, 2.0, 3.0, 4.0, 5.0]
