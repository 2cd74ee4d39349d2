"""Ray's life in a run: started or joined, and gone without a trace afterwards.

`cluster=local` starts a Ray of the run's own in a folder of its own; `cluster=existing` joins one by address. Either
way the run's actors live in a namespace that no other run shares, and end with the driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.locks import is_own_folder, open_lock, own_name, try_lock
from trinity_sync.host.threads import in_background
from trinity_sync.launch.node_watch import ended_with_its_node, raylet_watched, starting_raylets_watched
from trinity_sync.launch.ray_end import give_up, shut_down

_FOLDER_PREFIX = "trinity-ray"
_LOCK = "owner.lock"
_CONNECT_S = 10.0
_LAST_WORDS_S = 10.0


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
    lost: Callable[[str], object] = lambda error: None,
) -> Iterator[Cluster]:
    """Ray for the length of the `with` block.

    Args:
        settings: the `cluster` node of the config.
        namespace: unique to this run.
        cpus: logical CPUs that the run's actors reserve.
        env: environment variables for all actors.
        lost: told why, on another thread, before this program is ended because Ray has given up its node.

    Raises:
        ConfigError: there is no cluster at the address, or none that takes this program; or no folder for a local one.
        RunError: a local one did not start, or this program is connected to one already.
    """
    import ray

    _check_unconnected()
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
    own: Path | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored_environment())
        # Whoever waits for a call reports its error; Ray would print those of calls that were given up as well.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        if settings.address is not None:
            _join(settings.address, runtime_env={"env_vars": dict(env)}, **common)
            stack.callback(shut_down, None)
        else:
            folder = stack.enter_context(_own_folder(settings.temp_dir))
            # Local workers inherit the driver's environment, which spares Ray a fresh worker pool per runtime
            # environment.
            local = {**env, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
            with _environment(local), own_sigterm():
                start_ray(
                    settings.start_timeout_s,
                    num_cpus=settings.num_cpus or max(cpus, os.cpu_count() or 1),
                    include_dashboard=False,
                    object_store_memory=settings.object_store_mb * 2**20,
                    _temp_dir=str(folder),
                    # Processes start when an actor needs them: idle ones would only compete with the imports of
                    # the others.
                    _system_config={"prestart_worker_first_driver": False},
                    **common,
                )
            stack.callback(shut_down, folder)
            own = folder
        here = ray.get_runtime_context().get_node_id()
        expected = stack.enter_context(raylet_watched(here, ours=own is not None))

        def end(error: str) -> None:
            with contextlib.suppress(Exception):
                in_background(partial(lost, error), "last words").result(_LAST_WORDS_S)
            expected.set()
            give_up(own)

        stack.enter_context(ended_with_its_node(end))
        per_node = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        yield Cluster(namespace=namespace, gpus=sum(per_node), gpus_per_node=max(per_node, default=0))


def start_ray(limit_s: float, **options: Any) -> None:
    """A Ray of one's own through `ray.init`, whatever RAY_ADDRESS says and whoever else's runs on the machine; again
    where it gave up on a busy machine: it allows its own processes 30 seconds, whoever waits.

    Raises:
        RunError: it does not start, for another reason or within `limit_s`, or this program has one already.
    """
    import ray

    _check_unconnected()
    deadline, folder = time.monotonic() + limit_s, options.get("_temp_dir")
    while True:
        try:
            with _lean(), starting_raylets_watched(folder) if folder else contextlib.nullcontext():
                ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            if "timed out" in str(error) and time.monotonic() < deadline:
                continue
            raise RunError(f"Ray did not start: {_first_line(error)}") from error


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Ray's node without its dashboard, autoscaler and log forwarder: a run uses none of them, and each is a Python
    process that takes seconds of a small machine's start. `ray.init` has no switches for them.
    """
    from ray._private.node import Node

    names = ("start_api_server", "start_monitor", "start_log_monitor")
    before = {name: vars(Node)[name] for name in names if name in vars(Node)}  # another Ray may name them otherwise
    for name in before:
        setattr(Node, name, lambda self, *args, **kwargs: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _check_unconnected() -> None:
    import ray

    if ray.is_initialized():
        raise RunError("this program is connected to Ray already, and a run connects itself; call ray.shutdown() first")


def has_gpus(address: str) -> bool:
    """Whether a cluster that runs already has GPUs; errors as for `cluster`."""
    import ray

    _check_unconnected()
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
        said = f"no Ray cluster answers there ({_first_line(error)})"
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
def _own_folder(parent: str | None) -> Iterator[Path]:
    """A folder for Ray's session, locked while it is used. Nobody but this user may look into it. Folders that a killed
    run of theirs left behind are removed first.
    """
    root, prefix = Path(parent or tempfile.gettempdir()).absolute(), own_name(_FOLDER_PREFIX) + "-"
    for old in filter(is_own_folder, root.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            lock = open_lock(old / _LOCK)
            try:
                if try_lock(lock):
                    shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder, held = _locked_folder(root, prefix)
    except OSError as error:
        raise ConfigError(
            f"cluster.temp_dir={root}: no folder can be made there ({error.strerror}); name one that can be written"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _locked_folder(root: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and its lock, which is held. Until it is, another run may take the folder for one left behind."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with contextlib.suppress(FileNotFoundError):
            lock = open_lock(folder / _LOCK)
            if try_lock(lock) and (folder / _LOCK).exists():
                return folder, lock
            os.close(lock)


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep the driver's handler of SIGTERM: `ray.init` replaces it by one that ends the process on the spot. One that
    comes meanwhile interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        if end.code == signal.SIGTERM:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Values for the length of the block; what others set in it meanwhile stays."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """Take back at the end whatever was set in the block: Ray leaves settings of its own in its driver."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
