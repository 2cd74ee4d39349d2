"""How a run begins and ends, around its job. Ray is not started: the cluster is a stand-in."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_sync.checkpoint.folder.owner import MARK
from trinity_sync.config import RunConfig, compose
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.launch import launcher
from trinity_sync.launch.actors import Setup
from trinity_sync.launch.start import Start
from trinity_sync.tracking.run_record import read_record


def test_an_error_of_the_run_is_not_hidden_by_one_in_tidying_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "run" / "checkpoints" / ".monitor.lock"

    @contextmanager
    def failing(*args: Any, **kwargs: Any) -> Iterator[None]:
        lock.unlink()
        lock.mkdir()
        raise RunError("what really happened")
        yield

    monkeypatch.setattr(launcher, "cluster", failing)
    with pytest.raises(RunError, match="what really happened"):
        launcher.run(RunConfig(compose(["trainer.steps=1", "live=off"])), tmp_path / "run")
    assert read_record(tmp_path / "run" / "run.json")["error"] == "what really happened"
    assert f"{lock} cannot be locked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [([], []), (["explorer.top_k=5", "explorer.top_p=0.5"], ["explorer.top_k", "explorer.top_p"])],
)
def test_samples_of_some_tokens_only_are_warned_of(
    overrides: list[str], keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(launcher, "cluster", lambda *_, **__: nullcontext())
    assert launcher.run(RunConfig(compose(["trainer.steps=1", "live=off", *overrides])), tmp_path, job=Idle) == 0  # type: ignore[arg-type]
    warned = [line for line in capsys.readouterr().err.splitlines() if "not on-policy" in line]
    assert [line.split()[1] for line in warned] == keys


class Idle:
    """A job that does nothing."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.actors = SimpleNamespace(
            peak_memory=lambda: {"trainer": 17}, close=lambda: None, explorers_ended=nullcontext
        )

    def start(self) -> None:
        pass

    def loop(self) -> None:
        pass


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[..., None], end: Callable[..., None]) -> int:
    """A run in a folder.

    Args:
        loop: what its job does.
        end: what happens when Ray is to end; gets what `cluster` was given.
    """

    @contextmanager
    def cluster(*args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        finally:
            end(**kwargs)

    monkeypatch.setattr(launcher, "cluster", cluster)
    monkeypatch.setattr(Idle, "loop", loop)
    return launcher.run(RunConfig(compose(["trainer.steps=1", "live=off"])), folder, job=Idle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "completed"), (RunError("no"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_how_a_run_went_is_recorded_before_ray_ends(
    error: BaseException | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def loop(job: Idle) -> None:
        if error is not None:
            raise error

    def end(**_: Any) -> None:
        seen.append(read_record(tmp_path / "run.json")["status"])
        seen.append(json.loads((tmp_path / "summary.json").read_text())["peak_memory"]["trainer"])

    with pytest.raises(RunError, match="no") if status == "failed" else nullcontext():
        assert run(tmp_path, monkeypatch, loop, end) == (0 if status == "completed" else 130)
    assert seen == [status, 17]
    assert read_record(tmp_path / "run.json")["status"] == status


def test_a_run_that_has_a_record_has_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupted() -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(launcher, "cluster", lambda *args, **given: nullcontext())
    with pytest.raises(KeyboardInterrupt):
        launcher.run(
            RunConfig(compose(["trainer.steps=1", "live=off"])), tmp_path, settings=lambda config: interrupted()
        )
    assert not (tmp_path / "run.json").exists()


def test_a_run_whose_folder_is_gone_at_its_end_keeps_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(job: Idle) -> None:
        (tmp_path / "run").rename(tmp_path / "moved")

    monkeypatch.setattr(launcher, "cluster", lambda *args, **given: nullcontext())
    monkeypatch.setattr(Idle, "loop", loop)
    cfg = RunConfig(compose(["trainer.steps=1", "live=off", f"checkpoint.dir={tmp_path}/saved"]))
    with suppress(RunError):
        launcher.run(cfg, tmp_path / "run", job=Idle)  # type: ignore[arg-type]
    assert (tmp_path / "saved" / MARK).exists()


def test_what_ends_a_program_on_the_spot_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class End(BaseException):
        """Of the program."""

    def fail(*args: Any, **given: Any) -> None:
        given["lost"]("Ray has given up this node")
        raise End

    monkeypatch.setattr(launcher, "cluster", fail)
    with pytest.raises(End):
        launcher.run(RunConfig(compose(["trainer.steps=1", "live=off"])), tmp_path)
    record = read_record(tmp_path / "run.json")
    assert (record["status"], record["error"]) == ("failed", "Ray has given up this node")


def test_a_thread_of_the_run_that_dies_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(job: Idle) -> None:
        thread = threading.Thread(target=[].pop, name="events")
        thread.start()
        thread.join()

    assert run(tmp_path, monkeypatch, loop, lambda **_: None) == 0
    *_, event = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["where"], event["error"]) == ("fault", "thread events", "pop from empty list")


@pytest.mark.parametrize(
    ("began", "until", "last"), [(0, None, 20), (0, 3, 3), (10, 10, 11), (10, 4, 11), (10, 30, 20)]
)
def test_a_run_that_ends_early_does_one_step_at_least(
    began: int, until: int | None, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(launcher.Start, "find", lambda *_, **__: Start(began, False, tmp_path / "checkpoints", None))
    monkeypatch.setattr(launcher, "cluster", lambda *_, **__: nullcontext())
    monkeypatch.setattr(Idle, "loop", lambda job: seen.append(job.setup.last_step))
    cfg = RunConfig(compose(["trainer.steps=20", "live=off"]))
    assert launcher.run(cfg, tmp_path, until=until, job=Idle) == 0  # type: ignore[arg-type]
    assert seen == [last]


def test_the_command_is_recorded_as_a_shell_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "cluster", lambda *_, **__: nullcontext())
    monkeypatch.setattr("sys.argv", ["launch.py", "task.path=my rows.jsonl"])
    assert launcher.run(RunConfig(compose(["trainer.steps=1", "live=off"])), tmp_path, job=Idle) == 0  # type: ignore[arg-type]
    assert read_record(tmp_path / "run.json")["command"] == "launch.py 'task.path=my rows.jsonl'"


@pytest.mark.parametrize("threads", ["4,2", "0", "-1", "two"])
def test_threads_that_are_no_number_are_refused_before_anything_is_made(
    threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(ConfigError, match=rf"^OMP_NUM_THREADS is '{threads}'; "):
        run(tmp_path / "run", monkeypatch, lambda job: None, lambda **_: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("threads", ["", " 2 "])
def test_threads_may_be_left_open(threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert run(tmp_path, monkeypatch, lambda job: None, lambda **_: None) == 0
    assert read_record(tmp_path / "run.json")["threads"] == int(threads.strip() or "1")


def test_settings_hear_of_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    @contextmanager
    def settings() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            seen.append(error)
            raise

    refusal = ConfigError("too few processors")

    @contextmanager
    def refusing(*args: Any, **kwargs: Any) -> Iterator[None]:
        raise refusal
        yield

    monkeypatch.setattr(launcher, "cluster", refusing)
    with pytest.raises(ConfigError):
        launcher.run(
            RunConfig(compose(["trainer.steps=1", "live=off"])), tmp_path / "run", settings=lambda config: settings()
        )
    assert seen == [refusal]


def test_a_refused_start_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on another host could not see that it is over."""

    def refuse(*given: object) -> object:
        assert (tmp_path / "saved" / MARK).exists()
        assert (tmp_path / "copies" / MARK).exists()
        raise ConfigError("no such tracker")

    monkeypatch.setattr(launcher, "_recorder", refuse)
    places = [f"checkpoint.dir={tmp_path}/saved", f"checkpoint.mirror={tmp_path}/copies"]
    with pytest.raises(ConfigError, match="no such tracker"):
        launcher.run(RunConfig(compose(["trainer.steps=1", "live=off", *places])), tmp_path / "run")
    assert not list(tmp_path.rglob(MARK))
