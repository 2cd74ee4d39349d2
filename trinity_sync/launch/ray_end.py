"""The end of Ray in a program: bounded, whatever of Ray stands still, and none of a local one's processes is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from trinity_sync.host import interrupts
from trinity_sync.launch.forks import forks_session

_END_S = 10.0
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
    stubborn = wait_for_ends(processes, _INTERRUPTED_S if interrupts.interrupted() else _END_S)
    kill_all(stubborn)
    wait_for_ends(stubborn, _END_S)


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
    wait_for_ends(processes, _END_S)


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
