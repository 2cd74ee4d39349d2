"""`trinity-sync watch` as a user calls it, beside runs that are played: what happens between two looks is a script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.test_list import leave
from tests.tracking import synthetic
from tests.tracking.synthetic import Clock
from trinity_sync.cli import main as cli
from trinity_sync.cli import watchers
from trinity_sync.tracking import run_record
from trinity_sync.tracking.run_record import RunFolder

Play = Callable[[Iterator[Any]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Go on with a script, up to its next `yield`, whenever the command waits for the next look."""

    def playing(script: Iterator[Any]) -> None:
        def pause(seconds: float) -> None:
            if next(script, "over") == "over":
                raise AssertionError("it goes on watching, though nothing more happens")

        next(script)
        monkeypatch.setattr(watchers, "sleep", pause)

    return playing


def run(path: Path, steps: int = 20, *, ends: str | None = "completed", total: int = 20) -> Iterator[None]:
    """A run of so many steps, four between two looks, that ends in some way, or is killed where that is None."""
    clock = Clock(time.time())
    if not (path / ".hydra").exists():
        synthetic.hydra(path, [], total=total)
    yield
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(path, resume=False))
        yield
        recorder = synthetic.start(folder, clock, total=total)
        recorder.phase("starting Ray")
        yield
        for step in range(1, steps + 1):
            synthetic.steps(recorder, clock, step, step)
            if step % 4 == 0:
                yield
        if ends is not None:
            recorder.finish(ends, "explorer-0 did not answer" if ends == "failed" else None)  # type: ignore[arg-type]
        yield
    yield


def watch(*arguments: str | Path) -> int:
    return cli.main(["watch", *map(str, arguments)])


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, without the times at the beginning of lines."""
    return [re.sub(r"^\[[^]]*\] ", "", line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_is_followed_from_its_start_to_its_end(
    tmp_path: Path, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    play(run(tmp_path / "run"))
    assert watch(tmp_path / "run") == 0
    lines = said(capsys)
    assert lines[0] == "starting Ray"
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step ")]
    assert steps == [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert "reward" in lines[1]
    assert "version 1 (explorers at 1)" in lines[1]
    assert "completed: 20 of 20 steps in 50 s" in lines


def test_who_comes_later_is_told_where_the_run_stands_and_what_comes(
    tmp_path: Path, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    script = run(tmp_path / "run")
    for _ in range(6):
        next(script)
    play(script)
    assert watch(tmp_path / "run") == 0
    assert [line.split("/")[0] for line in said(capsys) if line.startswith("step ")] == [
        *(f"step {step}" for step in (16, 18, 20))
    ]


@pytest.mark.parametrize(("ends", "code"), [("completed", 0), ("failed", 1), ("interrupted", 1)])
def test_the_exit_code_is_that_of_the_run(
    tmp_path: Path, play: Play, capsys: pytest.CaptureFixture[str], ends: str, code: int
) -> None:
    play(run(tmp_path / "run", steps=8, ends=ends))
    assert watch(tmp_path / "run") == code
    lines = said(capsys)
    assert f"{ends}: 8 of 20 steps in 20 s" in lines
    assert ("explorer-0 did not answer" in lines) == (ends == "failed")
    assert watch("--once", tmp_path / "run") == code
    assert f"{ends}: 8 of 20 steps in 20 s" in said(capsys)


def killed_run(path: Path) -> Path:
    """A run whose process was killed after 8 steps."""
    for _ in run(path, steps=8):
        pass
    record = json.loads((path / "run.json").read_text())
    for one in (record, record["attempts"][-1]):
        one.update(status="running", ended=None)
    (path / "run.json").write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("options", [[], ["--once"]])
def test_a_run_that_was_killed_is_told_from_one_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    folder = killed_run(tmp_path / "run")
    assert watch(*options, folder) == 1
    told = capsys.readouterr()
    assert "killed: 8 of 20 steps" in told.out
    assert f"error: the run in {folder} was killed" in told.err
    assert "it ran on" not in told.err


def test_a_run_on_another_host_is_not_said_to_be_dead_for_certain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = killed_run(tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "host": "elsewhere"}))
    assert watch(folder) == 1
    assert "it ran on elsewhere: locks of other hosts are not seen on every file system" in capsys.readouterr().err


def test_once_shows_a_run_that_goes_on_and_lets_it_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = run(tmp_path / "run")
    for _ in range(6):
        next(script)
    assert watch("--once", tmp_path / "run") == 0
    rows = {line.split()[0]: line for line in said(capsys)}
    for row, words in {
        "copy_digits": "fsdp2 x 2, sync=memory",
        "step": "12/20",
        "reward": "mean of 10:",
        "versions": "explorer-1 at 12",
        "sync": "blocked",
        "save": "step 10",
    }.items():
        assert words in rows[row]
    script.close()  # type: ignore[attr-defined]


def test_a_run_that_does_not_begin_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic.hydra(tmp_path / "run", [])
    clock = Clock(0.0)
    monkeypatch.setattr(watchers, "monotonic", clock)
    monkeypatch.setattr(watchers, "sleep", clock.pass_)
    assert watch("--wait", "30", tmp_path / "run") == 1
    assert clock.now == 30.0
    assert f"error: the run in {tmp_path / 'run'} did not begin within 30 s" in capsys.readouterr().err
    assert watch("--once", tmp_path / "run") == 1
    assert "has not begun" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf"])
def test_a_wait_that_is_no_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert watch("--wait", seconds, tmp_path) == 2
    assert "--wait" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert watch(tmp_path / place) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / place) in error
    assert "name" in error


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (leave(tmp_path / "run") / "run.json").write_text("[")
    assert watch(tmp_path / "run") == 2
    assert "run.json cannot be read as the record of a run" in capsys.readouterr().err


def test_ctrl_c_ends_the_watching_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watchers, "sleep", interrupt)
    script = run(tmp_path / "run")
    for _ in range(5):
        next(script)
    assert watch(tmp_path / "run") == 130
    assert "continues" in capsys.readouterr().err
    for _ in script:
        pass
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "completed"


def test_a_run_that_is_resumed_meanwhile_is_followed_on(
    tmp_path: Path, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = killed_run(tmp_path / "run")

    def resumed() -> Iterator[None]:
        clock = Clock(time.time())
        with RunFolder.open(folder, resume=True) as locked:
            yield
            recorder = synthetic.start(locked, clock, total=40, resumed_from=4)
            recorder.phase("starting Ray")
            yield
            settings = folder / ".hydra" / "config.yaml"  # saved a moment later
            settings.write_text(settings.read_text().replace("steps: 20", "steps: 40"))
            yield
            synthetic.steps(recorder, clock, 5, 40)
            yield
            recorder.finish("completed")
        yield

    play(resumed())
    assert watch(folder) == 0
    lines = said(capsys)
    assert "starting Ray" in lines
    steps = [line.split(",")[0] for line in lines if line.startswith("step ")]
    assert steps[:3] == ["step 8/20", "step 5/40", "step 8/40"]
    assert any(line.startswith("completed: 40 of 40 steps") for line in lines)


def test_a_folder_that_goes_away_ends_the_watching(
    tmp_path: Path, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    def moved() -> Iterator[None]:
        script = run(tmp_path / "run")
        for _ in range(5):
            next(script)
        yield
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        yield

    play(moved())
    assert watch(tmp_path / "run") == 1
    assert "no longer exists" in capsys.readouterr().err


def test_damaged_lines_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for _ in run(folder):
        pass
    with (folder / "events.jsonl").open("a") as file:
        file.write("oops\n{}\n")
    assert watch(folder) == 0
    assert f"note: 1 line of {folder / 'events.jsonl'} left out" in capsys.readouterr().err


def test_what_was_read_is_not_read_again(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(watchers, "json", SimpleNamespace(loads=lambda line: seen.append(line) or json.loads(line)))
    play(run(tmp_path / "run"))
    assert watch(tmp_path / "run") == 0
    assert len(seen) == len(set(seen)) > 20


def test_a_reader_that_leaves_ends_the_watching(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        play(run(tmp_path / "run"))
        assert watch(tmp_path / "run") == 1
    assert capfd.readouterr().err == ""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_folder_it_is_what_runs_here_or_ran_last(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch("--once") == 2
    leave("outputs/a/1", at=3000.0, name="newest")
    running = leave("outputs/a/2", at=1000.0, name="older", status="running", ended=None)
    with RunFolder.open(running, resume=True):
        assert watch("--once") == 0
        assert "older" in said(capsys)[0]
    shutil.rmtree(running)
    assert watch("--once") == 0
    assert any("outputs/a/1" in line for line in said(capsys))


def sweep(place: str, jobs: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep that is to have so many jobs, of which none has begun."""
    from trinity_sync.cli import watchers

    folder = Path(place).absolute()
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_text("")
    planned = [SimpleNamespace(invocation=SimpleNamespace(overrides=(f"seed={number}",))) for number in range(jobs)]
    monkeypatch.setattr(watchers, "read_jobs", lambda sweep: planned)
    return folder


def job(folder: Path, number: int, **other: Any) -> Iterator[None]:
    synthetic.hydra(folder / str(number), [f"seed={number}"], total=8)
    return run(folder / str(number), steps=8, total=8, **other)


def test_a_sweep_is_followed_job_by_job(
    here: Path, play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 2, monkeypatch)

    def both() -> Iterator[None]:
        yield
        yield from job(folder, 0)
        yield
        yield from job(folder, 1)

    play(both())
    assert watch(folder) == 0
    lines = said(capsys)
    assert "job 0: starting Ray" in lines
    assert "job 0: step 8/8" in "\n".join(lines)
    assert "job 1: step 8/8" in "\n".join(lines)
    assert "job 0 (seed=0): completed, 8/8 steps" in "\n".join(lines).replace(
        "job 0: completed", "job 0 (seed=0): completed"
    )
    assert lines[-3] == "multirun/try/x: 2 completed"
    assert [line.split()[:3] for line in lines[-2:]] == [["0", "completed", "8/8"], ["1", "completed", "8/8"]]


def test_a_sweep_of_which_a_job_failed_ends_with_1_and_says_which(
    here: Path, play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 2, monkeypatch)

    def both() -> Iterator[None]:
        yield from job(folder, 0, ends="failed")
        yield from job(folder, 1)

    play(both())
    assert watch(folder) == 1
    assert "job 0: explorer-0 did not answer" in said(capsys)


def test_a_sweep_whose_next_job_does_not_begin_is_over(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 3, monkeypatch)
    for _ in job(folder, 0):
        pass
    clock = Clock(0.0)
    monkeypatch.setattr(watchers, "monotonic", clock)
    monkeypatch.setattr(watchers, "sleep", clock.pass_)
    assert watch("--wait", "20", folder) == 1
    assert clock.now == 20.0
    assert "multirun/try/x: 1 completed, 2 to come" in said(capsys)


def test_once_shows_a_sweep_and_its_running_job(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 3, monkeypatch)
    for _ in job(folder, 0):
        pass
    script = job(folder, 1)
    for _ in range(4):
        next(script)
    assert watch("--once", folder) == 0
    lines = said(capsys)
    assert lines[0] == "multirun/try/x: 1 completed, 1 running, 1 to come"
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "completed", "8/8"], ["1", "running", "4/8"]]
    assert "seed=1" in lines[2]
    assert any(line.startswith("step      4/8") for line in lines)
    script.close()  # type: ignore[attr-defined]


def test_jobs_that_run_beside_each_other_are_all_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 2, monkeypatch)
    scripts = [job(folder, 0), job(folder, 1)]
    for script, looks in zip(scripts, (4, 5), strict=True):
        for _ in range(looks):
            next(script)
    assert watch("--once", folder) == 0
    lines = said(capsys)
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "running", "4/8"], ["1", "running", "8/8"]]


def test_a_folder_of_runs_is_watched_as_a_sweep_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave("outputs/a/1")
    leave("outputs/a/2", status="failed", error="why")
    assert watch("outputs/a") == 1
    assert "outputs/a: 1 completed, 1 failed" in said(capsys)


def test_the_command_looks_at_the_lock_without_taking_it_from_a_run(tmp_path: Path) -> None:
    folder = leave(tmp_path / "run")
    assert watch(folder) == 0
    assert run_record.lock_owner(folder) is None


def test_a_sweep_that_goes_away_ends_the_watching(
    here: Path, play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 2, monkeypatch)

    def moved() -> Iterator[None]:
        yield
        folder.rename(here / "elsewhere")
        yield

    play(moved())
    assert watch(folder) == 1
    assert capsys.readouterr().err == f"error: {folder} cannot be read: No such file or directory\n"


def test_a_job_whose_record_cannot_be_read_does_not_hide_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep("multirun/try/x", 2, monkeypatch)
    leave(folder / "0")
    (leave(folder / "1") / "run.json").write_text("{")
    assert watch(folder) == 1
    told = " ".join(said(capsys))
    assert "multirun/try/x: 1 completed, 1 unreadable" in told
    assert "1/run.json cannot be read as the record of a run" in told


def test_text_of_others_does_not_command_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said_by_others = "a\x1b]0;mine\x07\nb"
    leave("outputs/a/1", overrides=[f"name={said_by_others}"])
    leave("outputs/a/2\x1b[2J", status="failed", error=said_by_others)
    for command in (["outputs/a"], ["--once", "outputs/a"], ["outputs/a/2\x1b[2J"]):
        watch(*command)
        assert not {"\x1b", "\x07"} & set(capsys.readouterr().out)
