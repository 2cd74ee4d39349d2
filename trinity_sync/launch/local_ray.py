"""Starts and ends a local Ray in a folder of its own; no process of it is left afterwards. A sweep keeps Ray for its
next job (`ray_kept`) once all processes and reservations of the last run are gone. `cluster` calls this module.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from trinity_sync.config.schema import ClusterConfig
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host import interrupts, process
from trinity_sync.host.interrupts import interruptible, left_to_driver, shielded
from trinity_sync.host.locks import is_own_folder, open_lock, own_name, try_lock
from trinity_sync.host.process import driver_lifeline, environment, replaced
from trinity_sync.host.threads import comes_true, in_background
from trinity_sync.launch import worker_fork
from trinity_sync.launch.node_watch import starting_raylets_watched

logger = logging.getLogger(__name__)

AUTHENTICATION = "RAY_AUTH_MODE"
"""Ray's library sets this variable when it starts a Ray, and caches it for the life of the program. Processes of a
later Ray need it to have a token.
"""

SYSTEM_CONFIG = {"prestart_worker_first_driver": False, "task_events_report_interval_ms": 0}
"""No idle workers: they would compete with the imports of the others. No record of every call, which nothing reads."""

_FOLDER_PREFIX = "trinity-ray"
_LOCK = "owner.lock"
_LIFELINE = "lifeline"
_PREFIX = re.compile(r"^\[[^]]*\] \(\w+\) ")
_PRINTED, _STACK, _CHECK = "--stderr_filepath=", "*** StackTrace", "Check failed: "
_MOST_SAID = 300
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_PORT_MS = 500
"""Short, because Ray holds the GIL while it waits for the port of its GCS."""
_KILLED_S = 5.0
_MOST_DEAD = 2
"""Tries, if one of Ray's own processes dies while Ray starts."""
_LOOK_S = 0.02
_END_S = 20.0
_CLEAR_S = 60.0


@dataclass(frozen=True)
class _RayRequest:
    """Everything that decides whether a kept Ray suits a run, except CPUs."""

    settings: ClusterConfig
    env: Mapping[str, str]
    forked: bool
    inherited: Mapping[str, str]  # environment of Ray's processes
    folder: Path  # their working directory


@dataclass(frozen=True)
class LocalRay:
    """A local Ray that this program has started and is connected to."""

    folder: Path  # of its session
    request: _RayRequest  # what it was started for
    cpus: int  # logical CPUs that it offers
    base: frozenset[psutil.Process]  # Ray's own processes, without workers
    end: Callable[[], None]  # ends it

    def suits(self, request: _RayRequest, cpus: int) -> bool:
        """Return whether a run with these settings and this need of CPUs can use it."""
        return self.request == request and self.cpus >= cpus and self.lives()

    def lives(self) -> bool:
        """Return whether this program is still connected and all of Ray's own processes run."""
        import ray

        return ray.is_initialized() and all(map(lives, self.base))

    def clear(self, spared: Collection[int] = ()) -> bool:
        """End everything that a run has left in it; return whether nothing is left and Ray works. `spared`: pids of
        actors that live on, with their child processes.
        """
        if not self.lives():
            return False
        import ray
        from ray._private.state import state
        from ray._private.worker import global_worker
        from ray._raylet import ActorID, PlacementGroupID
        from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

        workers = self._workers(spared)  # first: an ended actor hides its child processes
        job = global_worker.current_job_id
        for actor, said in state.actor_table(None, job).items():
            if said["State"] != "DEAD" and said["Pid"] not in spared:
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    global_worker.core_worker.kill_actor(ActorID.from_hex(actor), True)
        for group, said in placement_group_table().items():
            if said["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))
        kill_all(wait_for_ends(workers, _KILLED_S))
        deadline = time.monotonic() + _END_S
        while left := self._workers(spared):
            if wait_for_ends(left, _END_S) or time.monotonic() > deadline:
                return False
        while len(state.workers()) > len(spared):  # until Ray has noticed: it would give work to an ended worker
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return self.lives()

    def _workers(self, spared: Collection[int]) -> list[psutil.Process]:
        found, stay = processes_of(self.folder), set(self.base)  # in this order: spared ones may start children
        for pid in spared:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(pid)
                stay |= {parent, *parent.children(recursive=True)}
        return [process for process in found if process not in stay and lives(process)]


@contextlib.contextmanager
def local_ray(
    settings: ClusterConfig, cpus: int, env: Mapping[str, str], forked: bool, options: Mapping[str, object]
) -> Iterator[Path]:
    """Give a run a new or a kept Ray, and yield its session's folder. Errors as for `start_ray`."""
    inherited = {name: value for name, value in os.environ.items() if name != AUTHENTICATION}
    request = _RayRequest(settings, dict(env), forked, inherited, Path.cwd())
    keeper = _keepers[-1] if _keepers else None
    ray = (keeper.take(request, cpus) if keeper else None) or _start_local(request, cpus, options)

    def keep(error: Exception | None) -> None:
        if keeper is not None and keeper.after(error) and _cleared(ray, keeper.spared()):
            keeper.ray = ray

    try:
        try:
            yield ray.folder
        except Exception as error:
            keep(error)
            raise
        keep(None)
    finally:
        if keeper is None or keeper.ray is not ray:
            with shielded():
                try:
                    if keeper is not None:
                        keeper.ends()
                finally:
                    ray.end()


@contextlib.contextmanager
def ray_kept(
    after: Callable[[Exception | None], bool] = lambda error: error is None,
    spared: Callable[[], Collection[int]] = tuple,
    ends: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Keep the local Ray after a run for the next run of this program: the next job of a sweep, or the next attempt.
    `after`: tells by the error of a run, None if it has succeeded, whether there is a next one; in an outer block, one
    of both has to. `spared`: returns the pids of actors that live on, see `LocalRay.clear`. `ends`: called before
    Ray ends. SIGTERM interrupts, as in a run.
    """
    if _keepers:
        outer = _keepers[-1].after
        with replaced(_keepers[-1], after=lambda error: outer(error) or after(error), spared=spared, ends=ends):
            yield
        return
    keeper = _Keeper(after, spared, ends)
    with interruptible():
        _keepers.append(keeper)
        try:
            yield
        finally:
            _keepers.remove(keeper)
            keeper.end()


@dataclass
class _Keeper:
    """Holds the kept Ray, if there is one."""

    after: Callable[[Exception | None], bool]
    spared: Callable[[], Collection[int]]
    ends: Callable[[], None]
    ray: LocalRay | None = field(default=None)

    def take(self, request: _RayRequest, cpus: int) -> LocalRay | None:
        """Return the kept Ray; end it if it does not suit."""
        if self.ray is not None and not self.ray.suits(request, cpus):
            self.end()
        taken, self.ray = self.ray, None
        return taken

    def end(self) -> None:
        kept, self.ray = self.ray, None
        if kept is not None:
            with shielded():
                try:
                    self.ends()
                finally:
                    kept.end()


_keepers: list[_Keeper] = []


def _cleared(ray: LocalRay, spared: Collection[int]) -> bool:
    """Return whether nothing of a run is left in Ray. Errors are logged: the run itself has succeeded."""
    try:
        if in_background(partial(ray.clear, spared), "clear").result(_CLEAR_S):
            return True
        logger.info("Ray is not kept for the next run: processes of this one are left, or Ray has lost some")
    except TimeoutError:
        logger.info("Ray is not kept for the next run: it did not end what this one left within %.0f s", _CLEAR_S)
    except Exception as error:
        logger.info("Ray is not kept for the next run: %r", error)
    return False


def _start_local(request: _RayRequest, cpus: int, options: Mapping[str, object]) -> LocalRay:
    settings = request.settings
    # Local workers inherit the driver's environment, which spares Ray a fresh worker pool per runtime environment.
    local = {**request.env, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    cpus = settings.num_cpus or max(cpus, os.cpu_count() or 1)
    check_unconnected()
    with _ended_on_error() as stack:
        folder = stack.enter_context(_own_folder(settings.temp_dir))
        stack.callback(end_processes, folder)  # in case Ray is interrupted before it ends them
        released: Callable[[], None] = lambda: None  # noqa: E731
        with contextlib.ExitStack() as starting:
            starting.enter_context(environment(local | stack.enter_context(driver_lifeline(folder / _LIFELINE))))
            starting.enter_context(own_sigterm())
            if request.forked:
                forks = stack.enter_context(fork_server(folder))
                starting.enter_context(workers_forked())
                starting.enter_context(environment(forks.env))
                released = forks.release
            start_ray(
                settings.start_timeout_s,
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=settings.object_store_mb * 2**20,
                _temp_dir=str(folder),
                _system_config=dict(SYSTEM_CONFIG),  # Ray adds places of its session to it
                **options,
            )
        stack.callback(shut_down, folder, released)
        base = frozenset(processes_of(folder))
        return LocalRay(folder, request, cpus, base, stack.pop_all().close)


@contextlib.contextmanager
def _ended_on_error() -> Iterator[contextlib.ExitStack]:
    """Yield a stack that is closed if the block raises, even if another interrupt arrives."""
    stack = contextlib.ExitStack()
    try:
        yield stack
    except BaseException:
        with shielded():
            stack.close()
        raise


def start_ray(limit_s: float, **options: object) -> None:
    """Start a Ray by `ray.init`, whatever RAY_ADDRESS says. Retry on a busy machine, where Ray gives its own processes
    only 30 seconds, and once if one of them dies.
    """
    import ray

    check_unconnected()
    deadline, folder = time.monotonic() + limit_s, options.get("_temp_dir")
    dead = 0
    while True:
        try:
            watched = starting_raylets_watched(str(folder)) if folder else contextlib.nullcontext()
            with _lean(), _processes_looked_after(), watched:  # the watch ends before cleanup kills the raylet
                ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            dead += isinstance(error, _RayDeathError)
            again = dead < _MOST_DEAD if isinstance(error, _RayDeathError) else "timed out" in str(error)
            if again and time.monotonic() < deadline:
                continue
            raise RunError(f"Ray did not start: {first_line(error)}") from error


class _RayDeathError(Exception):
    """One of Ray's own processes has died while Ray was starting."""


@contextlib.contextmanager
def _processes_looked_after() -> Iterator[None]:
    """Within the block, shield Ray's own processes from this program's signals, and fail the start as soon as one of
    them dies, for which Ray would wait. An error kills all of them. Raises _RayDeathError: with the reason.
    """
    from ray._private import node, services

    started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    start, gcs_port, own_node = services.start_ray_process, node.wait_for_persisted_port, services.get_node

    def start_process(command: list[str], kind: str, *args: object, **kwargs: object) -> object:
        with left_to_driver():
            info = start(list(map(_with_driver, command)), kind, *args, **kwargs)
        printed = next((text.removeprefix(_PRINTED) for text in command if text.startswith(_PRINTED)), "")
        started.append((kind, info.process, Path(printed)))
        return info

    def look() -> None:
        for kind, running, printed in started:
            if (code := running.poll()) is not None:
                raise _RayDeathError(f"its {kind} {_end_of(code, printed)}")

    def wait_for_port(*args: object, timeout_ms: int) -> object:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return gcs_port(*args, timeout_ms=min(timeout_ms, _PORT_MS))
            except RuntimeError:
                look()
                if time.monotonic() > deadline:
                    raise

    def wait_for_node(*args: object) -> object:
        answer = in_background(partial(own_node, *args), "Ray's start")  # Ray waits half a minute
        while not answer.done():
            look()
            time.sleep(_LOOK_S)
        return answer.result()

    try:
        with (
            replaced(services, start_ray_process=start_process, get_node=wait_for_node),
            replaced(node, wait_for_persisted_port=wait_for_port),
        ):
            yield
    except BaseException:
        for _, running, _ in started:
            running.kill()
        for _, running, _ in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(_KILLED_S)
        raise


def _with_driver(argument: str) -> str:
    """Make Ray's agents, which a raylet starts, end together with this program."""
    name, equals, command = argument.partition("=")
    if name not in _AGENTS:
        return argument
    return f"{name}{equals}{subprocess.list2cmdline([sys.executable, '-IS', str(process.__file__)])} {command}"


def _end_of(code: int, printed: Path) -> str:
    """Say how one of Ray's processes has ended, with the last line that it printed before a stack trace."""
    how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
    try:
        lines = printed.read_text(errors="replace").partition(_STACK)[0].strip().splitlines()
    except OSError:
        lines = []
    said = _PREFIX.sub("", lines[-1]).rpartition(_CHECK)[2] if lines else ""
    return f"{how}: {said[:_MOST_SAID]}" if said else how


def _lean() -> contextlib.AbstractContextManager[None]:
    """Start Ray's node without dashboard, autoscaler and log forwarder: a run uses none of them, and each takes seconds
    of a small machine's start. `ray.init` has no switches for them.
    """
    from ray._private.node import Node

    names = ("start_api_server", "start_monitor", "start_log_monitor")
    there = [name for name in names if name in vars(Node)]  # other versions of Ray may lack one
    return replaced(Node, **dict.fromkeys(there, lambda self, *args, **kwargs: None))


def check_unconnected() -> None:
    """Raise RunError if this program is connected to a Ray. A kept one is ended first."""
    import ray

    for keeper in _keepers:
        keeper.end()
    if ray.is_initialized():
        raise RunError("this program is connected to Ray already, and a run connects itself; call ray.shutdown() first")


@contextlib.contextmanager
def _own_folder(parent: str | None) -> Iterator[Path]:
    """Make a private, locked folder for Ray's session. First remove the folders that killed runs of this user left
    behind.
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
    """Make a folder and take its lock. Until then another run may take the folder for a leftover."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with contextlib.suppress(FileNotFoundError):
            lock = open_lock(folder / _LOCK)
            if try_lock(lock) and (folder / _LOCK).exists():
                return folder, lock
            os.close(lock)


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep the driver's SIGTERM handler, which `ray.init` replaces by one that ends the process. A SIGTERM within the
    block interrupts.
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- workers as forks of one process, which imports their modules once


FIRST = ("torch", "torch.distributed.fsdp", "torch.nn.parallel", "transformers", "tensordict", "safetensors.torch")
"""Modules to import before Ray's library, which reads its settings when it is imported."""
LATER = ("trinity_sync.launch.fork_contents",)
_SERVER = Path(__file__).parents[1] / "host" / "fork_server.py"
_SESSION = "forks.session"
_SERVER_END_S = 10.0


@dataclass(frozen=True)
class Forks:
    """A running fork server: the variables that point Ray's workers to it, and the call that releases it without
    waiting.
    """

    env: dict[str, str]
    release: Callable[[], None]


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[Forks]:
    """Run a fork server within the block."""
    from trinity_sync.actors.calls import ends_noted_in

    path, noted = folder / "forks", folder / "forks.log"
    # the server has this program's module search path
    command = [sys.executable, str(_SERVER), str(path), ",".join(FIRST), ",".join(LATER), json.dumps(sys.path)]
    try:
        with noted.open("wb") as log, left_to_driver():
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        (folder / _SESSION).write_text(str(server.pid))
    except OSError as error:
        raise RunError(f"Ray did not start: no process in {folder} for its workers to begin from ({error})") from error
    assert server.stdin is not None
    try:
        with ends_noted_in(noted):
            yield Forks({worker_fork.SOCKET: str(path), worker_fork.SETUP: _setup_worker()}, server.stdin.close)
    finally:
        server.stdin.close()
        server.kill()  # it has nothing to clean up, and may hang
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_SERVER_END_S)


def forks_session(folder: Path) -> int | None:
    """Return the session id of a folder's fork server and its forks, if there is one."""
    try:
        return int((folder / _SESSION).read_text())
    except (OSError, ValueError):
        return None


def workers_forked() -> contextlib.AbstractContextManager[None]:
    """Within the block, make Ray start its workers by `worker_fork`; `ray.init` has no switch for it."""
    from ray._private.node import Node

    start: Callable[..., object] = Node.start_raylet

    def start_raylet(self: Node, *args: object, **kwargs: object) -> object:
        self._ray_params.setup_worker_path = worker_fork.__file__
        return start(self, *args, **kwargs)

    return replaced(Node, start_raylet=start_raylet)


def _setup_worker() -> str:
    import ray

    return str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")


# -- the end of Ray, with a timeout even if Ray hangs


_PROCESS_END_S = 10.0
_INTERRUPTED_S = 1.0
_SHUTDOWN_S = 30.0
_NOTICE_S = 30.0
"""Time for Ray to notice that its processes were killed; a stopped GCS takes five seconds."""
_KILL_S = 2.0
"""Share of the time after an interrupt that is reserved for the kill."""
_POLL_S = 0.02


def shut_down(folder: Path | None, begin: Callable[[], object] = lambda: None) -> None:
    """End the local Ray whose session is in `folder` and wait for all its processes; or disconnect from an existing
    cluster (None).
    `ray.shutdown` ends Ray's own processes. Workers would take seconds to notice, so they are killed; processes that an
    actor has started end when they miss their parent. If Ray hangs, its local processes are killed; if that does not
    help, this program exits.
    """
    import ray

    processes = processes_of(folder) if folder is not None else []
    workers = _workers(processes)
    begin()
    over, began = threading.Event(), time.monotonic()

    def watch() -> None:
        if interrupts.wait_until(over.wait, _SHUTDOWN_S, _KILL_S):
            return
        kill_all(processes)
        if not over.wait(_NOTICE_S if folder is not None else 0.0):
            sys.stderr.write(
                f"error: Ray did not let this program go within {time.monotonic() - began:.0f} s; it ends\n"
            )
            sys.stderr.flush()
            os._exit(1)

    threading.Thread(target=watch, name="ray-end", daemon=True).start()
    try:
        with _killed_by_ray():
            ray.shutdown()
    finally:
        over.set()
    kill_all(workers)
    stubborn = wait_for_ends(processes, _INTERRUPTED_S if interrupts.interrupted() else _PROCESS_END_S)
    kill_all(stubborn)
    wait_for_ends(stubborn, _PROCESS_END_S)


def _workers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the workers: processes whose parents this program has started."""
    parents = {}
    for child in processes:
        with contextlib.suppress(psutil.Error):
            parents[child] = child.ppid()
    own = {child.pid for child, parent in parents.items() if parent == os.getpid()}
    return [child for child, parent in parents.items() if parent in own]


def _killed_by_ray() -> contextlib.AbstractContextManager[None]:
    """Make Ray kill its own processes: they ignore SIGTERM, see `interrupts.left_to_driver`."""
    from ray._private.node import Node

    kill = Node.kill_all_processes
    return replaced(Node, kill_all_processes=lambda self, **kwargs: kill(self, **kwargs | {"allow_graceful": False}))


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill all processes that still exist."""
    for child in processes:
        with contextlib.suppress(psutil.Error):
            child.kill()


def give_up(folder: Path | None) -> None:
    """End the local Ray at once and remove its folder; do nothing for an existing cluster (None). May not finish: Ray
    ends this process when the raylet is gone.
    """
    if folder is None:
        return
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """Kill all processes of the local Ray whose session is in `folder`, and wait for their end."""
    processes = processes_of(folder)
    kill_all(reversed(processes))  # the raylet after those that it started
    wait_for_ends(processes, _PROCESS_END_S)


def wait_for_ends(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Wait until processes have ended; return those that still live after the limit."""
    comes_true(lambda: not any(map(lives, processes)), limit_s, _POLL_S)
    return [child for child in processes if lives(child)]


def lives(child: psutil.Process) -> bool:
    """Return whether a process runs. Zombies do not count: in a container no parent may ever collect them."""
    try:
        return bool(child.is_running() and child.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return Ray's own processes (children of this one that name their session's folder), their descendants, and forks
    whose server has died.
    """
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in argument for argument in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    if (session := forks_session(folder)) is not None:
        known = {child.pid for child in found}
        found += [child for child in _in_session(session) if child.pid not in known]
    return found


def _in_session(session: int) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(pid) == session:
                yield psutil.Process(pid)
