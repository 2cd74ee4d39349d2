"""The actor of a trainer rank. The engine is imported by the process that has it, and by no other: the driver, which
starts the ranks, needs neither torch nor verl.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.actors.rank import RankClient, RankInfo
from trinity_sync.config import load
from trinity_sync.host.logs import own_log

if TYPE_CHECKING:
    from trinity_sync.trainer.spec import WorkerSpec

OWN = ("import_engine", "make_model", "initialise")
"""What a rank's actor answers itself."""


def rank_actor(worker: type | None) -> type:
    """Make the class of the ranks' actors. It passes every call that it does not answer itself to a `worker`.

    Args:
        worker: what a rank is, once its engine is imported; made from a `WorkerSpec`. None stands for `TrinityWorker`.

    Returns:
        A class for `ray.remote`, with the methods of `RankClient` and those that the worker's own class adds.
    """

    class TrainerRank:
        """One rank; made where it runs.

        Args:
            spec: what the worker is built from.
            environment: what verl looks for in the environment of a rank.
            log_dir: folder of its log; None for Ray's own.
        """

        def __init__(self, spec: WorkerSpec, environment: Mapping[str, str], log_dir: str | None) -> None:
            own_log(log_dir, f"trainer-rank-{environment['RANK']}")
            os.environ.update(environment)
            self._spec = spec
            self._worker: Any = None

        def import_engine(self) -> None:
            """Import what the engine needs. Called at once, while the model may still be in the making."""
            _worker_class(worker, self._spec)

        def make_model(self, architecture: Mapping[str, object], seed: int, folder: str) -> None:
            """Write the initial model of the run; see `make_model` of the factory."""
            self._spec.backend.make_model(self._spec.engine, architecture, seed, Path(folder))

        def initialise(self) -> RankInfo:
            """Make the worker and its engine. Collective."""
            self._worker = _worker_class(worker, self._spec)(self._spec)
            info: RankInfo = self._worker.initialise()
            return info

    for name in [*vars(RankClient), *(vars(worker) if worker is not None else ())]:
        if not name.startswith("_") and name not in OWN:
            setattr(TrainerRank, name, _passed_on(name))
    return TrainerRank


def _worker_class(worker: type | None, spec: WorkerSpec) -> type:
    if worker is not None:
        return worker
    found: type = load("the ranks' class", spec.backend.worker)
    return found


def _passed_on(name: str) -> Callable[..., object]:
    def method(self: Any, *args: object, **kwargs: object) -> object:
        return getattr(self._worker, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method
