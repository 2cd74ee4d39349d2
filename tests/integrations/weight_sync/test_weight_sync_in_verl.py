"""The weight sync in verl's own manager, with real trainer's ranks, and each member killed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.backends.engines import make_models
from tests.integrations.real_engines.ranks import START_LIMIT

LIMIT = 30.0
MODES = ("memory", "nccl", "checkpoint")


@pytest.fixture(scope="module")
def models(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from tests.integrations.weight_sync.sync_workers import Program
    from trinity_sync.integrations.verl.weight_sync import checkpoint_engine

    checkpoint_engine.register()  # its import does so once in a process, and another file's tests change the registry
    made = []

    def program(mode: str, encoding: str = "full", **more: Any) -> Program:
        keys = {
            "mode": mode,
            "encoding": encoding,
            "timeout_s": LIMIT,
            **({"dir": str(tmp_path / "versions")} if mode == "checkpoint" else {}),
        }
        made.append(Program(models, keys, **more))
        return made[-1]

    yield program
    for one in made:
        one.end([*one.ranks, *one.rollout])


def moves(program: Any, step: int) -> dict[str, float]:
    """Move other weights, and look at what the rollout has then."""
    expected = ray.get([rank.change.remote(step) for rank in program.ranks], timeout=START_LIMIT)[0]
    metrics: dict[str, float] = program.move(step)
    assert ray.get([worker.digest.remote() for worker in program.rollout], timeout=LIMIT) == [expected] * len(
        program.rollout
    )
    assert metrics["weight_sync/buckets"] > 6  # of rank 0, which without a gather has half of a bf16 model
    return metrics


def left(folder: Path) -> list[str]:
    """Versions and what was begun of others, without the part of the name that is drawn."""
    return sorted(path.name.rsplit("-", 1)[0] for path in folder.glob("*") if path.name != ".lock")


@pytest.mark.all
def test_versions_move_in_verls_manager(start: Callable[..., Any]) -> None:
    program = start("memory")
    for step in (1, 2):
        assert moves(program, step)["weight_sync/mode_memory"] == 1


@pytest.mark.all
@pytest.mark.parametrize("mode", MODES)
def test_versions_move_to_several_workers(mode: str, start: Callable[..., Any], tmp_path: Path) -> None:
    program = start(mode, workers=2)
    for step in (1, 2, 3):
        assert moves(program, step)["weight_sync/receivers"] == 2
    assert [name.split("-")[0] for name in left(tmp_path / "versions")] == (
        ["version_3"] if mode == "checkpoint" else []
    )


@pytest.mark.all
def test_versions_move_as_deltas(start: Callable[..., Any]) -> None:
    program = start("nccl", encoding="delta", workers=2)
    full = moves(program, 1)["weight_sync/bytes"]
    assert moves(program, 1)["weight_sync/bytes"] < full / 10
    assert moves(program, 2)["weight_sync/bytes"] <= full
    program.restart("rollout")
    assert moves(program, 2)["weight_sync/bytes"] == full


@pytest.mark.all
@pytest.mark.parametrize(("mode", "encoding"), [*((mode, "full") for mode in MODES), ("nccl", "delta")])
def test_versions_move_without_a_gather(
    mode: str, encoding: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from trinity_sync.integrations.verl.weight_sync import checkpoint_engine

    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", {})
    monkeypatch.setenv(checkpoint_engine.NO_GATHER_VARIABLE, "1")
    checkpoint_engine.register()
    program = start(mode, encoding, backend="delta_sharded")
    sent = [moves(program, step)["weight_sync/bytes"] for step in (1, 1, 2)]
    assert (sent[1] < sent[0] / 10) == (encoding == "delta")


@pytest.mark.all
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", ["trainer rank 0", "trainer rank 1", "rollout"])
@pytest.mark.parametrize("at", [0, 12])
def test_a_killed_member_ends_the_sync_for_all_and_the_next_one_works(
    mode: str, victim: str, at: int, start: Callable[..., Any], tmp_path: Path
) -> None:
    program = start(mode)
    moves(program, 1)
    members = {
        "trainer rank 0": program.ranks[0],
        "trainer rank 1": program.ranks[1],
        "rollout": program.rollout[0],
    }
    ray.get(members[victim].die.remote(at), timeout=LIMIT)
    started = time.monotonic()
    with pytest.raises(Exception, match=r"(?s)died|gone|gave the weights up|could not be|disconnected"):
        program.move(2)
    survivors = {name: actor for name, actor in members.items() if name != victim}
    if victim == "rollout":  # this rank has only to gather, and does
        del survivors["trainer rank 1"]
    said = dict(
        zip(survivors, ray.get([one.failure.remote() for one in survivors.values()], timeout=2 * LIMIT), strict=True)
    )
    assert time.monotonic() - started < LIMIT
    if victim == "rollout":
        assert "rollout worker 0" in said["trainer rank 0"]
    else:
        assert "trainer rank 0" in said["rollout"]
    for name in set(said) - {"rollout"}:
        assert "RunError" in said[name]
    assert ray.get([one.memory.remote() for one in survivors.values()], timeout=LIMIT) == [[]] * len(survivors)
    versions = [name for name in left(tmp_path / "versions") if name != ".sending"]  # which the next sender removes
    assert versions == (["version_1"] if mode == "checkpoint" else [])

    program.restart("rollout" if victim == "rollout" else "trainer")
    moves(program, 3)
    assert [name.split("-")[0] for name in left(tmp_path / "versions")] == (
        ["version_3"] if mode == "checkpoint" else []
    )
