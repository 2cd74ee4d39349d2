"""One pair of ranks and one run for the room, as each takes seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests import local_ray
from tests.backends.engines import make_models
from tests.integrations.real_engines.ranks import LIMIT, START_LIMIT, start
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.integrations.verl import open_run
from trinity_sync.integrations.verl.program_run import VerlRun
from trinity_sync.protocol.retention import Policy
from trinity_sync.sync import SynchronizerConfig


@pytest.fixture(scope="package")
def room() -> Iterator[None]:
    """Ray."""
    with local_ray.joined():
        yield


@pytest.fixture(scope="package")
def pair(room: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = tmp_path_factory.mktemp("models")
    ranks = start(models)
    make_models(models)
    return {"models": models, "ranks": ranks}


@pytest.fixture
def ranks(pair: dict[str, Any]) -> Iterator[list[Any]]:
    """Two ranks; new ones where a test has killed some."""
    try:
        ray.get([rank.pid.remote() for rank in pair["ranks"]], timeout=START_LIMIT)
    except RayActorError:
        for rank in pair["ranks"]:
            ray.kill(rank)
        pair["ranks"] = start(pair["models"])
        ray.get([rank.pid.remote() for rank in pair["ranks"]], timeout=START_LIMIT)
    yield pair["ranks"]
    for rank in pair["ranks"]:
        try:
            ray.get(rank.heal.remote(), timeout=LIMIT)
        except RayActorError:
            continue


@pytest.fixture(scope="package")
def make_run(room: None) -> Iterator[Callable[..., VerlRun]]:
    """Open a run on a checkpoint folder."""
    made = []

    def make(root: Path, policies: Sequence[Policy] = (), **options: Any) -> VerlRun:
        run = open_run(
            root,
            local_ray.new_name(),
            monitor_config=MonitorConfig(timeout_s=LIMIT, policies=policies),
            synchronizer_config=SynchronizerConfig(timeout_s=LIMIT),
            **options,
        )
        made.append(run)
        return run

    yield make
    for run in made:
        with suppress(ValueError):  # a test has closed it
            run.close()


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of `run`."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="package")
def run(make_run: Callable[..., VerlRun], root: Path) -> VerlRun:
    """The run of all tests that do not ask for one of their own; each takes the next `step`."""
    return make_run(root)


@pytest.fixture(scope="package")
def steps(run: VerlRun) -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def step(steps: Iterator[int]) -> int:
    """A step that no other test has saved, after all of theirs."""
    return 10 * next(steps)
