"""What a tracker that fails, hangs or dies does to a run: nothing that lasts, and it is told."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import until
from tests.tracking.pretend import FileTracker, calls, process
from tests.tracking.test_trackers import Fake
from trinity_sync.errors import ConfigError
from trinity_sync.host import child_process, interrupts
from trinity_sync.host.child_process import start_child
from trinity_sync.tracking import tracker_feed
from trinity_sync.tracking.tracker_feed import Trackers
from trinity_sync.tracking.trackers import TrackedRun

SHORT_S = 0.3
LIMIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(folder=tmp_path, name="copy", config={"seed": 1})


@pytest.fixture
def stopped() -> Iterator[threading.Event]:
    """Holds what waits for it until the test is over."""
    event = threading.Event()
    yield event
    event.set()


class Standing(Fake):
    """Does not come back from one of its calls."""

    timeout_s = SHORT_S

    def __init__(self, at: str, until: threading.Event) -> None:
        super().__init__()
        self._at, self._until, self.abandoned = at, until, False

    def abandon(self) -> None:
        self.abandoned = True

    def _do(self, *call: Any) -> None:
        super()._do(*call)
        if call[0] == self._at:
            self._until.wait(LIMIT_S)


def test_only_finite_numbers_are_handed_on(run: TrackedRun) -> None:
    fake = Fake()
    trackers = Trackers([fake], run)
    trackers.log(3, {"a": 1, "b": float("nan"), "c": "text", "d": True, "e": None, "f": 0.5})
    trackers.close("completed")
    assert fake.calls[1] == ("log", 3, {"a": 1.0, "f": 0.5})


def test_after_a_signal_a_slow_tracker_leaves_time_for_the_rest(
    run: TrackedRun, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Standing("close", stopped)
    monkeypatch.setattr(slow, "timeout_s", LIMIT_S)
    trackers = Trackers([slow], run)
    began = time.monotonic()
    monkeypatch.setattr(interrupts, "_deadline", math.inf)
    threading.Timer(0.1, setattr, [interrupts, "_deadline", began + tracker_feed._REST_S + 0.2]).start()
    trackers.close("interrupted")
    assert 0.15 < time.monotonic() - began < LIMIT_S / 2
    assert slow.abandoned


def test_a_tracker_that_cannot_start_stops_the_run_and_closes_the_others(run: TrackedRun) -> None:
    first = Fake()
    with pytest.raises(ConfigError, match="tracker Fake cannot start: no network"):
        Trackers([first, Fake("start")], run)
    assert first.calls[-1] == ("close",)


def test_a_tracker_that_does_not_start_in_time_stops_the_run(run: TrackedRun, stopped: threading.Event) -> None:
    first, second = Fake(), Standing("start", stopped)
    with pytest.raises(ConfigError, match=r"tracker Standing did not start within 0\.3 s"):
        Trackers([first, second], run)
    assert first.calls[-1] == ("close",)
    assert second.abandoned


def test_a_run_that_goes_on_needs_no_tracker_that_does_not_start(run: TrackedRun, stopped: threading.Event) -> None:
    good, late = Fake(), Standing("start", stopped)
    trackers = Trackers([late, Fake("start"), good], run, required=False)
    told: list[tuple[str, str]] = []
    trackers.report_faults(lambda where, error: told.append((where, error)))
    trackers.log(1, {"a": 1})
    trackers.close("completed")
    assert ("log", 1, {"a": 1.0}) in good.calls
    assert late.abandoned
    assert told == [
        ("tracker Standing", "tracker Standing did not start within 0.3 s; the run goes on without it"),
        ("tracker Fake", "tracker Fake cannot start: no network; the run goes on without it"),
    ]


def test_a_tracker_that_fails_later_is_told_once(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Fake(), Fake("log")
    trackers = Trackers([bad, good], run)
    told: list[tuple[str, str]] = []
    trackers.report_faults(lambda where, error: told.append((where, error)))
    for step in range(3):
        trackers.log(step, {"a": 1})
    until(lambda: len(bad.calls) == 4)
    trackers.close("completed")
    assert [call[1] for call in good.calls if call[0] == "log"] == [0, 1, 2]
    assert told == [("tracker Fake", "does not take the metrics, the run goes on without: no network")]


def test_faults_that_nobody_asked_for_are_logged(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    bad = Fake("log")
    trackers = Trackers([bad], run)
    with caplog.at_level(logging.WARNING):
        trackers.log(1, {"a": 1})
        until(lambda: caplog.records)
    trackers.close("completed")
    assert "tracker Fake: does not take the metrics" in caplog.text


def test_a_tracker_that_cannot_close_does_not_keep_the_others_open(run: TrackedRun) -> None:
    last = Fake()
    trackers = Trackers([Fake("close"), last], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    trackers.close("completed")
    assert ["no network" in error for error in told] == [True]
    assert last.calls[-1] == ("close",)


def test_a_tracker_that_stands_still_holds_up_neither_the_steps_nor_the_end(
    run: TrackedRun, stopped: threading.Event
) -> None:
    bad, good = Standing("log", stopped), Fake()
    trackers = Trackers([bad, good], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    began = time.monotonic()
    for step in range(100):
        trackers.log(step, {"a": 1})
    assert time.monotonic() - began < SHORT_S
    time.sleep(SHORT_S * 1.5)
    trackers.log(100, {"a": 1})
    assert ["has not answered for 0.3 s" in text for text in told] == [True]
    trackers.close("completed")
    assert time.monotonic() - began < 20 * SHORT_S
    assert "was not done 0.3 s after the end of the run, 100 calls behind" in told[1]
    assert bad.abandoned
    assert [call[0] for call in good.calls].count("log") == 101
    assert good.calls[-1] == ("close",)


def test_what_waits_for_a_tracker_is_bounded(
    run: TrackedRun, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_feed, "_PENDING", 5)
    standing = Standing("log", stopped)
    trackers = Trackers([standing], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    trackers.log(0, {"a": 1})
    until(lambda: len(standing.calls) == 2)
    for step in range(1, 20):
        trackers.log(step, {"a": 1})
    assert told == ["is 5 calls behind and misses the next ones; metrics.jsonl has them"]
    trackers.close("completed")
    assert "5 calls behind" in told[1]


class Following(Fake):
    """Wants to know more."""

    def event(self, event: Mapping[str, object]) -> None:
        self._do("event", event["event"])

    def end(self, status: str) -> None:
        self._do("end", status)


def test_a_tracker_that_asks_for_them_gets_events_and_how_the_run_has_ended(run: TrackedRun) -> None:
    following, plain = Following(), Fake()
    trackers = Trackers([following, plain], run)
    trackers.event({"event": "fault", "where": "here"})
    trackers.close("interrupted")
    assert following.calls == [("start",), ("event", "fault"), ("end", "interrupted"), ("close",)]
    assert plain.calls == [("start",), ("close",)]


def test_a_tracker_apart_lives_in_a_process_of_its_own_with_a_log(run: TrackedRun) -> None:
    trackers = Trackers([FileTracker()], run)
    trackers.log(1, {"a": 1})
    child = psutil.Process(process(run.folder))
    assert child.pid != psutil.Process().pid
    trackers.close("failed")
    assert calls(run.folder) == ["start copy", "log 1 {'a': 1.0}", "end failed", "close"]
    assert "a word of the library" in (run.folder / "logs" / "tracker-file.log").read_text()
    assert not child.is_running()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("refuse", "^no such project$"),
        ("fail", "tracker file cannot start: no network"),
        ("die", r"its process has ended \(7\); see .*tracker-file.log"),
        ("stop", "tracker file did not start within 3 s"),
    ],
)
@pytest.mark.few(1)
def test_a_tracker_apart_that_does_not_start_is_refused_and_gone(run: TrackedRun, what: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trackers([FileTracker("start", what, timeout_s=3.0)], run)
    assert not psutil.pid_exists(process(run.folder))


@pytest.mark.parametrize(("at", "what"), [("log", "die"), ("log", "stop"), ("close", "stop"), ("close", "fail")])
@pytest.mark.few(1)
def test_a_tracker_apart_that_dies_or_stands_still_is_a_fault_and_gone(run: TrackedRun, at: str, what: str) -> None:
    trackers = Trackers([FileTracker(at, what, timeout_s=3.0)], run)
    told: list[tuple[str, str]] = []
    trackers.report_faults(lambda where, error: told.append((where, error)))
    trackers.log(1, {"a": 1})
    trackers.log(2, {"a": 1})
    trackers.close("completed")
    assert [where for where, _ in told] == ["tracker file"]
    assert not psutil.pid_exists(process(run.folder))


def test_a_tracker_apart_is_closed_as_failed_when_the_process_of_the_run_is_killed(tmp_path: Path) -> None:
    code = (
        "import os\nfrom pathlib import Path\n"
        "from tests.tracking.pretend import FileTracker\nfrom trinity_sync.tracking.tracker_feed import Trackers\n"
        "from trinity_sync.tracking.trackers import TrackedRun\n"
        f"Trackers([FileTracker()], TrackedRun(folder=Path({str(tmp_path)!r}), name='copy'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S)
    assert done.returncode == -9
    until(lambda: not psutil.pid_exists(process(tmp_path)))
    assert calls(tmp_path) == ["start copy", "end failed", "close"]


@pytest.mark.all
def test_a_tracker_that_stands_still_does_not_keep_the_program_from_ending(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from tests.tracking.pretend import FileTracker\nfrom trinity_sync.tracking import tracker_feed\n"
        "from trinity_sync.tracking.tracker_feed import Trackers\n"
        "from trinity_sync.tracking.trackers import TrackedRun\ntracker_feed._LAST_S = 1.0\n"
        f"trackers = Trackers([FileTracker('log', 'stop')], TrackedRun(folder=Path({str(tmp_path)!r}), name='copy'))\n"
        "trackers.log(1, {'a': 1})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=45.0).returncode == 0
    until(lambda: not psutil.pid_exists(process(tmp_path)))


def test_a_fork_of_a_trackers_process_answers_nothing_and_ends(run: TrackedRun) -> None:
    trackers = Trackers([FileTracker("log", "fork")], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    for step in (1, 2, 3):
        trackers.log(step, {"a": step})
    trackers.close("completed")
    assert told == []
    assert calls(run.folder) == ["start copy", *(f"log {step} {{'a': {step}.0}}" for step in (1, 2, 3)), "end completed", "close"]  # fmt: skip # noqa: E501
    said = (run.folder / "logs" / "tracker-file.log").read_text()
    for pid in re.findall(r"the fork is (\d+)", said):
        until(lambda pid=int(pid): not pid or not psutil.pid_exists(pid) or zombie(pid))


def zombie(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def test_an_error_of_a_tracker_is_told_in_short(run: TrackedRun) -> None:
    trackers = Trackers([FileTracker("log", "fail at length")], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    trackers.log(1, {"a": 1})
    trackers.close("completed")
    assert [len(text) < 3000 for text in told] == [True]


class Leaving(Fake):
    """Its library ends the program."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        raise SystemExit("cannot go on")


def test_a_tracker_whose_library_ends_the_program_is_a_fault_and_closed(run: TrackedRun) -> None:
    leaving = Leaving()
    trackers = Trackers([leaving], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    trackers.log(1, {"a": 1})
    trackers.log(2, {"a": 1})
    trackers.close("completed")
    assert told == ["does not take the metrics, the run goes on without: cannot go on"]
    assert [call[0] for call in leaving.calls] == ["start", "log", "log", "close"]


class Dropped(Standing):
    """Its call fails when nobody waits for it any longer."""

    def abandon(self) -> None:
        self._until.set()

    def _do(self, *call: Any) -> None:
        super()._do(*call)
        if call[0] == self._at:
            raise OSError("dropped")


def test_a_tracker_that_is_given_up_is_one_fault(run: TrackedRun, stopped: threading.Event) -> None:
    later = Standing("close", stopped)
    later.timeout_s = 3 * SHORT_S
    trackers = Trackers([Dropped("close", threading.Event()), later], run)
    told: list[tuple[str, str]] = []
    trackers.report_faults(lambda where, error: told.append((where, error)))
    trackers.close("completed")
    assert [where for where, _ in told] == ["tracker Dropped", "tracker Standing"]


class Unknown(FileTracker):
    """Of a module that its process cannot import."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("no_such_module",)


def test_a_large_tracker_apart_has_the_time_of_the_start(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_feed, "start_child", partial(start_child, message_s=0.01))
    tracker = FileTracker()
    tracker.data = bytes(5_000_000)  # type: ignore[attr-defined]
    Trackers([tracker], run).close("completed")
    assert calls(run.folder) == ["start copy", "end completed", "close"]


def test_a_tracker_apart_of_a_module_that_is_not_there_is_refused_at_once(run: TrackedRun) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"its process has ended \(1\); see .*tracker-Unknown.log"):
        Trackers([Unknown(timeout_s=LIMIT_S)], run)
    assert time.monotonic() - began < LIMIT_S / 2
    assert "No module named 'no_such_module'" in (run.folder / "logs" / "tracker-Unknown.log").read_text()


def test_a_tracker_apart_outlives_what_ends_all_processes_of_a_job_and_sees_its_end(run: TrackedRun) -> None:
    trackers = Trackers([FileTracker()], run)
    os.kill(process(run.folder), signal.SIGTERM)
    trackers.log(1, {"a": 1})
    trackers.close("interrupted")
    assert calls(run.folder) == ["start copy", "log 1 {'a': 1.0}", "end interrupted", "close"]


def test_a_tracker_apart_does_not_import_what_lies_about(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "queue.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(run.folder)
    Trackers([FileTracker()], run).close("completed")
    assert calls(run.folder) == ["start copy", "end completed", "close"]


def test_nobody_waits_for_ever_for_a_process_that_a_dead_disk_holds(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Trackers([FileTracker("close", "stop")], run)
    trackers._feeds[0]._limit_s = SHORT_S
    child = psutil.Process(process(run.folder))
    monkeypatch.setattr(tracker_feed, "_LAST_S", SHORT_S)
    monkeypatch.setattr(child_process, "_END_S", SHORT_S)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    over = threading.Thread(target=trackers.close, args=["completed"], daemon=True)
    over.start()
    over.join(20.0)
    waits = over.is_alive()
    child.kill()
    assert not waits
