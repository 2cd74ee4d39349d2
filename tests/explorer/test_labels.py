"""Which weights made which samples: nobody can say afterwards but by the label, so it is right whatever comes between.

The explorer's own body and engine, without Ray; what is made up is where its versions come from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.explorer.helpers import ARCHITECTURE, engine_of, load, loaded
from trinity_sync.actors.explorer_client import EngineDeathError, LoadError, LoadReport
from trinity_sync.errors import RunError
from trinity_sync.explorer.actor import Explorer, ExplorerSpec
from trinity_sync.models.architecture import make_model
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.tasks.copy_digits import CopyDigits

TASK = CopyDigits(2, 0)
WORK = [(step, TASK.prompts(step, 4)) for step in (1, 2)]


class Versions:
    """In place of loader and synchronizer: versions are models in folders, and a load may break off half-way."""

    def __init__(self, models: dict[Version, Path]) -> None:
        self.models = models
        self.engine: Any = None
        self.held: Version | None = None
        self.published = Version(0, 0)
        self.timeout_s = 1.0
        self.breaks_off = False

    def newest(self) -> Any:
        return SimpleNamespace(result=lambda limit: self.published)

    def load(self, version: Version | None, broadcast: Any = None) -> LoadReport:
        self.held = None
        load(self.engine, self.models[self.published])
        if self.breaks_off:
            raise RunError("the last bucket cannot be read now")
        self.held = self.published
        sizes = {"bytes_moved": 0, "total_s": 0.0, "paused_s": 0.0, "peak_rss": 0}
        return LoadReport(explorer="explorer-0", version=self.published, digest=None, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {Version(0, step): make_model(ARCHITECTURE, step, folder / str(step)) for step in range(3)}


@pytest.fixture
def versions(models: dict[Version, Path]) -> Versions:
    return Versions(models)


@pytest.fixture
def explorer(versions: Versions) -> Explorer:
    fixed: dict[str, Any] = {"engine": {}, "task": {}, "seed": 0, "deterministic": False, "sync": {}, "verify": "full"}
    spec = ExplorerSpec(member=RoundMember.new("explorer-0"), sync_timeout_s=1.0, log_dir=None, **fixed)
    made = Explorer(spec, versions)  # type: ignore[arg-type]
    made._base = None
    made._engine = versions.engine = engine_of(versions.models[Version(0, 0)])
    made._task = TASK
    made._loader = versions  # type: ignore[assignment]
    return made


def made_by(model: Path, version: Version) -> list[Any]:
    """The samples of an explorer that never had other weights."""
    engine = loaded(model)
    batches = [
        engine.generate(prompts, TASK, step=step, samples_per_prompt=3, version=version) for step, prompts in WORK
    ]
    return [sample for batch in batches for sample in batch]


def test_each_sample_bears_the_version_of_the_weights_that_made_it_though_loads_come_between(
    explorer: Explorer, versions: Versions, models: dict[Version, Path]
) -> None:
    for version, model in models.items():
        versions.published = version
        samples = list(explorer.produce(WORK, 3).batch)
        assert {sample.version for sample in samples} == {version}
        assert samples == made_by(model, version)


def test_a_version_that_is_published_while_samples_are_made_waits_until_they_are(
    explorer: Explorer, versions: Versions, models: dict[Version, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate: Callable[..., Any] = explorer._engine.generate

    def publish_meanwhile(*args: Any, **kwargs: Any) -> Any:
        versions.published = Version(0, 1)
        return generate(*args, **kwargs)

    monkeypatch.setattr(explorer._engine, "generate", publish_meanwhile)
    assert list(explorer.produce(WORK, 3).batch) == made_by(models[Version(0, 0)], Version(0, 0))
    assert list(explorer.produce(WORK, 3).batch) == made_by(models[Version(0, 1)], Version(0, 1))


def test_an_explorer_whose_update_failed_makes_nothing_and_goes_on_with_the_next_load(
    explorer: Explorer, versions: Versions, models: dict[Version, Path]
) -> None:
    """It neither stays paused for ever, nor generates with the half of a version."""
    explorer.produce(WORK, 3)
    versions.published, versions.breaks_off = Version(0, 1), True
    for _ in range(2):
        with pytest.raises(LoadError, match="could not load the newest version: the last bucket cannot be read now"):
            explorer.produce(WORK, 3)
        with pytest.raises(RunError, match="explorer-0 holds no version, so it cannot generate for step 1"):
            explorer.generate(*WORK[0], 3)
    versions.breaks_off = False
    produced = explorer.produce(WORK, 3)
    assert produced.load is not None
    assert list(produced.batch) == made_by(models[Version(0, 1)], Version(0, 1))


@pytest.mark.parametrize("where", ["load", "generate"])
def test_an_explorer_ends_with_its_engine(
    explorer: Explorer, versions: Versions, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class ExitError(BaseException):
        pass

    def leave(code: int) -> None:
        raise ExitError(code)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise EngineDeathError("the engine core is gone")

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(versions if where == "load" else explorer._engine, where, dies)
    with pytest.raises(ExitError, match="1"):
        explorer.produce(WORK, 3)
