"""How a run's actors are put together, with stand-ins for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trinity_sync.sync
import trinity_sync.trainer.worker_spec
from trinity_sync.actors.calls import Call, DeathError
from trinity_sync.actors.rank_client import RankInfo, UntrainedTensors, WeightsDigest
from trinity_sync.checkpoint.folder.lock import locked, writer_of
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.launch import actors as module
from trinity_sync.launch.actors import Actors, Setup, agent_config, close_agents
from trinity_sync.launch.start import Start
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.wire import WireFormat


class Answer(Call[Any]):
    """What an actor answers at once."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return True

    def result(self, timeout_s: float) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Rank:
    """A rank that sees a folder, or another one in its place."""

    def __init__(self, number: int, sees: bool) -> None:
        self.who, self._sees = f"trainer rank {number}", sees

    def writer_of(self, folder: str) -> Answer:
        return Answer(writer_of(Path(folder)) if self._sees else None)


def setup(tmp_path: Path, model: str) -> Setup:
    """Of a run without explorers, that has a file of pairs to learn."""
    found: Any = {
        "cfg": typed(compose(["algorithm=sft", "task=pairs", "task.path=none", f"model.path={model}"])),
        "config_digest": "",
        "folder": SimpleNamespace(logs=tmp_path, model=tmp_path, slots=tmp_path),
        "start": Start(0, False, tmp_path / "checkpoints", None),
        "recorder": SimpleNamespace(attempt=0, phase=lambda what: None),
        "cluster": SimpleNamespace(namespace="none"),
        "run_key": "run",
        "use_gpu": False,
        "last_step": 1,
        "stop": None,
    }
    return Setup(**found)


class AgentsCome(Exception):  # noqa: N818 - an event
    """The actors have come so far that agents would be started."""


def agents_come(*_: Any, **__: Any) -> None:
    raise AgentsCome


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Start the actors of a run without explorers, as far as its agents."""

    def started(*, sees: list[bool], monitor: Any = None) -> None:
        ranks = [Rank(number, one) for number, one in enumerate(sees)]
        infos = [RankInfo(rank=rank, part="", layout=None, node="here", pid=0) for rank in range(len(ranks))]
        trainer = SimpleNamespace(ranks=ranks, initialise=lambda: infos)
        trainer.all = lambda ask, timeout_s: [ask(rank).result(timeout_s) for rank in ranks]
        made: Any = Actors(setup(tmp_path, "org/name"))
        made._make_trainer = lambda: trainer
        made._make_monitor = lambda: SimpleNamespace(describe=lambda: Answer(monitor), handle=None)
        made.start()

    monkeypatch.setattr(trinity_sync.sync.Synchronizer, "get_actor", lambda *_: SimpleNamespace(client=None))
    monkeypatch.setattr(trinity_sync.trainer.worker_spec, "check_whole", lambda *_: None)
    monkeypatch.setattr(module, "start_agents", agents_come)
    with locked(tmp_path / "checkpoints", tmp_path):
        yield started


def test_who_does_not_see_the_checkpoint_folder_is_named(start: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(AgentsCome):
        start(sees=[True, True])
    with pytest.raises(ConfigError, match=rf"^checkpoint\.dir: trainer rank 1 cannot see .* {folder}; .* share$"):
        start(sees=[True, False])


def test_a_monitor_that_cannot_start_ends_the_start(start: Callable[..., None]) -> None:
    with pytest.raises(RunError, match="the checkpoint monitor could not start"):
        start(sees=[True], monitor=RunError("the checkpoint monitor could not start: no folder"))


@pytest.mark.parametrize("model", ["models/seven", "org/name"])
def test_manifests_name_the_models_folder_wherever_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / "models" / "seven").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    actors = Actors(setup(tmp_path, model))
    base, left_out = WeightsDigest("ab", WireFormat("BF16")), UntrainedTensors("/m", ("mtp",), "cd")
    actors.infos = [RankInfo(rank=0, part="", layout=None, node="", pid=1, base=base, left_out=left_out)]
    expected = str(tmp_path / model) if model == "models/seven" else model
    assert actors.base is not None
    assert actors.base.path == expected
    assert actors.left_out is not None
    assert actors.left_out["path"] == "/m", "as the rank says that has read them"


class Closing(Answer):
    """A call that notes whether its answer was waited for."""

    waited = False

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        self.waited = True
        return True


def test_a_dead_node_agent_does_not_keep_the_others_from_giving_back_their_memory() -> None:
    calls = [Closing(DeathError("the agent of node a", "give its memory back")), Closing(None)]
    agents: Any = {name: SimpleNamespace(close=lambda call=call: call) for name, call in zip("ab", calls, strict=True)}
    close_agents(agents)
    assert [call.waited for call in calls] == [True, True]


@pytest.mark.parametrize(("mode", "brought"), [("memory", {"rank-00000": 64}), ("checkpoint", {})])
def test_agents_know_what_explorers_read_through_them(mode: str, brought: dict[str, int], tmp_path: Path) -> None:
    cfg = typed(compose(["algorithm=sft", "task=pairs", "task.path=none", "model.path=org/name", f"sync={mode}"]))
    layout = PartLayout.build("rank-00000", [whole("weight", "U8", (64,))], 64)
    infos = [
        RankInfo(rank=rank, part="rank-00000", layout=layout if not rank else None, node="a", pid=1) for rank in (0, 1)
    ]
    assert agent_config(cfg, infos, "run", tmp_path, "logs").brings == brought
