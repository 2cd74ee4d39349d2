"""The trainer group: places the ranks on nodes and calls them together, each wait with a timeout."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Protocol, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trinity_sync.actors.calls import Call, results
from trinity_sync.actors.pending import failures_logged
from trinity_sync.actors.rank_client import RankClient, RankInfo
from trinity_sync.config import load
from trinity_sync.errors import WaitTimeout
from trinity_sync.host.interrupts import wait_until
from trinity_sync.host.logs import own_log
from trinity_sync.trainer.worker_spec import WorkerSpec

T = TypeVar("T")


class TrainerGroup:
    """All ranks of the trainer. Each begins to import its engine at once.

    Args:
        process_on_nodes: ranks per node, such as ``[8, 8]``; the ranks of a node have neighbouring numbers.
        start_timeout_s: limit until the engines are up, seconds.
        worker: class of the ranks; None: `TrinityWorker`.

    Raises:
        WaitTimeout: the cluster has no room for them.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        process_on_nodes: Sequence[int],
        use_gpu: bool,
        start_timeout_s: float,
        worker: type | None = None,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        actor = ray.remote(failures_logged(rank_actor(worker)))
        common = {"WORLD_SIZE": str(sum(process_on_nodes)), "WG_PREFIX": secrets.token_hex(4), "WG_BACKEND": "ray"}
        self.ranks: list[RankClient] = []
        for group in _reserve(process_on_nodes, use_gpu, start_timeout_s):
            for index in range(group.bundle_count):
                rank = len(self.ranks)
                environment = {**common, "RANK": str(rank), "RAY_LOCAL_WORLD_SIZE": str(group.bundle_count)}
                handle = actor.options(
                    num_cpus=1,
                    num_gpus=1 if use_gpu else 0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                ).remote(spec, environment, spec.log_dir)
                self.ranks.append(RankClient(handle, rank))
        self._importing = [rank.import_engine() for rank in self.ranks]

    def make_model(self, architecture: Mapping[str, object], seed: int, folder: str) -> None:
        """Have rank 0 write the initial model of a run, which all ranks and explorers then read."""
        results(self._importing[:1], self._start_timeout_s)
        self.ranks[0].make_model(architecture, seed, folder).result(self._start_timeout_s)

    def initialise(self) -> list[RankInfo]:
        """Build the engines; return the facts of each rank, in rank order."""
        results(self._importing, self._start_timeout_s)
        return self.all(RankClient.initialise, self._start_timeout_s)

    def all(self, ask: Callable[[RankClient], Call[T]], timeout_s: float) -> list[T]:
        """Call all ranks; return the results in rank order. `timeout_s`: limit for all together, seconds."""
        return self.begin(ask)(timeout_s)

    def begin(self, ask: Callable[[RankClient], Call[T]]) -> Callable[[float], list[T]]:
        """Begin the calls of `all`; the function that is returned waits for the results, with a timeout in seconds."""
        return partial(results, [ask(rank) for rank in self.ranks])


def is_placed(group: PlacementGroup, limit_s: float) -> bool:
    """Wait until Ray has placed a group; return whether it has at the limit. Ray waits for whole seconds, and Python
    handles no signal meanwhile.
    """
    return wait_until(lambda slice_s: group.wait(ceil(slice_s)), limit_s)


def _reserve(process_on_nodes: Sequence[int], use_gpu: bool, timeout_s: float) -> list[PlacementGroup]:
    """Reserve processors (and GPUs) for the ranks of each node, in the order of the nodes' addresses."""
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if use_gpu else {})}
    groups = [placement_group([bundle] * ranks, strategy="STRICT_PACK") for ranks in process_on_nodes]
    for group, ranks in zip(groups, process_on_nodes, strict=True):
        if not is_placed(group, timeout_s):
            each = "a processor and a GPU" if use_gpu else "a processor"
            for unused in groups:
                remove_placement_group(unused)
            what = f"find a node with {each} for each of {ranks} trainer ranks (cluster.start_timeout_s)"
            raise WaitTimeout("Ray", what, timeout_s)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: PlacementGroup) -> str:
        return str(addresses[placement_group_table(group)["bundles_to_node_id"][0]])

    return sorted(groups, key=address) if len(groups) > 1 else groups


# The actor of a trainer rank. Only its process imports the engine: the driver needs neither torch nor verl.


OWN = ("import_engine", "make_model", "initialise")
"""Methods that are not passed on to the worker."""


class RankWorker(Protocol):
    """The worker of a rank; it has the methods of `RankClient`, too."""

    def initialise(self) -> RankInfo: ...


class TrainerRank:
    """Body of a rank's actor. `environment`: variables that verl reads in the environment of a rank. `log_dir`: folder
    of its log; None for Ray's own.
    """

    worker_class: type | None = None

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str], log_dir: str | None) -> None:
        own_log(log_dir, f"trainer-rank-{environment['RANK']}")
        os.environ.update(environment)
        self._spec = spec
        self._worker: RankWorker | None = None

    def import_engine(self) -> None:
        """Import the engine. Called at once, before the model's folder exists."""
        self._worker_class()

    def make_model(self, architecture: Mapping[str, object], seed: int, folder: str) -> None:
        """Write the initial model of the run; see `BackendOption.make_model`."""
        self._spec.backend.make_model(self._spec.engine, architecture, seed, Path(folder))

    def initialise(self) -> RankInfo:
        """Make the worker and its engine. Collective."""
        self._worker = self._worker_class()(self._spec)
        return self._worker.initialise()

    def _worker_class(self) -> Callable[[WorkerSpec], RankWorker]:
        found: type = self.worker_class or load("the ranks' class", self._spec.backend.worker)
        return found


def rank_actor(worker: type | None) -> type:
    """Return a class for `ray.remote`: a `TrainerRank` that passes all other methods of `RankClient`, and those that
    the worker's own class adds, on to its worker.
    """
    names = [*vars(RankClient), *(vars(worker) if worker is not None else ())]
    passed = {name: _passed_on(name) for name in names if name[0] != "_" and name not in OWN}
    return type("TrainerRank", (TrainerRank,), {**passed, "worker_class": worker})


def _passed_on(name: str) -> Callable[..., object]:
    def method(self: TrainerRank, *args: object, **kwargs: object) -> object:
        return getattr(self._worker, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method
