from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_activity import AT, event, step
from tests.tracking import synthetic
from tests.tracking.synthetic import START, Clock
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.report import run_data, timeline, write_trace
from trinity_sync.report.run_data import Run
from trinity_sync.tracking.events import GenerateEvent, event_line, parse_event


def read(run: Run) -> list[dict[str, Any]]:
    return check(json.loads("".join(timeline.trace_document(run)))["traceEvents"])


def check(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check what the format asks for: known phases with their fields, and threads on which events nest."""
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    processes = {one["pid"] for one in events if one["name"] == "process_name"}
    threads = defaultdict(list)
    for one in events:
        assert one["ph"] in ("M", "X", "C", "i")
        assert one["name"]
        assert one["pid"] in processes
        if one["ph"] == "M":
            continue
        assert isinstance(one["ts"], int)
        assert one["ts"] >= 0
        if one["ph"] == "X":
            assert isinstance(one["dur"], int)
            assert one["dur"] >= 0
            assert (one["pid"], one["tid"]) in named
            threads[one["pid"], one["tid"]].append(one)
        elif one["ph"] == "C":
            assert all(isinstance(value, int) for value in one["args"].values())
        else:
            assert one["s"] in ("g", "p", "t")
    for thread in threads.values():
        check_nesting(thread)
    return list(events)


def check_nesting(thread: Sequence[Mapping[str, Any]]) -> None:
    open_until: list[int] = []
    for one in sorted(thread, key=lambda one: one["ts"]):  # stable: whoever contains others stands before them
        begin, end = one["ts"], one["ts"] + one["dur"]
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)


def names(events: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    return [one["args"]["name"] for one in events if one["name"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_data.load_run(synthetic.whole_run(tmp_path_factory.mktemp("outputs") / "run"))


def test_those_who_worked_are_named_processes_and_threads(finished: Run) -> None:
    events = read(finished)
    assert names(events, "process_name") == ["run", "trainer", "node agents", "checkpoint writers", "explorers"]
    assert names(events, "thread_name") == ["attempts", "ranks 0 to 1", "agent", "writer", "explorer-0", "explorer-1"]


def test_everything_that_was_recorded_is_there(finished: Run) -> None:
    events = read(finished)
    count = {
        name: sum(one["name"] == name and one["ph"] == "X" for one in events) for name in ("step", "train", "load")
    }
    assert count == {"step": 60, "train": 60, "load": 120}
    assert sum(one["ph"] == "C" for one in events) == 120
    assert [one["name"] for one in events if one["ph"] == "i"].count("commit") == 6


def test_times_are_microseconds_since_the_run_began() -> None:
    run = Run(
        path=Path("x"),
        record={"attempt": 0, "started": AT, "ended": AT + 20},
        metrics=[step(1, 10, train=2, step=3)],
        events=[
            event("load", 9, version=1, explorer="explorer-0", began=AT + 4, total_s=2.0, paused_s=0.5, bytes=7),
            event("commit", 19, step=1, began=AT + 10, written_s=1.0, total_s=1.5),
            event("fault", 15, where="explorer-0", error="died"),
        ],
    )
    events = read(run)
    told = {one["name"]: (one["ts"], one["dur"]) for one in events if one["ph"] == "X"}
    assert told == {
        **{"attempt 0": (0, 20_000_000), "step": (7_000_000, 3_000_000), "train": (7_000_000, 2_000_000)},
        **{"load": (4_000_000, 2_000_000), "pause": (5_500_000, 500_000)},
        **{"save": (10_000_000, 1_500_000), "write": (10_000_000, 1_000_000), "commit": (11_000_000, 500_000)},
    }
    (held,) = (one for one in events if one["ph"] == "C")
    assert (held["name"], held["ts"], held["args"]) == ("version held by explorer-0", 6_000_000, {"version": 1})
    instants = {one["name"]: (one["ts"], one["s"]) for one in events if one["ph"] == "i"}
    assert instants == {"commit": (11_500_000, "p"), "fault": (15_000_000, "g")}
    (load,) = (one for one in events if one["name"] == "load")
    assert load["args"] == {"for": "version 1", "bytes": 7}


def test_saves_that_overlap_have_a_thread_each() -> None:
    saves = [event("commit", 9, step=number, began=AT + number, total_s=1.5) for number in (1, 2, 3)]
    events = read(Run(path=Path("x"), events=saves))
    assert names(events, "thread_name") == ["attempts", "writer", "writer (2)"]


def test_a_resumed_run_has_its_attempts_one_after_the_other(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock) as recorder:
        synthetic.steps(recorder, clock, 1, 25)
        recorder.fault("explorer-1", '"<b>')
        recorder.finish("interrupted")
    clock.pass_(100)
    with synthetic.recording(tmp_path, clock, resumed_from=20) as recorder:
        synthetic.steps(recorder, clock, 21, 22)
        events = read(run_data.load_run(tmp_path))  # it is going on
    attempts = [one for one in events if one["name"].startswith("attempt ")]
    assert [(one["ts"], one["dur"]) for one in attempts] == [(0, 62_500_000), (162_500_000, 5_000_000)]
    assert sum(one["name"] == "step" for one in events) == 22


@pytest.mark.parametrize(
    "lines",
    [
        [{"event": "load"}, {"event": "load", "version": 1, "explorer": None, "total_s": 1, "time": START}],
        [{"event": "commit", "step": 1, "total_s": -5, "written_s": 99, "began": "x", "time": START}],
        [{"event": "fault", "time": None}, {"event": "fault"}, {"no": 1}],
        [{"event": "fault", "time": START, "where": "\ud800", "error": float("nan")}],
        [{"event": "publish", "version": 1, "sealed_s": 9, "digest_s": 99, "total_s": 1, "time": START}],
    ],
)
def test_damaged_lines_make_no_damaged_trace(lines: list[dict[str, Any]]) -> None:
    read(
        Run(
            path=Path("x"),
            metrics=[{"step": 1}, {"step": 2, "time": START, "timing/a": -1}],
            events=[parse_event(line) for line in lines],
        )
    )


def test_an_older_run_has_a_trace(finished: Run) -> None:
    gone = ("began", "written_s", "sealed_s", "digest_s")
    lines = [event_line(event) for event in finished.events if not isinstance(event, GenerateEvent)]
    events = [parse_event({key: value for key, value in line.items() if key not in gone}) for line in lines]
    older = Run(path=Path("x"), metrics=finished.metrics, events=events)
    assert "generate" not in {one["name"] for one in read(older)}


@pytest.mark.all
def test_a_hundred_thousand_events_take_seconds() -> None:
    metrics = [step(number, number, generate=0.3, train=0.5, step=1) for number in range(1, 20_001)]
    events = [
        event("generate", number, step=number, explorer=f"explorer-{n}", version=0, began=AT + number - 1, total_s=0.3)
        for number in range(1, 20_001)
        for n in range(5)
    ]
    began = time.process_time()
    length = sum(map(len, timeline.trace_document(Run(path=Path("x"), metrics=metrics, events=events))))
    assert time.process_time() - began < 15
    assert length > 10_000_000


def test_the_file_lies_in_the_run_or_where_it_is_asked_for(finished: Run, tmp_path: Path) -> None:
    assert write_trace(finished) == finished.path / "trace.json"
    other = write_trace(finished, tmp_path / "other.json")
    assert other.read_bytes() == (finished.path / "trace.json").read_bytes()
    check(json.loads(other.read_bytes())["traceEvents"])


def test_where_no_file_can_be_nothing_is_left(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        write_trace(finished, tmp_path)
    with pytest.raises(ConfigError, match="none is not a folder"):
        write_trace(finished, tmp_path / "none" / "trace.json")

    def broken(run: Run) -> Any:
        yield "{"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timeline, "trace_document", broken)
    with pytest.raises(RunError, match="No space left on device"):
        write_trace(finished, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
