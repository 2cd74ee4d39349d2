"""What each process of a run imports, if it is no fork: Python takes seconds for what it does not use, and a start has
two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from trinity_sync.config import RunConfig, check, compose
from trinity_sync.launch import launcher
from trinity_sync.launch.job import Job

LIMIT_S = 60.0

DATA = {"datasets", "pandas"}
"""Of verl's data sets, which its engines import. (pyarrow is imported by Ray.)"""
TRACKERS = {"tensorboard", "wandb", "mlflow", "trackio", "swanlab"}
OTHERS = {"megatron", "mbridge", "vllm", "sklearn", "matplotlib", "IPython"} | TRACKERS
"""What no process of the default experiment uses, though it may be installed. (transformers imports scipy if it is.)"""
ENGINES = {"verl", "peft", "tensordict"}
HEAVY = {"torch", "transformers", "sympy", "hydra", "omegaconf"}

NOT_LOADED = {
    "trainer": OTHERS,
    "explorer": DATA | OTHERS | ENGINES,
    "node agent": DATA | OTHERS | ENGINES | HEAVY,
    "synchronizer": DATA | OTHERS | ENGINES | HEAVY,
    "checkpoint monitor": DATA | OTHERS | ENGINES | HEAVY,
}


class Asking(Job):
    """A run whose processes say what they have loaded, once they have done all that they do."""

    loaded: dict[str, set[str]] = {}  # noqa: RUF012 - one run at a time

    def loop(self) -> None:
        super().loop()
        actors = self.actors
        assert actors.pool is not None
        clients: dict[str, Any] = {
            "trainer": actors.trainer.ranks[0],
            "explorer": actors.pool.clients["explorer-0"],
            "node agent": next(iter(actors.agents.values())),
            "synchronizer": actors.synchronizer,
            "checkpoint monitor": actors.monitor,
        }
        for kind, client in clients.items():
            # a lambda is sent as it is: a function of this module would have the process import all of it
            names = client.handle.__ray_call__.remote(
                lambda _: [name for name, found in sys.modules.items() if found is not None]
            )
            self.loaded[kind] = {name.partition(".")[0] for name in ray.get(names, timeout=LIMIT_S)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    folder: Path = tmp_path_factory.mktemp("run")
    cfg = compose(["trainer.steps=2", "checkpoint.interval=1", "live=off", "cluster.forks=false"])
    check(cfg)
    assert launcher.run(RunConfig(cfg), folder, job=Asking) == 0
    return Asking.loaded


@pytest.mark.all
@pytest.mark.parametrize("kind", NOT_LOADED)
def test_a_process_of_a_run_imports_nothing_that_it_does_not_use(loaded: dict[str, set[str]], kind: str) -> None:
    assert "trinity_sync" in loaded[kind]
    assert NOT_LOADED[kind] & loaded[kind] == set()
