from __future__ import annotations

import logging
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.tensorboard import TensorBoardTracker
from trinity_sync.tracking.trackers import TrackedRun, Trackers, build_trackers
from trinity_sync.tracking.wandb import WandbTracker


class Fake:
    """Remembers its calls; fails where it is told to."""

    def __init__(self, fail: str = "") -> None:
        self.fail, self.calls = fail, []  # type: tuple[str, list[Any]]

    def start(self, run: TrackedRun) -> None:
        self._do("start")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._do("log", step, dict(values))

    def close(self) -> None:
        self._do("close")

    def _do(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fail:
            raise OSError("no network")


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(folder=tmp_path, name="copy", config={"seed": 1})


def test_only_finite_numbers_are_handed_on(run: TrackedRun) -> None:
    fake = Fake()
    Trackers([fake], run).log(3, {"a": 1, "b": float("nan"), "c": "text", "d": True, "e": None, "f": 0.5})
    assert fake.calls[-1] == ("log", 3, {"a": 1.0, "f": 0.5})


def test_a_tracker_that_cannot_start_stops_the_run_and_closes_the_others(run: TrackedRun) -> None:
    first = Fake()
    with pytest.raises(ConfigError, match="tracker Fake cannot start: no network"):
        Trackers([first, Fake("start")], run)
    assert first.calls[-1] == ("close",)


def test_a_tracker_that_fails_later_is_warned_about_once(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Fake(), Fake("log")
    trackers = Trackers([bad, good], run)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            trackers.log(step, {"a": 1})
        trackers.close()
    assert [call[1] for call in good.calls if call[0] == "log"] == [0, 1, 2]
    assert len(caplog.records) == 1


def test_a_tracker_that_cannot_close_does_not_keep_the_others_open(run: TrackedRun) -> None:
    last = Fake()
    Trackers([Fake("close"), last], run).close()
    assert last.calls[-1] == ("close",)


def test_trackers_are_built_by_name_or_target() -> None:
    settings = OmegaConf.create(
        {
            "tensorboard": {"flush_s": 3},
            "wandb": {"project": "p", "entity": None, "mode": "offline", "tags": ["a"]},
            "mine": {"_target_": f"{__name__}.Fake", "fail": "log"},
        }
    )
    kinds = [type(tracker).__name__ for tracker in build_trackers(settings)]
    assert kinds == ["TensorBoardTracker", "WandbTracker", "Fake"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mine": {}}, r"tracker\.mine is none of tensorboard, wandb"),
        ({"mine": {"_target_": "no.such.Thing"}}, r"tracker\.mine\._target_=no\.such\.Thing cannot be imported"),
        ({"mine": {"_target_": f"{__name__}.Nothing"}}, "cannot be imported"),
        ({"mine": {"_target_": "Thing"}}, "cannot be imported"),
        ({"tensorboard": {"speed": 3}}, r"tracker\.tensorboard: .* does not take these options"),
    ],
)
def test_a_tracker_that_cannot_be_built_is_a_configuration_error(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_trackers(settings)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_was_logged(run: TrackedRun) -> None:
    trackers = Trackers([TensorBoardTracker()], run)
    trackers.log(1, {"reward/mean": 0.25, "loss": 2.0})
    trackers.log(2, {"reward/mean": 0.5})
    trackers.close()
    assert scalars(run.folder) == {"reward/mean": [(1, 0.25), (2, 0.5)], "loss": [(1, 2.0)]}


def test_tensorboard_forgets_the_abandoned_steps_of_a_resume(run: TrackedRun) -> None:
    moments = iter(range(1, 100))
    first = Trackers([TensorBoardTracker(clock=lambda: next(moments))], run)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    first.close()
    resumed = TrackedRun(folder=run.folder, name="copy", attempt=1, resumed_from=1)
    second = Trackers([TensorBoardTracker(clock=lambda: next(moments))], resumed)
    second.log(2, {"loss": 20.0})
    second.close()
    assert scalars(run.folder) == {"loss": [(1, 1.0), (2, 20.0)]}


@pytest.mark.parametrize(
    ("tracker", "module"),
    [(TensorBoardTracker(), "tensorboard.summary.writer.event_file_writer"), (WandbTracker("p"), "wandb")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, tracker: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-sync\[trackers\]'"):
        Trackers([tracker], run)


class FakeWandb(types.ModuleType):
    """Stands for the package: keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **settings: Any) -> FakeWandb:
        self.runs.append(settings)
        return self

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_with_the_same_run_after_a_resume(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (1, 2):
        trackers = Trackers([WandbTracker("project", mode="offline", tags=["a"])], run)
        trackers.log(step, {"loss": 0.5})
        trackers.close()
    assert wandb.runs[0]["id"] == wandb.runs[1]["id"]
    assert wandb.runs[0]["project"] == "project"
    assert wandb.rows == [{"loss": 0.5, "step": 1}, {"loss": 0.5, "step": 2}]
    assert wandb.finished == 2


def test_wandb_that_refuses_says_what_to_do(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setattr(wandb, "init", lambda **settings: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ConfigError, match="wandb login"):
        Trackers([WandbTracker("project")], run)
