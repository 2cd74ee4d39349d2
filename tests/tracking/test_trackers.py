from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trinity_sync.errors import ConfigError
from trinity_sync.tracking import trackers
from trinity_sync.tracking.mlflow import MlflowTracker, _name
from trinity_sync.tracking.swanlab import SwanlabTracker
from trinity_sync.tracking.tensorboard import TensorBoardTracker
from trinity_sync.tracking.tracker_feed import Trackers
from trinity_sync.tracking.trackers import TrackedRun, build_trackers, kept_id
from trinity_sync.tracking.trackio import TrackioTracker
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


def test_trackers_are_built_by_name_or_target() -> None:
    settings = OmegaConf.create(
        {
            "tensorboard": {"flush_s": 3},
            "wandb": {"project": "p", "entity": None, "mode": "offline", "tags": ["a"]},
            "mlflow": {"experiment": "e", "uri": None, "timeout_s": 5},
            "trackio": {"project": "p", "folder": None, "space": None},
            "swanlab": {"project": "p", "workspace": None, "mode": "offline", "tags": []},
            "mine": {"_target_": f"{__name__}.Fake", "fail": "log"},
        }
    )
    kinds = [type(tracker).__name__ for tracker in build_trackers(settings)]
    known = ["TensorBoardTracker", "WandbTracker", "MlflowTracker", "TrackioTracker", "SwanlabTracker"]
    assert kinds == [*known, "Fake"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mine": {}}, r"tracker\.mine is not one of tensorboard, wandb"),
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
    trackers.close("completed")
    assert scalars(run.folder) == {"reward/mean": [(1, 0.25), (2, 0.5)], "loss": [(1, 2.0)]}


def test_tensorboard_shows_samples_as_a_table(run: TrackedRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers([TensorBoardTracker()], run)
    fixed = {"reward": 0.123456, "exact": None, "advantage": 1.0, "finished": True, "tokens": 2, "version": 3}
    trackers.samples(4, [{"step": 4, "text": "1|2=", "response": "3\n", "spans": [[0, 2, 3]], **fixed}])
    trackers.close("completed")
    found = EventAccumulator(str(run.folder / "tensorboard"))
    found.Reload()
    [text] = found.Tensors("samples/text_summary")
    assert text.step == 4
    table = text.tensor_proto.string_val[0].decode().splitlines()
    assert table[0].startswith("| step | text | response |")
    assert table[2] == r"| 4 | 1\|2= | 3<br> | 0.1235 |  | 1 | True | 2 | 3 | [[0, 2, 3]] |"


def test_a_tracker_that_takes_no_samples_is_not_asked(run: TrackedRun) -> None:
    fake = Fake()
    fake.samples = []  # type: ignore[attr-defined] # something of its own
    trackers = Trackers([fake], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    trackers.samples(1, [{}])
    trackers.close("completed")
    assert told == []


def test_a_tracker_that_cannot_take_samples_still_takes_metrics_and_is_told_of_when_it_does_not(
    run: TrackedRun,
) -> None:
    trackers = Trackers([TensorBoardTracker()], run)
    told: list[str] = []
    trackers.report_faults(lambda where, error: told.append(error))
    for step in (1, 2):
        trackers.samples(step, [{"no": "columns"}])
        trackers.log(step, {"loss": 1.0})
    trackers.close("completed")
    assert told == ["does not take the samples, the run goes on without: 'step'"]
    assert scalars(run.folder) == {"loss": [(1, 1.0), (2, 1.0)]}


def test_tensorboard_forgets_the_abandoned_steps_of_a_resume(run: TrackedRun) -> None:
    moments = iter(range(1, 100))
    first = Trackers([TensorBoardTracker(clock=lambda: next(moments))], run)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    first.close("failed")
    resumed = TrackedRun(folder=run.folder, name="copy", attempt=1, resumed_from=1)
    second = Trackers([TensorBoardTracker(clock=lambda: next(moments))], resumed)
    second.log(2, {"loss": 20.0})
    second.close("completed")
    assert scalars(run.folder) == {"loss": [(1, 1.0), (2, 20.0)]}


@pytest.mark.parametrize(
    ("tracker", "module"),
    [
        (TensorBoardTracker(), "tensorboard.summary.writer.event_file_writer"),
        (WandbTracker("p"), "wandb"),
        (MlflowTracker("e"), "mlflow.tracking"),
        (TrackioTracker("p"), "trackio"),
        (SwanlabTracker("p"), "swanlab"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, tracker: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-sync\[trackers\]'"):
        tracker.start(run)


class FakeWandb(types.ModuleType):
    """Stands for the package: keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.codes: list[int] = []

    def init(self, **settings: Any) -> FakeWandb:
        self.runs.append(settings)
        return self

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


def test_wandb_goes_on_with_the_same_run_after_a_resume(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step, status in ((1, "interrupted"), (2, "completed")):
        tracker = WandbTracker("project", mode="offline", tags=["a"])
        tracker.start(run)
        tracker.log(step, {"loss": 0.5})
        tracker.end(status)  # type: ignore[arg-type]
        tracker.close()
    assert wandb.runs[0]["id"] == wandb.runs[1]["id"]
    assert wandb.runs[0]["project"] == "project"
    assert wandb.rows == [{"loss": 0.5, "step": 1}, {"loss": 0.5, "step": 2}]
    assert wandb.codes == [1, 0]


def test_wandb_that_refuses_says_what_to_do(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setattr(wandb, "init", lambda **settings: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ConfigError, match="wandb login"):
        WandbTracker("project").start(run)


def test_an_id_is_kept_and_one_that_a_full_disk_cut_off_is_made_anew(run: TrackedRun) -> None:
    kept = kept_id(run, "wandb")
    assert kept_id(run, "wandb") == kept
    (run.folder / "wandb" / "run_id").write_text("")
    assert (made := kept_id(run, "wandb"))
    assert kept_id(run, "wandb") == made


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("reward/mean", "reward/mean"),
        ("odd@name", "odd_name"),
        ("/a", "_/a"),
        ("a//b/", "a/_/b/_"),
        ("a/../b", "a/_/b"),
        ("", "_"),
        ("x" * 249 + "/y", "x" * 249),
    ],
)
def test_mlflow_gets_a_name_that_it_takes(name: str, there: str) -> None:
    assert _name(name) == there


# checks before anything starts


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user without a login."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("WANDB", "SWANLAB", "MLFLOW", "NETRC"))]:
        monkeypatch.delenv(name)
    return tmp_path


WANDB: Mapping[str, Any] = {"wandb": {"project": "p", "mode": "online"}}
SWANLAB: Mapping[str, Any] = {"swanlab": {"project": "p", "mode": "online"}}


@pytest.mark.parametrize(("settings", "command"), [(WANDB, "wandb login"), (SWANLAB, "swanlab login")])
def test_a_login_is_needed_before_anything_starts(nobody: Path, settings: Any, command: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tracker\.{next(iter(settings))}\.mode is online.*`{command}`"):
        build_trackers(settings)


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [(WANDB, "WANDB_API_KEY", "k"), (WANDB, "WANDB_MODE", "offline"), (SWANLAB, "SWANLAB_API_KEY", "k")],
)
def test_the_environment_may_have_the_login(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert len(build_trackers(settings)) == 1


@pytest.mark.parametrize(
    ("settings", "file", "host"),
    [(WANDB, ".netrc", "api.wandb.ai"), (SWANLAB, ".swanlab/.netrc", "https://api.swanlab.cn")],
)
def test_a_netrc_file_may_have_the_login(nobody: Path, settings: Any, file: str, host: str) -> None:
    (nobody / ".swanlab").mkdir()
    (nobody / file).write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    assert len(build_trackers(settings)) == 1


@pytest.mark.parametrize("folder", [".config/wandb", "wandb", ".wandb"])
def test_a_settings_file_of_wandb_may_name_another_server(nobody: Path, folder: str) -> None:
    (nobody / folder).mkdir(parents=True)
    (nobody / folder / "settings").write_text("[default]\nbase_url = http://wandb.here:8080\n")
    assert len(build_trackers(WANDB)) == 1


def test_a_mode_of_wandb_that_is_set_to_nothing_is_not_one(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "")
    with pytest.raises(ConfigError, match=r"^tracker\.wandb\.mode is online"):
        build_trackers(WANDB)


@pytest.mark.parametrize("settings", [WANDB, SWANLAB])
def test_a_user_without_a_home_has_no_login(nobody: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="but there is no login"):
        build_trackers(settings)


def test_settings_that_cannot_be_read_now_are_none(nobody: Path) -> None:
    (nobody / "wandb/settings").mkdir(parents=True)
    with pytest.raises(ConfigError, match="but there is no login"):
        build_trackers(WANDB)


@pytest.mark.parametrize("uri", ["http:/x", "http://", "https://:80", "localhost:5000", "nosql://x/y"])
def test_an_address_that_cannot_be_mlflows_is_refused(nobody: Path, uri: str) -> None:
    with pytest.raises(ConfigError, match=r"^tracker\.mlflow\.uri is .*such as http://10\.0\.0\.1:5000"):
        build_trackers({"mlflow": {"experiment": "e", "uri": uri}})


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "http://10.0.0.1:5000",
            "https://u:p@host/mlflow",
            "http://[::1]:80",
            "sqlite:////d/m.db",
            "/data/a:b",
            "runs",
        ),
        *(
            "runs",
            "file:///x",
            "postgresql+psycopg2://u:p@h/d",
            "databricks",
            "databricks://profile",
            "http://my_host:5000/",
            "HTTP://host:5000",
            "http://host:5000?x=1",
        ),
    ],
)
def test_an_address_that_mlflow_takes_passes(nobody: Path, uri: str) -> None:
    assert len(build_trackers({"mlflow": {"experiment": "e", "uri": uri}})) == 1


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio", "tensorboard"])
def test_a_missing_package_is_named_before_anything_starts(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda named: None)
    keys = {"mlflow": {"experiment": "e"}, "tensorboard": {}}
    with pytest.raises(ConfigError, match=f"^tracker={name} needs the {name} package: pip install"):
        build_trackers({name: keys.get(name, {"project": "p"})})
