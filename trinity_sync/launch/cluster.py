"""Starts a local Ray for a run (`cluster=local`) or joins an existing cluster by address (`cluster=existing`), and
leaves no trace of either. The run's actors have a namespace of their own and end with the driver. The launcher calls
`cluster`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.config.schema import ClusterConfig
from trinity_sync.errors import ConfigError
from trinity_sync.host.hardware import RAYS_HOOK, ScriptFolder, for_workers
from trinity_sync.host.interrupts import last_words
from trinity_sync.host.logs import story
from trinity_sync.host.process import replaced
from trinity_sync.host.threads import in_background
from trinity_sync.launch import local_ray
from trinity_sync.launch.node_watch import ended_with_its_node, raylet_watched
from trinity_sync.tracking.trackers import TrackedRun
from trinity_sync.tracking.units import finite

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_LAST_WORDS_S = 10.0
_HOOK = "trinity_sync.actors.calls.prepare_worker"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running Ray, with the namespace of the run's actors."""

    namespace: str
    gpus: int
    gpus_per_node: int


@contextlib.contextmanager
def cluster(
    settings: ClusterConfig,
    *,
    namespace: str,
    cpus: int,
    env: Mapping[str, str],
    forked: bool = False,
    lost: Callable[[str], object] = lambda error: None,
) -> Iterator[Cluster]:
    """Connect to Ray for the length of the block. `lost`: called with the error, on another thread, before this program
    exits because its node is lost.
    """
    import ray

    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = ScriptFolder()
    common = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR", "job_config": job}
    env = {**env, **for_workers(), RAYS_HOOK: _HOOK}
    own: Path | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored_environment())
        # callers report errors; Ray would also print those of abandoned calls
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        stack.enter_context(_ray_logged())
        if settings.address is not None:
            local_ray.check_unconnected()
            _join(settings.address, runtime_env={"env_vars": env}, **common)
            stack.callback(local_ray.shut_down, None)
        else:
            own = stack.enter_context(local_ray.local_ray(settings, cpus, env, forked, common))
        here = ray.get_runtime_context().get_node_id()
        expected = stack.enter_context(raylet_watched(here, ours=own is not None))

        def end(error: str) -> None:
            with contextlib.suppress(Exception):
                in_background(partial(lost, error), "last words").result(_LAST_WORDS_S)
            end_at_once()

        def end_at_once() -> None:
            expected.set()
            local_ray.give_up(own)

        stack.enter_context(ended_with_its_node(end))
        stack.enter_context(last_words(end_at_once))
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for node in nodes:
            story.info("node %s is %s (%s)", node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
        per_node = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        yield Cluster(namespace=namespace, gpus=sum(per_node), gpus_per_node=max(per_node, default=0))


def has_gpus(address: str) -> bool:
    """Return whether an existing cluster has GPUs; errors as for `cluster`."""
    import ray

    local_ray.check_unconnected()
    _join(address, log_to_driver=False, logging_level="ERROR")
    try:
        return bool(ray.cluster_resources().get("GPU", 0) > 0)
    finally:
        local_ray.shut_down(None)


def room_for(count: int, bundle: Mapping[str, float], limit_s: float) -> int:
    """Wait until the cluster has room for `count` processes with a bundle of resources each. Return the number for
    which it has room at the limit. Ray itself is asked to reserve it, as it alone knows what is free and where.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from trinity_sync.trainer.group import is_placed

    deadline = time.monotonic() + limit_s
    groups = [placement_group([dict(bundle)]) for _ in range(count)]
    try:
        for group in groups:
            is_placed(group, deadline - time.monotonic())
        return sum(placement_group_table(group)["state"] == "CREATED" for group in groups)
    finally:
        for group in groups:
            remove_placement_group(group)


def _join(address: str, **options: object) -> None:
    """Connect to an existing cluster. Raises ConfigError if there is none, or if it refuses this program."""
    import ray
    from ray.exceptions import AuthenticationError

    _check_reachable(address)
    try:
        with local_ray.own_sigterm():
            ray.init(address=address, **options)
    except (AuthenticationError, ConnectionError, ValueError, RuntimeError) as error:
        said = f"no Ray cluster answers there ({local_ray.first_line(error)})"
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error.__cause__):
            said = (
                "Ray there does not take this program's token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to what that cluster was started with"
            )
        raise ConfigError(f"cluster.address={address}: {said}") from error


def _check_reachable(address: str) -> None:
    """Check that the port of a cluster's address is open; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # such as "auto", which Ray resolves at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"cluster.address={address}: there is no answer ({error})") from error


def _ray_logged() -> contextlib.AbstractContextManager[None]:
    """Log Ray's messages about actors instead of printing them: the callers report an actor's end, with its name."""
    from ray._private import worker

    def log(said: Mapping[str, Sequence[str]], ignore_prefix: bool) -> None:
        for line in said["lines"]:
            logger.info("Ray: %s", line)

    return replaced(worker, print_to_stdstream=log)


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """Restore the environment after the block, except `AUTHENTICATION`: Ray leaves settings in its driver."""
    before = dict(os.environ)
    try:
        yield
    finally:
        before |= {name: os.environ[name] for name in (local_ray.AUTHENTICATION,) if name in os.environ}
        os.environ.clear()
        os.environ.update(before)


# -- gauges of a run among Ray's own metrics, for the Prometheus of an existing cluster


PREFIX = "trinity_sync_"
"""Of all gauges; Ray adds ``ray_``."""
OF_RUN = ("run", "folder")
"""Tags of all gauges: the run's name and folder."""

_GAUGES = {
    "step": "Last step of the trainer.",
    "reward": "Mean reward of the last step.",
    "loss": "Loss of the last step.",
    "step_seconds": "How long the last step took.",
    "staleness": "Mean staleness of the last step's samples, in steps.",
    "version": "Step of the newest version of the weights that was published.",
    "publish_seconds": "How long the newest version took to be published.",
    "publish_blocked_seconds": "How long the trainer was blocked by that.",
    "publish_bytes": "Bytes that were moved for that.",
    "explorer_version": "Step of the version that an explorer holds.",
    "load_seconds": "How long an explorer took to load it.",
    "checkpoint": "Step of the newest checkpoint.",
    "checkpoint_seconds": "How long it took to be saved.",
    "checkpoint_blocked_seconds": "How long the trainer was blocked by that.",
    "checkpoint_bytes": "Bytes that were written for that.",
    "faults": "Faults since this attempt of the run began.",
}
_OF_STEP = {
    "reward": "reward/mean",
    "loss": "loss",
    "step_seconds": "timing/step",
    "staleness": "staleness/mean",
}
_OF_EVENT = {
    "publish": {
        "version": "version",
        "publish_seconds": "total_s",
        "publish_blocked_seconds": "blocked_s",
        "publish_bytes": "bytes_moved",
    },
    "load": {"explorer_version": "version", "load_seconds": "total_s"},
    "commit": {
        "checkpoint": "step",
        "checkpoint_seconds": "total_s",
        "checkpoint_blocked_seconds": "blocked_s",
        "checkpoint_bytes": "bytes",
    },
}


_REFRESH_S = 1.0
"""Ray drops a gauge that is not set for two of its reports, each of at least a second."""
_CLOSE_S = 5.0


class ClusterMetrics:
    """A tracker that keeps gauges at the values of the run's last step and events. It starts before Ray does."""

    def __init__(self) -> None:
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, Gauge] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run: TrackedRun) -> None:
        """Start the thread that sets the gauges once Ray is up."""
        self._tags = dict(zip(OF_RUN, (run.name, str(run.folder)), strict=True))
        self._keep({"faults": 0})
        self._thread = threading.Thread(target=self._refresh, name="cluster metrics", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._keep({"step": step, **{gauge: values.get(name) for gauge, name in _OF_STEP.items()}})

    def event(self, event: Mapping[str, object]) -> None:
        name = str(event["event"])
        if name == "fault":
            self._keep({"faults": self._values["faults", ""] + 1})
            return
        figures = {gauge: event.get(field) for gauge, field in _OF_EVENT.get(name, {}).items()}
        self._keep(figures, explorer=str(event["explorer"]) if name == "load" else "")

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _keep(self, values: Mapping[str, object], explorer: str = "") -> None:
        with self._lock:
            for gauge, value in values.items():
                if (number := finite(value)) is not None:
                    self._values[gauge, explorer] = number

    def _refresh(self) -> None:
        while not self._over.wait(_REFRESH_S):
            ray = sys.modules.get("ray")
            if ray is None or not ray.is_initialized():
                continue
            with self._lock:
                values = [*self._values.items()]
            for (name, explorer), number in values:
                self._gauge(name).set(number, self._tags | ({"explorer": explorer} if explorer else {}))

    def _gauge(self, name: str) -> Gauge:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            tags = (*OF_RUN, "explorer") if name in _OF_EVENT["load"] else OF_RUN
            self._gauges[name] = Gauge(PREFIX + name, _GAUGES[name], tags)
        return self._gauges[name]
