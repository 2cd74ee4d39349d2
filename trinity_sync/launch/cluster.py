"""Ray's life in a run: started or joined, and gone without a trace afterwards.

`cluster=local` starts a Ray of the run's own in a folder of its own; `cluster=existing` joins one by address. Either
way the run's actors live in a namespace that no other run shares, and end with the driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.host.interrupts import last_words
from trinity_sync.host.logs import story
from trinity_sync.host.module_path import RAYS_HOOK, ScriptFolder, for_workers
from trinity_sync.host.threads import in_background
from trinity_sync.launch.node_watch import ended_with_its_node, raylet_watched
from trinity_sync.launch.own_ray import AUTHENTICATION, check_unconnected, first_line, own_ray, own_sigterm
from trinity_sync.launch.ray_end import give_up, shut_down

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_LAST_WORDS_S = 10.0
_HOOK = "trinity_sync.actors.ray_host.prepare_worker"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray that is up.

    Attributes:
        namespace: of the run's actors.
        gpus: GPUs in the whole cluster.
        gpus_per_node: of the best equipped node.
    """

    namespace: str
    gpus: int
    gpus_per_node: int


@contextlib.contextmanager
def cluster(
    settings: Any,
    *,
    namespace: str,
    cpus: int,
    env: Mapping[str, str],
    forked: bool = False,
    lost: Callable[[str], object] = lambda error: None,
) -> Iterator[Cluster]:
    """Ray for the length of the `with` block.

    Args:
        settings: the `cluster` node of the config.
        namespace: unique to this run.
        cpus: logical CPUs that the run's actors reserve.
        env: environment variables for all actors.
        forked: workers of a local one begin as forks, see `trinity_sync.launch.forks`.
        lost: told why, on another thread, before this program is ended because Ray has given up its node.

    Raises:
        ConfigError: there is no cluster at the address, or none that takes this program; or no folder for a local one.
        RunError: a local one did not start, or this program is connected to one already.
    """
    import ray

    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
    common["job_config"] = ray.job_config.JobConfig()
    common["job_config"]._py_driver_sys_path = ScriptFolder()
    env = {**env, **for_workers(), RAYS_HOOK: _HOOK}
    own: Path | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored_environment())
        # Whoever waits for a call reports its error; Ray would print those of calls that were given up as well.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        stack.enter_context(_ray_logged())
        if settings.address is not None:
            check_unconnected()
            _join(settings.address, runtime_env={"env_vars": env}, **common)
            stack.callback(shut_down, None)
        else:
            own = stack.enter_context(own_ray(settings, cpus, env, forked, common))
        here = ray.get_runtime_context().get_node_id()
        expected = stack.enter_context(raylet_watched(here, ours=own is not None))

        def end(error: str) -> None:
            with contextlib.suppress(Exception):
                in_background(partial(lost, error), "last words").result(_LAST_WORDS_S)
            end_at_once()

        def end_at_once() -> None:
            expected.set()
            give_up(own)

        stack.enter_context(ended_with_its_node(end))
        stack.enter_context(last_words(end_at_once))
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for node in nodes:
            story.info("node %s is %s (%s)", node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
        per_node = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        yield Cluster(namespace=namespace, gpus=sum(per_node), gpus_per_node=max(per_node, default=0))


def has_gpus(address: str) -> bool:
    """Whether a cluster that runs already has GPUs; errors as for `cluster`."""
    import ray

    check_unconnected()
    _join(address, log_to_driver=False, logging_level="ERROR")
    try:
        return bool(ray.cluster_resources().get("GPU", 0) > 0)
    finally:
        shut_down(None)


def _join(address: str, **options: Any) -> None:
    """Connect to a cluster that runs already.

    Raises:
        ConfigError: none does there, or it does not take this program.
    """
    import ray
    from ray.exceptions import AuthenticationError

    _check_reachable(address)
    try:
        with own_sigterm():
            ray.init(address=address, **options)
    except (AuthenticationError, ConnectionError, ValueError, RuntimeError) as error:
        said = f"no Ray cluster answers there ({first_line(error)})"
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error.__cause__):
            said = (
                "Ray there does not take this program's token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to what that cluster was started with"
            )
        raise ConfigError(f"cluster.address={address}: {said}") from error


def _check_reachable(address: str) -> None:
    """Look whether somebody listens at a cluster's address: Ray itself would try for minutes.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like, which Ray looks up at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"cluster.address={address}: nobody answers there ({error})") from error


@contextlib.contextmanager
def _ray_logged() -> Iterator[None]:
    """Log what Ray says of the actors, which it would print: whoever waits for one reports its end, with its name."""
    from ray._private import worker

    def log(said: Mapping[str, Any], ignore_prefix: bool) -> None:
        for line in said["lines"]:
            logger.info("Ray: %s", line)

    before = worker.print_to_stdstream
    worker.print_to_stdstream = log
    try:
        yield
    finally:
        worker.print_to_stdstream = before


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """Take back at the end what was set in the block: Ray leaves settings of its own in its driver. `AUTHENTICATION`
    alone stays.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        before |= {name: os.environ[name] for name in (AUTHENTICATION,) if name in os.environ}
        os.environ.clear()
        os.environ.update(before)
