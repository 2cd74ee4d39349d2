"""How a run ends that never got as far as its job. Ray is not started: the cluster fails here instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.config import compose
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.launch import launcher
from trinity_sync.tracking.record import read_record


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
        launcher.run(compose(["trainer.steps=1", "live=off"]), tmp_path / "run")
    assert read_record(tmp_path / "run" / "run.json")["error"] == "what really happened"
    assert f"{lock} cannot be locked" in capsys.readouterr().err


def test_settings_are_saved_when_the_record_has_begun_and_hear_of_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    @contextmanager
    def settings() -> Iterator[None]:
        seen.append(read_record(tmp_path / "run" / "run.json")["status"])
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
        launcher.run(compose(["trainer.steps=1", "live=off"]), tmp_path / "run", settings=settings())
    assert seen == ["running", refusal]
