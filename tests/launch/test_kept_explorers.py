"""Which explorers live on between two attempts, and who gets them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.launch.test_actors import setup
from trinity_sync.actors.pending import DeathError
from trinity_sync.errors import RunError
from trinity_sync.explorer.actor import ExplorerSpec
from trinity_sync.explorer.pool import LiveExplorer
from trinity_sync.launch import kept_explorers
from trinity_sync.launch.actors import Actors
from trinity_sync.launch.kept_explorers import KeptExplorers
from trinity_sync.protocol.rounds import RoundMember

DEATH = DeathError("trainer rank 1", "train step 7")
REST: Any = {"task": {}, "seed": 0, "deterministic": False, "sync": {}, "verify": "full", "sync_timeout_s": 1.0}
SPEC = ExplorerSpec(member=RoundMember.new(""), engine={"model_path": "seven"}, log_dir=None, **REST)


class Rollout:
    """That of a trainer that has failed, unless it is closed."""

    def __init__(self) -> None:
        self.paused, self.alone, self.made = True, False, 12
        self.names: list[str] = []
        self.lost: set[str] = set()
        self.limits: list[float | None] = []

    def go_on_alone(self, names: Collection[str]) -> None:
        self.alone, self.names = True, sorted(names)

    def close(self, grace_s: float | None = None) -> None:
        self.paused = False
        self.limits.append(grace_s)


class Pool:
    """Two explorers, of which those that do not live on are closed."""

    spec = SPEC

    def __init__(self) -> None:
        self.alive = {
            f"explorer-{number}": LiveExplorer(SimpleNamespace(number=number), 100 + number) for number in range(2)
        }
        self.closed: list[str] | None = None

    def hand_over(self, but: Callable[[str], bool]) -> dict[str, LiveExplorer]:
        return {name: self.alive.pop(name) for name in list(self.alive) if not but(name)}

    def close(self) -> None:
        self.closed = sorted(self.alive)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the explorers that are ended."""
    found: list[int] = []
    monkeypatch.setattr(ray, "kill", lambda handle: found.append(handle.number))
    return found


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Its last one is the program's connection to Ray."""
    made: list[str | None] = ["first"]
    monkeypatch.setattr(kept_explorers, "_connection", lambda: made[-1])
    return made


def kept_after(error: Exception) -> KeptExplorers:
    kept = KeptExplorers(lambda one: isinstance(one, DeathError))
    kept.keep(Pool(), error)  # type: ignore[arg-type]
    return kept


def test_the_next_attempt_gets_them_once(ended: list[int], connection: object) -> None:
    kept = kept_after(DEATH)
    assert kept.pids() == [100, 101]
    taken = kept.take(replace(SPEC, member=RoundMember.new("")))
    assert {name: one.pid for name, one in taken.items()} == {"explorer-0": 100, "explorer-1": 101}
    assert kept.pids() == []
    assert kept.take(SPEC) == {}
    kept.close()
    assert ended == []


def test_one_that_the_error_names_is_not_kept(connection: object) -> None:
    assert kept_after(DeathError("explorer-1", "load version 3")).pids() == [100]


def test_none_is_kept_where_the_run_ends(connection: object) -> None:
    assert kept_after(RunError("the reward function failed")).pids() == []


def test_those_of_another_spec_end(ended: list[int], connection: object) -> None:
    assert kept_after(DEATH).take(replace(SPEC, engine={"model_path": "eight"})) == {}
    assert ended == [0, 1]


@pytest.mark.parametrize("later", ["second", None])
def test_those_of_a_ray_that_has_ended_are_forgotten(
    ended: list[int], connection: list[str | None], later: str | None
) -> None:
    kept = kept_after(DEATH)
    connection.append(later)
    assert kept.take(SPEC) == {}
    kept = kept_after(DEATH)
    connection.append("third")
    kept.close()
    assert ended == []


def test_those_that_no_attempt_takes_end(ended: list[int], connection: object) -> None:
    kept_after(DEATH).close()
    assert ended == [0, 1]


def generating(*, lost: str = "") -> tuple[KeptExplorers, Any]:
    kept, rollout = KeptExplorers(lambda one: isinstance(one, DeathError)), Rollout()
    kept.keep(Pool(), DEATH, rollout)  # type: ignore[arg-type]
    rollout.lost = {lost} - {""}
    return kept, rollout


def test_a_rollout_goes_on_with_them_until_the_next_attempt_is_ready(connection: object) -> None:
    kept, rollout = generating()
    assert (rollout.names, kept.generates) == (["explorer-0", "explorer-1"], True)
    assert kept.take(SPEC).keys() == {"explorer-0", "explorer-1"}
    assert (rollout.limits, kept.generates) == ([], True)
    assert kept.end_rollout() == 12
    assert (rollout.limits, kept.generates) == ([15.0], False)
    assert kept.end_rollout() == 0


def test_one_that_died_while_it_generated_is_not_given_on(ended: list[int], connection: object) -> None:
    kept, _ = generating(lost="explorer-1")
    assert kept.take(SPEC).keys() == {"explorer-0"}
    assert ended == [1]


@pytest.mark.parametrize("error", [DEATH, RunError("the reward function failed")])
def test_another_death_before_the_next_attempt_is_ready_ends_the_generation(
    ended: list[int], connection: object, error: Exception
) -> None:
    kept, rollout = generating()
    kept.take(SPEC)
    kept.keep(Pool(), error)  # type: ignore[arg-type]
    assert (rollout.limits, kept.generates) == ([0.0], False)


def test_nothing_generates_where_the_run_ends(ended: list[int], connection: object) -> None:
    kept, rollout = generating()
    kept.close()
    assert (rollout.limits, kept.generates, ended) == ([0.0], False, [0, 1])


def test_a_rollout_that_is_closed_does_not_go_on(connection: object) -> None:
    kept, rollout = KeptExplorers(lambda one: True), Rollout()
    rollout.close()
    kept.keep(Pool(), DEATH, rollout)  # type: ignore[arg-type]
    assert (rollout.names, kept.generates, kept.pids()) == ([], False, [100, 101])


@pytest.mark.parametrize(("error", "closed"), [(DEATH, False), (RunError("no"), True), (KeyboardInterrupt(), True)])
def test_a_rollout_ends_with_its_attempt_where_none_follows(
    tmp_path: Path, connection: object, error: BaseException, closed: bool
) -> None:
    kept = KeptExplorers(lambda one: isinstance(one, DeathError))
    actors, rollout = Actors(replace(setup(tmp_path, "org/name"), kept=kept)), Rollout()
    made: Any = (Pool(), rollout)
    actors.pool, actors.rollout = made
    with contextlib.suppress(BaseException), actors.explorers_ended():
        raise error
    assert (not rollout.paused, rollout.alone) == (closed, not closed)


@pytest.mark.parametrize(
    ("address", "error", "closed"),
    [
        (None, DEATH, []),
        (None, DeathError("explorer-1", "load version 3"), ["explorer-1"]),
        (None, RunError("the reward function failed"), ["explorer-0", "explorer-1"]),
        (None, None, ["explorer-0", "explorer-1"]),
        ("ray://elsewhere", DEATH, ["explorer-0", "explorer-1"]),  # from which the attempt disconnects
    ],
)
def test_engines_of_the_others_release_what_they_have(
    tmp_path: Path, connection: object, address: str | None, error: Exception | None, closed: list[str]
) -> None:
    given = setup(tmp_path, "org/name")
    cfg = replace(given.cfg, cluster=replace(given.cfg.cluster, address=address))
    kept = KeptExplorers(lambda one: isinstance(one, DeathError))
    actors = Actors(replace(given, cfg=cfg, kept=kept))
    pool: Any = Pool()
    actors.pool = pool
    with contextlib.suppress(RunError), actors.explorers_ended():
        if error is not None:
            raise error
    assert pool.closed == closed
