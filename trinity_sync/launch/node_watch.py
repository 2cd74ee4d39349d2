"""Watches Ray's raylet and GCS during a run, and ends the run with an error when one of them dies or hangs. A dead
raylet makes Ray end its driver at the next call, mostly without a message, so the message is printed as soon as the
process dies. Ray declares a node with a hung raylet dead after about a minute, but does not tell the driver there,
whose calls never return. Calls into a hung GCS may not return either.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from trinity_sync.host.threads import in_background

_LOOK_S = 0.1
_ASK_S = 5.0
_SILENT = 12
"""Unanswered looks (every `_ASK_S`) until the GCS counts as dead. A count, so that a driver that was stopped itself
goes on asking.
"""
_END_S = 10.0


@contextlib.contextmanager
def starting_raylets_watched(folder: str) -> Iterator[None]:
    """While Ray starts in the block, report the death of its raylet on stderr. `folder` holds Ray's sessions."""
    earlier = set(_raylets(folder))  # of an earlier try

    def look() -> int | None:
        return next((pid for pid in _raylets(folder) if pid not in earlier), None)

    with _watched(look, "while Ray was starting"):
        yield


@contextlib.contextmanager
def raylet_watched(node: str, *, ours: bool) -> Iterator[threading.Event]:
    """Within the block, report the death of this node's raylet on stderr. Yields an event to set before the raylet is
    ended on purpose.
    """
    pid = next(iter(_raylets(f"--node_id={node}")), None)
    if pid is None and ours:
        _say("Ray's raylet on this node has died; the run ends, and can be resumed")
    with _watched(lambda: pid, "and the run ends; it can be resumed") if pid else _unwatched() as expected:
        yield expected


@contextlib.contextmanager
def _watched(look: Callable[[], int | None], what_then: str) -> Iterator[threading.Event]:
    """Report the death of a raylet. Yields an event to set if its death is expected."""
    expected = threading.Event()
    if not hasattr(os, "pidfd_open"):  # an old kernel: a death is noticed like a hang, by `ended_with_its_node`
        yield expected
        return
    asleep, wake = os.pipe()

    def watch() -> None:
        while (pid := look()) is None:
            if _ready(asleep, limit_s=_LOOK_S):
                return
        if _has_died(pid, asleep) and not expected.is_set():
            _say(f"Ray's raylet on this node (pid {pid}) has died {what_then}")

    thread = threading.Thread(target=watch, name="raylet-watch", daemon=True)
    thread.start()
    try:
        yield expected
    finally:
        os.write(wake, b"\0")
        thread.join(_END_S)
        if not thread.is_alive():
            os.close(wake)
            os.close(asleep)


@contextlib.contextmanager
def _unwatched() -> Iterator[threading.Event]:
    yield threading.Event()


@contextlib.contextmanager
def ended_with_its_node(end: Callable[[str], None]) -> Iterator[None]:
    """Within the block, exit this program with code 1 once Ray declares its node dead, or its GCS no longer answers.
    `end`: called before the exit, on another thread, with the error: keeps the record, ends processes.
    """
    import ray

    node, over = ray.get_runtime_context().get_node_id(), threading.Event()

    def watch() -> None:
        asked, silent = in_background(ray.nodes, "nodes"), 0
        while not over.wait(_ASK_S):
            silent = 0 if asked.done() else silent + 1
            if (error := _problem(asked, node, silent)) and not over.is_set():
                _say(error)
                with contextlib.suppress(Exception):
                    end(error)
                over.wait(_END_S)  # Ray ends a driver whose raylet has died
                os._exit(1)
            if asked.done():
                asked = in_background(ray.nodes, "nodes")
        with contextlib.suppress(TimeoutError):
            asked.exception(_END_S)  # Ray must not end during the call

    thread = threading.Thread(target=watch, name="node-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _END_S)


def _problem(asked: Future[list[dict[str, object]]], node: str, silent: int) -> str | None:
    """Return the error for a request for all nodes that has been open for `silent` looks, if there is one."""
    if silent >= _SILENT:
        return f"Ray's GCS has not answered for {silent * _ASK_S:g} s; the run ends, and can be resumed"
    # a failed request is repeated, or Ray is ending
    if asked.done() and not asked.exception() and any(o["NodeID"] == node and not o["Alive"] for o in asked.result()):
        return (
            "Ray has given up this node: its raylet died, or did not answer for longer than Ray's "
            "health check allows (RAY_health_check_timeout_ms); the run ends, and can be resumed"
        )
    return None


def _raylets(text: str) -> list[int]:
    """Return the pids of this machine's raylets whose command line has the text. Other command lines are not read: that
    can hang if their process hangs in its file system.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text() == "raylet\n" and text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def _has_died(pid: int, stop: int) -> bool:
    """Wait for the end of a process, or until `stop` is readable; return whether it has ended."""
    try:
        alive = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # the kernel has no process descriptors
        return False
    try:
        return alive in _ready(alive, stop)
    finally:
        os.close(alive)


def _ready(*descriptors: int, limit_s: float | None = None) -> set[int]:
    """Wait until one of the descriptors is readable, at most `limit_s`; return the readable ones."""
    wait = select.poll()
    for descriptor in descriptors:
        wait.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in wait.poll(None if limit_s is None else limit_s * 1000)}


def _say(error: str) -> None:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
