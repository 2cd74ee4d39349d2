"""What becomes of a run when Ray's raylet on its node dies, or stands still.

When it dies, Ray ends its driver at the driver's next call into it, on the spot and mostly without a word: so that word
is said as soon as the process is gone. That it stands still Ray notices after about a minute, and declares the node
dead. The driver there is not told: its calls into the raylet never return, and no limit of ours reaches into them.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator

import psutil

_LOOK_S = 0.1
_ASK_S = 5.0
_END_S = 10.0


@contextlib.contextmanager
def raylet_watched(sockets: str, *, starting: bool = False) -> Iterator[None]:
    """Within the block, the death of a raylet of this machine is said on stderr at once.

    Args:
        sockets: with what the path of its socket begins.
        starting: it need not run yet; else nothing is said of one that is not to be seen from here.
    """
    seen = _raylet_at(sockets)
    if seen is None and not starting:
        yield
        return
    asleep, wake = os.pipe()

    def watch() -> None:
        raylet = seen
        while raylet is None:
            if _ready(asleep, limit_s=_LOOK_S):
                return
            raylet = _raylet_at(sockets)
        pid, alive = raylet
        try:
            if alive in _ready(alive, asleep):
                what_then = " while Ray was starting" if starting else "; the run ends, and can be resumed"
                _say(f"Ray's raylet on this node (pid {pid}) has died{what_then}")
        finally:
            os.close(alive)

    thread = threading.Thread(target=watch, name="raylet-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(wake, b"\0")
        thread.join()
        os.close(wake)
        os.close(asleep)


@contextlib.contextmanager
def ended_with_its_node(end: Callable[[], None]) -> Iterator[None]:
    """Within the block, this program ends with exit code 1 once Ray says that its node is dead.

    Args:
        end: called before, on another thread: ends what would outlive this program.
    """
    import ray

    node, over = ray.get_runtime_context().get_node_id(), threading.Event()

    def watch() -> None:
        while not over.wait(_ASK_S):
            try:
                dead = any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes())
            except Exception:  # Ray is ending, or is asked again
                continue
            if dead and not over.is_set():
                _say(
                    "Ray has given up this node: its raylet died, or did not answer for longer than Ray's "
                    "health check allows (RAY_health_check_timeout_ms); the run ends, and can be resumed"
                )
                with contextlib.suppress(Exception):
                    end()
                over.wait(_END_S)  # Ray ends a driver whose raylet has died
                os._exit(1)

    thread = threading.Thread(target=watch, name="node-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_S)


def _raylet_at(sockets: str) -> tuple[int, int] | None:
    """Pid of a raylet, and a descriptor that can be read once it is gone; None where there is none to be seen."""
    for process in psutil.process_iter(["name", "cmdline"]):
        command = process.info["cmdline"] or []
        if process.info["name"] == "raylet" and any(
            argument.startswith(f"--raylet_socket_name={sockets}") for argument in command
        ):
            with contextlib.suppress(OSError):  # it is gone, or this kernel knows no such descriptors
                return process.pid, os.pidfd_open(process.pid)
    return None


def _ready(*descriptors: int, limit_s: float | None = None) -> set[int]:
    """Wait until one of the descriptors can be read, for ever or so long; those that can."""
    wait = select.poll()
    for descriptor in descriptors:
        wait.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in wait.poll(None if limit_s is None else limit_s * 1000)}


def _say(error: str) -> None:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
