"""A Ray of this program's own: started in a folder of its own, and gone without a trace afterwards.

It ends with its run. Within `ray_kept` it goes on after a run that has ended well, for the next job of a sweep: what
the run has left in it ends, its actors' processes, idle ones too, and what it had reserved.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host import interrupts, process
from trinity_sync.host.interrupts import interruptible, left_to_driver, shielded
from trinity_sync.host.locks import is_own_folder, open_lock, own_name, try_lock
from trinity_sync.host.process import driver_lifeline, environment
from trinity_sync.host.threads import in_background
from trinity_sync.launch import worker_fork
from trinity_sync.launch.node_watch import starting_raylets_watched

logger = logging.getLogger(__name__)

AUTHENTICATION = "RAY_AUTH_MODE"
"""Ray's library sets it where it starts a Ray, and holds on to it for the life of the program: without it, processes of
a later Ray would have no token for a program that asks them for one.
"""

_FOLDER_PREFIX = "trinity-ray"
_LOCK = "owner.lock"
_LIFELINE = "lifeline"
_PREFIX = re.compile(r"^\[[^]]*\] \(\w+\) ")
_PRINTED, _STACK, _CHECK = "--stderr_filepath=", "*** StackTrace", "Check failed: "
_MOST_SAID = 300
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_PORT_MS = 500
"""Ray holds Python's lock while it waits for the port of its GCS."""
_KILLED_S = 5.0
_MOST_DEAD = 2
"""So many of Ray's own processes may die while Ray starts, one try after another: another one would die likewise."""
_LOOK_S = 0.02
_END_S = 20.0
_CLEAR_S = 60.0


@dataclass(frozen=True)
class OwnRay:
    """A Ray that this program has started, and is connected to.

    Attributes:
        folder: of its session.
        wanted: what it was started with: one that is wanted otherwise is another one.
        cpus: that it offers.
        base: its own processes, without workers.
        end: ends it.
    """

    folder: Path
    wanted: Mapping[str, object]
    cpus: int
    base: frozenset[psutil.Process]
    end: Callable[[], None]

    def suits(self, wanted: Mapping[str, object], cpus: int) -> bool:
        """Whether a run that wants this, and so many CPUs, can have it."""
        return self.wanted == wanted and self.cpus >= cpus and self.lives()

    def lives(self) -> bool:
        """Whether this program is connected to it still, and none of its own processes has gone."""
        import ray

        return ray.is_initialized() and all(map(lives, self.base))

    def clear(self) -> bool:
        """End what a run has left in it; whether nothing is left."""
        import ray
        from ray._private.state import state
        from ray._private.worker import global_worker
        from ray._raylet import ActorID, PlacementGroupID
        from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

        job, workers = global_worker.current_job_id, self._workers()  # before an actor's end hides what it had started
        for actor, said in state.actor_table(None, job).items():
            if said["State"] != "DEAD":
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    global_worker.core_worker.kill_actor(ActorID.from_hex(actor), True)
        for group, said in placement_group_table().items():
            if said["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))
        kill_all(wait_for_ends(workers, _KILLED_S))
        deadline = time.monotonic() + _END_S
        while left := self._workers():
            if wait_for_ends(left, _END_S) or time.monotonic() > deadline:
                return False
        while state.workers():  # until Ray has noticed: it would give the next run's work to one that has ended
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return self.lives()

    def _workers(self) -> list[psutil.Process]:
        return [process for process in processes_of(self.folder) if process not in self.base and lives(process)]


@contextlib.contextmanager
def own_ray(
    settings: Any, cpus: int, env: Mapping[str, str], forked: bool, options: Mapping[str, Any]
) -> Iterator[Path]:
    """A Ray for a run, new or kept; the folder of its session. Errors as for `start_ray`.

    Args:
        settings: the `cluster` node of the config.
        cpus: logical CPUs that the run's actors reserve.
        env: environment variables for all actors.
        forked: workers begin as forks, see `trinity_sync.launch.own_ray`.
        options: for `ray.init`.
    """
    wanted = {"settings": str(settings), "env": dict(env), "forked": forked}
    inherited = {name: value for name, value in os.environ.items() if name != AUTHENTICATION}
    wanted |= {"environment": inherited, "folder": Path.cwd()}  # which its processes have
    keeper = _keepers[-1] if _keepers else None
    ray = (keeper.take(wanted, cpus) if keeper else None) or _start_own(settings, cpus, wanted, options)
    try:
        yield ray.folder
        if keeper is not None and _cleared(ray):
            keeper.ray = ray
    finally:
        if keeper is None or keeper.ray is not ray:
            with shielded():
                ray.end()


@contextlib.contextmanager
def ray_kept() -> Iterator[None]:
    """Within the block, a local Ray goes on after a run that has ended well, for one that follows in this program: the
    jobs of a sweep. SIGTERM interrupts, as in a run.
    """
    keeper = _Keeper()
    with interruptible():
        _keepers.append(keeper)
        try:
            yield
        finally:
            _keepers.remove(keeper)
            keeper.end()


@dataclass
class _Keeper:
    """Has the Ray that goes on, if there is one."""

    ray: OwnRay | None = field(default=None)

    def take(self, wanted: Mapping[str, object], cpus: int) -> OwnRay | None:
        """Hand out the one there is. One that does not suit is ended."""
        if self.ray is not None and not self.ray.suits(wanted, cpus):
            self.end()
        taken, self.ray = self.ray, None
        return taken

    def end(self) -> None:
        """End it."""
        kept, self.ray = self.ray, None
        if kept is not None:
            with shielded():
                kept.end()


_keepers: list[_Keeper] = []


def _cleared(ray: OwnRay) -> bool:
    """Whether nothing of a run is left in it. Where Ray does not say so, the run has ended well all the same."""
    try:
        if in_background(ray.clear, "clear").result(_CLEAR_S):
            return True
        logger.info("Ray is not kept for the next run: processes of this one are left, or Ray has lost some")
    except TimeoutError:
        logger.info("Ray is not kept for the next run: it did not end what this one left within %.0f s", _CLEAR_S)
    except Exception as error:
        logger.info("Ray is not kept for the next run: %r", error)
    return False


def _start_own(settings: Any, cpus: int, wanted: Mapping[str, Any], options: Mapping[str, Any]) -> OwnRay:
    # Local workers inherit the driver's environment, which spares Ray a fresh worker pool per runtime environment.
    local = {**wanted["env"], "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    cpus = settings.num_cpus or max(cpus, os.cpu_count() or 1)
    check_unconnected()
    with _ended_on_error() as stack:
        folder = stack.enter_context(_own_folder(settings.temp_dir))
        stack.callback(end_processes, folder)  # where Ray is interrupted before it could end them itself
        released: Callable[[], None] = lambda: None  # noqa: E731
        with contextlib.ExitStack() as starting:
            starting.enter_context(environment(local | stack.enter_context(driver_lifeline(folder / _LIFELINE))))
            starting.enter_context(own_sigterm())
            if wanted["forked"]:
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
                # Processes start when an actor needs them: idle ones would only compete with the imports of the others.
                _system_config={"prestart_worker_first_driver": False},
                **options,
            )
        stack.callback(shut_down, folder, released)
        base = frozenset(processes_of(folder))
        return OwnRay(folder, wanted, cpus, base, stack.pop_all().close)


@contextlib.contextmanager
def _ended_on_error() -> Iterator[contextlib.ExitStack]:
    """A stack that is left, whatever interrupts meanwhile, where the block is left by an error."""
    stack = contextlib.ExitStack()
    try:
        yield stack
    except BaseException:
        with shielded():
            stack.close()
        raise


def start_ray(limit_s: float, **options: Any) -> None:
    """A Ray of one's own through `ray.init`, whatever RAY_ADDRESS says and whoever else's runs on the machine; again
    where it gave up on a busy machine: it allows its own processes 30 seconds, whoever waits. Once more where one of
    these has died.

    Raises:
        RunError: it does not start, for another reason or within `limit_s`, or this program has one already.
    """
    import ray

    check_unconnected()
    deadline, folder = time.monotonic() + limit_s, options.get("_temp_dir")
    dead = 0
    while True:
        try:
            watched = starting_raylets_watched(folder) if folder else contextlib.nullcontext()
            with _lean(), _processes_looked_after(), watched:  # the watch ends before cleanup kills the raylet
                ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            dead += isinstance(error, _DiedError)
            again = dead < _MOST_DEAD if isinstance(error, _DiedError) else "timed out" in str(error)
            if again and time.monotonic() < deadline:
                continue
            raise RunError(f"Ray did not start: {first_line(error)}") from error


class _DiedError(Exception):
    """One of Ray's own processes has died while Ray was starting."""


@contextlib.contextmanager
def _processes_looked_after() -> Iterator[None]:
    """Ray's own processes that are started in the block leave signals to this program. If one of them dies, so does the
    start, for which Ray would wait; what an error leaves of them is ended.

    Raises:
        _DiedError: one has died; says why.
    """
    from ray._private import node, services

    started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    start, gcs_port, own_node = services.start_ray_process, node.wait_for_persisted_port, services.get_node

    def start_process(command: list[str], kind: str, *args: Any, **kwargs: Any) -> Any:
        with left_to_driver():
            info = start(list(map(_with_driver, command)), kind, *args, **kwargs)
        printed = next((text.removeprefix(_PRINTED) for text in command if text.startswith(_PRINTED)), "")
        started.append((kind, info.process, Path(printed)))
        return info

    def look() -> None:
        for kind, running, printed in started:
            if (code := running.poll()) is not None:
                raise _DiedError(f"its {kind} {_end_of(code, printed)}")

    def wait_for_port(*args: Any, timeout_ms: int) -> Any:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return gcs_port(*args, timeout_ms=min(timeout_ms, _PORT_MS))
            except RuntimeError:
                look()
                if time.monotonic() > deadline:
                    raise

    def wait_for_node(*args: Any) -> Any:
        answer = in_background(partial(own_node, *args), "Ray's start")  # half a minute
        while not answer.done():
            look()
            time.sleep(_LOOK_S)
        return answer.result()

    services.start_ray_process = start_process
    node.wait_for_persisted_port, services.get_node = wait_for_port, wait_for_node
    try:
        yield
    except BaseException:
        for _, running, _ in started:
            running.kill()
        for _, running, _ in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(_KILLED_S)
        raise
    finally:
        services.start_ray_process, node.wait_for_persisted_port, services.get_node = start, gcs_port, own_node


def _with_driver(argument: str) -> str:
    """Have Ray's agents, which a raylet starts by a command that it is given, end with this program."""
    name, equals, command = argument.partition("=")
    if name not in _AGENTS:
        return argument
    return f"{name}{equals}{subprocess.list2cmdline([sys.executable, '-IS', str(process.__file__)])} {command}"


def _end_of(code: int, printed: Path) -> str:
    """Say how one of Ray's processes has ended, and what it printed of it: the last line before a stack.

    Args:
        code: exit code, negative for a signal.
    """
    how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
    try:
        lines = printed.read_text(errors="replace").partition(_STACK)[0].strip().splitlines()
    except OSError:
        lines = []
    said = _PREFIX.sub("", lines[-1]).rpartition(_CHECK)[2] if lines else ""
    return f"{how}: {said[:_MOST_SAID]}" if said else how


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


def check_unconnected() -> None:
    """Raise RunError where this program is connected to Ray, but for one that is kept, which is ended."""
    import ray

    for keeper in _keepers:
        keeper.end()
    if ray.is_initialized():
        raise RunError("this program is connected to Ray already, and a run connects itself; call ray.shutdown() first")


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


def first_line(error: BaseException) -> str:
    """What an error says, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Has the workers of a Ray of one's own begin as forks of one process, which imports what they need once for all.


FIRST = ("torch", "torch.distributed.fsdp", "torch.nn.parallel", "transformers", "tensordict", "safetensors.torch")
"""Modules that know nothing of Ray, whose library keeps the settings that it finds when it is loaded."""
LATER = ("trinity_sync.launch.fork_contents",)
_SERVER = Path(__file__).parents[1] / "host" / "fork_server.py"
_SESSION = "forks.session"
_SERVER_END_S = 10.0


@dataclass(frozen=True)
class Forks:
    """A server that runs.

    Attributes:
        env: tells Ray's workers where it is: for the environment in which Ray is started.
        release: tells it that it is not needed any more, and returns at once.
    """

    env: dict[str, str]
    release: Callable[[], None]


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[Forks]:
    """A server for the length of the block.

    Args:
        folder: for its socket and its log; of this user alone.

    Raises:
        RunError: it cannot be started.
    """
    from trinity_sync.actors.calls import ends_noted_in

    path, noted = folder / "forks", folder / "forks.log"
    # the server imports what this program would import, wherever that lies
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
        server.kill()  # it has nothing to tidy up, and may be importing, or stand still
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_SERVER_END_S)


def forks_session(folder: Path) -> int | None:
    """The session in which the server in a folder, and all that it has begun, run; None: there is none."""
    try:
        return int((folder / _SESSION).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def workers_forked() -> Iterator[None]:
    """Have a Ray that is started in the block begin its workers by `forked_worker`: `ray.init` has no switch for it."""
    from ray._private.node import Node

    start: Callable[..., Any] = Node.start_raylet

    def start_raylet(self: Node, *args: Any, **kwargs: Any) -> Any:
        self._ray_params.setup_worker_path = worker_fork.__file__
        return start(self, *args, **kwargs)

    Node.start_raylet = start_raylet
    try:
        yield
    finally:
        Node.start_raylet = start


def _setup_worker() -> str:
    import ray

    return str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")


# The end of Ray in a program: bounded, whatever of Ray stands still, and none of a local one's processes is left.


_PROCESS_END_S = 10.0
_INTERRUPTED_S = 1.0
_SHUTDOWN_S = 30.0
_NOTICE_S = 30.0
"""For Ray to notice that its processes were killed; a GCS that stood still takes it five seconds."""
_KILL_S = 2.0
"""For what is left then of the time after an interrupt."""
_POLL_S = 0.02


def shut_down(folder: Path | None, begin: Callable[[], object] = lambda: None) -> None:
    """End the local Ray whose session is in `folder`, and return when none of its processes is left; or let go of
    somebody else's (None).

    `ray.shutdown` ends Ray's own processes. Workers would then miss them for seconds, and are killed. What an actor had
    started ends when it notices that its parent is gone. What stands still of Ray would keep it for ever: of the local
    one it is killed, and where that is of no use, or it is somebody else's, this program ends.

    Args:
        folder: of the local one.
        begin: called once it is known which processes are to end.
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
    """Those that Ray has started: whose parents this program has started."""
    parents = {}
    for child in processes:
        with contextlib.suppress(psutil.Error):
            parents[child] = child.ppid()
    own = {child.pid for child, parent in parents.items() if parent == os.getpid()}
    return [child for child, parent in parents.items() if parent in own]


@contextlib.contextmanager
def _killed_by_ray() -> Iterator[None]:
    """Have Ray kill its own processes: it would ask them by SIGTERM first, see `interrupts.left_to_driver`."""
    from ray._private.node import Node

    kill = Node.kill_all_processes
    Node.kill_all_processes = lambda self, **kwargs: kill(self, **kwargs | {"allow_graceful": False})
    try:
        yield
    finally:
        Node.kill_all_processes = kill


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are there."""
    for child in processes:
        with contextlib.suppress(psutil.Error):
            child.kill()


def give_up(folder: Path | None) -> None:
    """End the local Ray at once, and remove its folder; nothing where Ray is somebody else's. As far as it gets: Ray
    ends this process when the raylet is gone.
    """
    if folder is None:
        return
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """Kill what is left of the local Ray whose session is in `folder`, and wait until it has gone."""
    processes = processes_of(folder)
    kill_all(reversed(processes))  # the raylet after those that it started
    wait_for_ends(processes, _PROCESS_END_S)


def wait_for_ends(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Wait until processes have ended; those that have not within the limit."""
    deadline = time.monotonic() + limit_s
    while left := [child for child in processes if lives(child)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return left


def lives(child: psutil.Process) -> bool:
    """Whether it still runs. In a container nobody may take note of the end of a process whose parent has gone: it
    stays in the list of processes for good.
    """
    try:
        return bool(child.is_running() and child.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def processes_of(folder: Path) -> list[psutil.Process]:
    """Ray's own processes, which this one started and which name their session's folder, and all of theirs; forks also
    where their server has gone.
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
