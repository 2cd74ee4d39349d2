"""`--supervise` on the command line: what is refused, and which commands the supervisor gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import launch
from tests.cli.stand_in import StandIn, standing_in
from trinity_sync.cli import main as cli
from trinity_sync.host import supervisor
from trinity_sync.host.supervisor import NOTES, Note, Notes
from trinity_sync.launch import app, supervision


class BecomeError(BaseException):
    """In place of the exec: the commands of the supervisor."""


@pytest.fixture(autouse=True)
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    def become(command: list[str], again: list[str]) -> None:
        raise BecomeError(command, again)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(supervisor, "become", become)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "launch.py", "--supervise", "seed=1"])
    monkeypatch.setattr(supervision, "_driver", None)
    monkeypatch.setattr(supervision, "_has_run", False)
    with standing_in(StandIn(), tmp_path, monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """What a supervisor has given this process."""
    with open(os.memfd_create("notes", 0), "r+b", buffering=0) as file:
        monkeypatch.setenv(NOTES, str(file.fileno()))
        yield Notes(file.fileno())


@pytest.mark.parametrize("arguments", [["--supervise", "seed=1"], ["seed=1", "--supervise"]])
def test_a_run_becomes_the_supervisor_of_itself_and_of_its_resume(arguments: list[str]) -> None:
    with pytest.raises(BecomeError) as raised:
        app.run_main(launch.main, arguments)
    command, again = raised.value.args
    assert command == [sys.executable, "-u", "launch.py", "--supervise", "seed=1"]
    assert again[0] == sys.executable
    assert again[-2:] == ["resume", "--supervise"]
    with pytest.raises(BecomeError):
        cli.main(["run", *arguments])


def test_a_resume_goes_on_by_the_same_command(tmp_path: Path) -> None:
    with pytest.raises(BecomeError) as raised:
        cli.main(["resume", str(tmp_path), "--supervise", "--from-scratch"])
    command, again = raised.value.args
    assert command == again


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["-m", "seed=1,2"], "--multirun"),
        (["--dry-run"], "--dry-run"),
        (["--cfg", "job"], "--cfg"),
        (["--info", "all"], "--info"),
    ],
)
def test_what_starts_no_single_run_is_refused(
    more: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", "--supervise", *more]) == 2
    assert capsys.readouterr().err == (
        f"error: --supervise resumes one run where its driver dies; it cannot be given with {named}\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_resume_of_a_sweep_and_a_look_at_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["resume", str(tmp_path), "--supervise", "--cfg", "job"]) == 2
    assert "it cannot be given with --cfg" in capsys.readouterr().err
    (tmp_path / "multirun.yaml").touch()
    assert cli.main(["resume", str(tmp_path), "--supervise"]) == 2
    assert "it cannot be given with a sweep" in capsys.readouterr().err


def test_settings_of_a_sweep_are_refused_when_they_are_known(
    notes: Notes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", "--supervise", "experiment=staleness"]) == 2
    assert "error: --supervise is for one run, and these settings are those of a sweep" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["--help", "--hydra-help", "--version"])
def test_help_needs_no_supervisor(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--supervise", text]) == 0
    assert capsys.readouterr().out


def begin(launcher: StandIn) -> Callable[[object], int]:
    """Has a run of the stand-in note that its attempt has begun, where it is supervised."""

    def behave(cfg: object) -> int:
        if (driver := supervision.driver()) is not None:
            driver.begun(launcher.calls[-1].run_dir, 0, Note(most=3, restarts=[], story=[]))
        return 0

    return behave


def test_a_supervised_driver_runs_and_its_programs_are_not_supervised(notes: Notes, launcher: StandIn) -> None:
    launcher.behave = begin(launcher)
    assert cli.main(["run", "--supervise", "hydra.run.dir=it"]) == 0
    (call,) = launcher.calls
    assert NOTES not in os.environ
    begun, over = notes.read()
    assert begun["arguments"] == [str(call.run_dir)]
    assert over == {"over": True}


def test_a_driver_that_resumes_after_another_goes_on_by_its_arguments(
    notes: Notes, launcher: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["run", "hydra.run.dir=it"]) == 0
    monkeypatch.setattr(supervision, "_has_run", False)  # that was another program
    notes.append(Note(run="it/run.json", arguments=["it", "--allow-target=mine"], most=3, restarts=[], story=[]))
    launcher.behave = begin(launcher)
    assert cli.main(["resume", "it", "--supervise"]) == 0
    assert launcher.calls[-1].resume is not None
    assert notes.read()[-2].get("arguments") == ["it", "--allow-target=mine"]


@pytest.mark.parametrize("first", [["--supervise"], []], ids=["supervised", "alone"])
def test_the_first_run_of_a_program_alone_is_supervised(
    notes: Notes, launcher: StandIn, capsys: pytest.CaptureFixture[str], tmp_path: Path, first: list[str]
) -> None:
    """A supervisor of the second would start the program again, and with it the first."""
    assert cli.main(["run", *first, "hydra.run.dir=it"]) == 0
    capsys.readouterr()
    assert cli.main(["run", "--supervise", "hydra.run.dir=another"]) == 2
    assert "error: --supervise is for the first run of a program, and this is another" in capsys.readouterr().err
    assert len(launcher.calls) == 1
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (["run", "--supervise", "hydra.run.dir=it"], 0),
        (["run", "--supervise", "no.such.key=1"], 2),
        (["resume", "missing", "--supervise"], 2),
    ],
    ids=["done", "refused", "refused resume"],
)
@pytest.mark.parametrize("more", [["hydra.run.dir=another"], ["-m", "seed=1,2", "hydra.sweep.dir=sweep"]], ids=str)
def test_what_a_program_starts_after_its_supervised_command_is_not_supervised(
    notes: Notes, launcher: StandIn, first: list[str], code: int, more: list[str]
) -> None:
    assert cli.main(first) == code
    assert notes.read() == [{"over": True}]
    launcher.behave = begin(launcher)
    assert cli.main(["run", *more]) == 0
    assert notes.read() == [{"over": True}]


def test_a_fork_of_a_driver_does_not_say_that_the_run_is_over(notes: Notes) -> None:
    driver = supervision.SupervisedDriver(notes, resumes=True)
    if not (child := os.fork()):
        driver.over()
        os._exit(0)
    os.waitpid(child, 0)
    assert notes.read() == []
