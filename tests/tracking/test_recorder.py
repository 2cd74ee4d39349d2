from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.tracking import synthetic
from tests.tracking.synthetic import START, Clock
from tests.tracking.test_trackers import Fake
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.logs import LogFile
from trinity_sync.host.origin import _KEPT, Origin
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import Event, HealEvent
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder

EXAMPLES: dict[str, dict[str, Any]] = {
    "publish": synthetic.publish(1),
    "load": synthetic.load(1),
    "phase": {"what": "starting Ray"},
    "rows": {"rows": 5000, "too_long": 12, "longest": 2048, "policy": "filter"},
    "save": {"step": 1},
    "commit": synthetic.commit(1),
    "generate": {"step": 1, "explorer": "explorer-0", "version": 0, "began": START, "total_s": 0.5},
    "skip": {"version": 1, "reason": "every slot was being read"},
    "skipped_update": {"step": 1, "count": 2},
    "failed_rewards": {"step": 1, "count": 2, "error": "the reward function f failed"},
    "agreement": {"step": 1, "explorer": "explorer-0", "tokens": 9, "mean": 0.1, "largest": 0.2, "bound": 0.3},
    "filled_batch": {"step": 1, "count": 2, "drawn": 40},
    "all_rejected": {"step": 1},
    "prune": {"step": 1, "reason": "keep_last", "freed_bytes": 5},
    "mirror": {"step": 1, "url": "s3://bucket/run", "state": "copied", "bytes": 5, "total_s": 0.5},
    "fault": {"where": "explorer-0", "error": "died"},
    "heal": {
        "died": "trainer rank 1 died",
        "resumed_from": 4,
        "lost": 3,
        "total_s": 9.5,
        "kept": "explorer-0, explorer-1",
        "made": 12,
    },
}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def printed(recorder: Recorder) -> str:
    file = recorder.view.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_whole_run_leaves_all_its_files(tmp_path: Path) -> None:
    seen: list[Path] = []
    synthetic.whole_run(tmp_path, total=20, report=lambda path: seen.append(path))
    summary = read_json(tmp_path / "summary.json")
    assert (summary["status"], summary["steps"], summary["wall_s"]) == ("completed", 20, 50.0)
    assert set(summary["digests"]) == {str(step) for step in range(21)}
    assert summary["peak_memory"]["trainer"] == 9_400_000_000
    assert summary["peak_memory"]["driver"] > 1_000_000
    assert read_json(tmp_path / "run.json")["status"] == "completed"
    assert seen == [tmp_path]


def test_a_line_of_metrics_carries_attempt_step_and_time(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock) as recorder:
        clock.pass_(2)
        recorder.metrics(1, {"reward/mean": 0.5}, loss=1.5)
    assert json_lines.read(tmp_path / "metrics.jsonl") == [
        {"attempt": 0, "step": 1, "time": START + 2, "reward/mean": 0.5, "loss": 1.5}
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_event_carries_its_name_time_and_attempt(tmp_path: Path, name: str) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.event(synthetic.event(name, **EXAMPLES[name]))
    assert json_lines.read(tmp_path / "events.jsonl") == [
        {"event": name, "time": START, "attempt": 0, **EXAMPLES[name]}
    ]


def test_a_fault_of_an_exception_without_text_names_its_kind(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.fault("explorer-0", TimeoutError())
    assert json_lines.read(tmp_path / "events.jsonl")[0]["error"] == "TimeoutError"


def loaded(version: int, explorer: str = "explorer-0") -> Event:
    return synthetic.event("load", **synthetic.load(version, explorer))


def test_events_of_many_threads_are_all_recorded(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        threads = [
            threading.Thread(
                target=lambda n=n: [
                    recorder.event(synthetic.event("load", **synthetic.load(v, f"e-{n}"))) for v in range(20)
                ]
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(json_lines.read(tmp_path / "events.jsonl")) == 80


def test_a_late_event_is_dropped_with_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.finish("completed")
        with caplog.at_level(logging.WARNING):
            recorder.event(synthetic.event("load", **synthetic.load(1)))
    assert "came after the end" in caplog.text


def resume(tmp_path: Path, clock: Clock, step: int, **other: Any) -> None:
    with synthetic.recording(tmp_path, clock, resumed_from=step, **other) as recorder:
        synthetic.steps(recorder, clock, step + 1, step + 5)


def test_a_resume_goes_on_in_the_same_files_without_the_abandoned_steps(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock) as recorder:
        synthetic.steps(recorder, clock, 1, 17)
        for step in (5, 10, 15):
            recorder.samples(step, [{"text": "1=", "spans": [[0, 2, step - 1]]}, {"text": "2="}])
        recorder.fault("trainer", "died")
        recorder.finish("failed", "died")
    resume(tmp_path, clock, 10)
    lines = json_lines.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert [line["attempt"] for line in lines] == [0] * 10 + [1] * 5
    events = json_lines.read(tmp_path / "events.jsonl")
    published = [event["version"] for event in events if event["event"] == "publish"]
    assert published == list(range(1, 16))
    assert sum(event["event"] == "fault" for event in events) == 1
    summary = read_json(tmp_path / "summary.json")
    assert (summary["status"], summary["steps"]) == ("completed", 15)
    assert summary["wall_s"] == 17 * 2.5 + 5 * 2.5
    samples = json_lines.read(tmp_path / "samples.jsonl")
    assert [(line["attempt"], line["step"], line["text"]) for line in samples] == [
        (0, step, text) for step in (5, 10) for text in ("1=", "2=")
    ]
    assert samples[0]["spans"] == [[0, 2, 4]]


def test_samples_that_are_damaged_stop_no_resume(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock) as recorder:
        synthetic.steps(recorder, clock, 1, 3)
    (tmp_path / "samples.jsonl").write_text("nonsense\n{}\n")
    resume(tmp_path, clock, 2)
    assert (tmp_path / "samples.jsonl.damaged").read_text() == "nonsense\n{}\n"
    assert json_lines.read(tmp_path / "samples.jsonl") == []


def test_where_there_are_no_samples_trackers_are_not_asked(tmp_path: Path) -> None:
    class Takes(Fake):
        def samples(self, step: int, rows: Any) -> None:
            raise AssertionError("there are none")

    with synthetic.recording(tmp_path, Clock(), trackers=[Takes()]) as recorder:
        recorder.samples(1, [])
    assert [event for event in json_lines.read(tmp_path / "events.jsonl") if event["event"] == "fault"] == []


def test_a_disk_that_refuses_samples_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with synthetic.recording(tmp_path, Clock()) as recorder:
        recorder._samples.close()
        with caplog.at_level(logging.WARNING):
            recorder.samples(1, [{"text": "1="}])
    assert "samples of step 1 are not recorded" in caplog.text


def test_a_resume_shows_what_was_learned_and_saved_before(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock, total=40) as recorder:
        synthetic.steps(recorder, clock, 1, 17)
        recorder.fault("trainer", "died")
    with synthetic.recording(tmp_path, clock, total=40, resumed_from=10) as recorder:
        file = io.StringIO()
        clock.pass_(5)
        recorder.phase("starting Ray")
        Console(file=file, width=80).print(recorder.view.render())
        assert "starting Ray" in file.getvalue()
        assert "fault" not in file.getvalue()
        recorder.metrics(11, {"reward/mean": 0.5})
        Console(file=file, width=80).print(recorder.view.render())
    for words in ("11/40", "mean of 10:", "step 10, 22 s ago", "after 5.0 s"):
        assert words in file.getvalue()


@pytest.mark.parametrize("tell", [lambda one: one.phase("starting Ray"), lambda one: one.saving(1)])
def test_what_is_only_to_be_watched_does_not_end_a_run_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[[Recorder], None]
) -> None:
    def full(writer: Any, record: Any) -> None:
        raise RunError("No space left on device")

    with synthetic.recording(tmp_path) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(json_lines.JsonlWriter, "append", full)
            tell(recorder)
        recorder.metrics(1, {"loss": 0.5})
    assert read_json(tmp_path / "run.json")["status"] == "completed"


def test_a_resume_needs_the_step_it_starts_from(tmp_path: Path) -> None:
    synthetic.whole_run(tmp_path, total=2)
    with RunFolder.open(tmp_path, resume=True) as folder, pytest.raises(ValueError, match="step it starts from"):
        synthetic.start(folder, Clock())


def test_a_tracker_that_cannot_start_leaves_an_earlier_run_as_it_was(tmp_path: Path) -> None:
    synthetic.whole_run(tmp_path, total=5)
    before = {name: (tmp_path / name).read_bytes() for name in ("run.json", "metrics.jsonl", "events.jsonl")}
    with pytest.raises(ConfigError):
        resume(tmp_path, Clock(), 3, trackers=[Fake("start")])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_tracker_that_cannot_start_leaves_a_fresh_folder_free_for_the_next_try(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder, pytest.raises(ConfigError):
        synthetic.start(folder, Clock(), trackers=[Fake("start")])
    synthetic.whole_run(tmp_path, total=1)


def test_trackers_get_every_step_and_are_closed(tmp_path: Path) -> None:
    fake = Fake()
    with synthetic.recording(tmp_path, trackers=[fake]) as recorder:
        recorder.metrics(1, {"loss": 0.5})
    assert fake.calls == [("start",), ("log", 1, {"loss": 0.5}), ("close",)]


@pytest.mark.parametrize("at", ["log", "close"])
def test_a_tracker_that_fails_is_a_fault_of_the_run(tmp_path: Path, at: str) -> None:
    with synthetic.recording(tmp_path, trackers=[Fake(at)]) as recorder:
        recorder.metrics(1, {"loss": 0.5})
    [fault] = [event for event in json_lines.read(tmp_path / "events.jsonl") if event["event"] == "fault"]
    assert (fault["where"], fault["attempt"]) == ("tracker Fake", 0)
    assert "no network" in str(fault["error"])
    assert read_json(tmp_path / "summary.json")["faults"] == 1
    assert read_json(tmp_path / "run.json")["status"] == "completed"


@pytest.mark.parametrize(
    ("raised", "status", "error"),
    [
        (RunError("explorer-0 did not answer"), "failed", "explorer-0 did not answer"),
        (KeyError("lr"), "failed", "KeyError: 'lr'"),
        (KeyboardInterrupt(), "interrupted", None),
    ],
)
def test_an_exception_ends_the_record_by_itself(
    tmp_path: Path, raised: BaseException, status: str, error: str | None
) -> None:
    with pytest.raises(type(raised)), synthetic.recording(tmp_path):
        raise raised
    record = read_json(tmp_path / "run.json")
    told = record["error"] and record["error"].partition(f" ({__file__}:")[0]  # where the user's code is: here
    assert (record["status"], told) == (status, error)
    assert read_json(tmp_path / "summary.json")["status"] == status


def test_a_second_finish_changes_nothing(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.finish("failed", "why")
        recorder.finish("completed")
    assert read_json(tmp_path / "run.json")["status"] == "failed"


def test_an_attempt_that_another_one_follows_says_so_in_place_of_the_summary(tmp_path: Path) -> None:
    asked: list[tuple[str, int, float]] = []
    clock = Clock()

    def goes_on(error: BaseException, attempt: int, since: float) -> str:
        asked.append((str(error), attempt, since))
        return "the run goes on"

    def fail(recorder: Recorder) -> None:
        recorder.failing()
        clock.pass_(20)
        raise RunError("trainer rank 1 died")

    seen: list[Path] = []
    with (
        pytest.raises(RunError),
        synthetic.recording(tmp_path, clock, goes_on=goes_on, report=seen.append) as recorder,
        recorder.ending({}),
    ):
        fail(recorder)
    assert asked == [("trainer rank 1 died", 0, clock.now - 20)]
    assert printed(recorder) == "failed: trainer rank 1 died; the run goes on\n"
    assert seen == []
    assert [read_json(tmp_path / "run.json")[key] for key in ("status", "error")] == ["failed", "trainer rank 1 died"]


def test_an_interrupt_is_followed_by_no_attempt(tmp_path: Path) -> None:
    def goes_on(error: BaseException, attempt: int, since: float) -> str:
        pytest.fail("it was asked")

    with pytest.raises(KeyboardInterrupt), synthetic.recording(tmp_path, goes_on=goes_on):
        raise KeyboardInterrupt


def test_the_first_step_after_a_death_tells_how_long_it_took(tmp_path: Path) -> None:
    clock = Clock()
    healed = HealEvent(time=clock(), died="trainer rank 1 died", resumed_from=4, lost=3, total_s=None)
    with synthetic.recording(tmp_path, clock):
        pass
    with synthetic.recording(tmp_path, clock, resumed_from=4, healed=healed) as recorder:
        recorder.metrics(4, {"val/reward/mean": 0.5})  # the validation before the first step
        for name in ("explorer-1", "explorer-0", "explorer-2"):
            recorder.lives_on(name, True)
        recorder.lives_on("explorer-2", False)
        recorder.made_meanwhile(12)
        clock.pass_(9.5)
        recorder.metrics(5)
        recorder.metrics(6)
    told = [line for line in json_lines.read(tmp_path / "events.jsonl") if line["event"] == "heal"]
    assert told == [{"event": "heal", "time": clock(), "attempt": 1, **EXAMPLES["heal"]}]


def test_a_report_that_fails_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def report(path: Path) -> None:
        raise ZeroDivisionError("chart")

    synthetic.whole_run(tmp_path, total=1, report=report)
    assert "report could not be written: chart" in caplog.text
    assert read_json(tmp_path / "run.json")["status"] == "completed"


def test_an_output_that_breaks_does_not_fail_the_run(tmp_path: Path) -> None:
    console = synthetic.quiet_console()
    console.file.close()
    with synthetic.recording(tmp_path, console=console, view="line") as recorder:
        recorder.metrics(1, {"loss": 0.5})
    assert read_json(tmp_path / "run.json")["status"] == "completed"


def test_a_summary_that_cannot_be_written_is_raised_after_the_status_is_on_disk(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        recorder = synthetic.start(folder, Clock())
        (tmp_path / "summary.json").mkdir()
        with pytest.raises(RunError, match=r"summary\.json cannot be written"):
            recorder.finish("completed")
    assert read_json(tmp_path / "run.json")["status"] == "completed"


def test_the_end_of_a_run_is_told(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path, total=3) as recorder:
        synthetic.steps(recorder, Clock(), 1, 2)
        recorder.finish("interrupted")
    assert printed(recorder).startswith("interrupted: 2 of 3 steps")


def test_the_log_tells_the_whole_run_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cause = ValueError("no (of theirs)")
    setattr(cause, _KEPT, Origin("/home/me/keep.py:3", "Traceback of theirs"))
    with synthetic.recording(tmp_path, total=3) as recorder:
        recorder.phase("starting Ray")
        recorder.event(synthetic.event("publish", **synthetic.publish(0)))
        recorder.event(synthetic.event("load", **synthetic.load(0)))
        recorder.metrics(1, {"loss": 0.5})
        recorder.saving(1)
        recorder.event(synthetic.event("commit", **synthetic.commit(1)))
        recorder.fault("retention", cause)
        recorder.finish("failed", "trainer rank 1 died")
    told = [record.getMessage() for record in caplog.records if record.name == "trinity_sync"]
    begins = ("run ", "starting Ray", "version 0 published", "explorer-0 loaded version 0", "step 1 done: loss 0.500")
    ends = (
        "checkpoint of step 1 started",
        "checkpoint of step 1 committed",
        "fault in retention: no",
        "run failed after",
    )
    assert [line.startswith(start) for line, start in zip(told, (*begins, *ends), strict=True)] == [True] * 9
    record = read_json(tmp_path / "run.json")
    for part in (record["config_digest"], record["host"], record["command"], "attempt 0"):
        assert str(part) in told[0]
    assert told[-2].endswith("\nTraceback of theirs")
    assert told[-1].endswith(": trainer rank 1 died")
    assert json_lines.read(tmp_path / "events.jsonl")[-1]["traceback"] == "Traceback of theirs"


def test_the_log_is_written_when_a_run_has_ended(tmp_path: Path) -> None:
    """So that a program that is ended on the spot then has lost nothing."""
    file = LogFile(tmp_path / "driver.log")
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    root.addHandler(file)
    try:
        with synthetic.recording(tmp_path / "run") as recorder:
            for step in range(1, 2000):
                recorder.saving(step)
            recorder.finish("completed")
            assert "run completed" in (tmp_path / "driver.log").read_text()
    finally:
        root.setLevel(before)
        root.removeHandler(file)
        file.close()


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (RunError("explorer-0 died"), ["the run failed: explorer-0 died"]),
        (KeyboardInterrupt(), []),
    ],
)
def test_what_ends_a_run_is_logged_before_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException, logged: list[str]
) -> None:
    with pytest.raises(type(error)), synthetic.recording(tmp_path):
        raise error
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == logged


def test_neither_torch_nor_ray_is_imported() -> None:
    code = (
        "import sys\nimport trinity_sync.tracking.recorder, trinity_sync.report\n"
        "from trinity_sync.tracking.trackers import build_trackers\n"
        "build_trackers({'tensorboard': {}, 'wandb': {'project': 'p', 'mode': 'offline'},"
        " 'mlflow': {'experiment': 'e'}})\n"
        "print(sorted({'torch', 'ray', 'transformers', 'wandb', 'tensorboard', 'mlflow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_numbers_of_numpy_and_torch_are_numbers_for_the_trackers_too(tmp_path: Path) -> None:
    fake = Fake()
    with synthetic.recording(tmp_path, trackers=[fake]) as recorder:
        recorder.metrics(1, {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.int64(3)})
    assert ("log", 1, {"a": 0.5, "b": 2.0, "c": 3.0}) in fake.calls
