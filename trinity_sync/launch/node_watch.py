"""What becomes of a run when Ray's raylet on its node dies, or stands still, or Ray's GCS does.

When the raylet dies, Ray ends its driver at the driver's next call into it, on the spot and mostly without a word: so
that word is said as soon as the process is gone. That it stands still Ray notices after about a minute, and declares
the node dead. The driver there is not told: its calls into the raylet never return, and no limit of ours reaches into
them. Nor do some of the calls into a GCS that stands still, and nobody notices that but who asks it.
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
"""So many times `_ASK_S` the GCS may take for an answer. Counted, so that a driver that was stopped itself asks on."""
_END_S = 10.0


@contextlib.contextmanager
def starting_raylets_watched(folder: str) -> Iterator[None]:
    """Within the block, in which Ray is started, the death of its raylet is said on stderr at once.

    Args:
        folder: of Ray's sessions, and of nobody else's.
    """
    earlier = set(_raylets(folder))  # of a try before, which is being given up

    def look() -> int | None:
        return next((pid for pid in _raylets(folder) if pid not in earlier), None)

    with _watched(look, "while Ray was starting"):
        yield


@contextlib.contextmanager
def raylet_watched(node: str, *, ours: bool) -> Iterator[threading.Event]:
    """Within the block, the death of this node's raylet is said on stderr at once.

    Args:
        node: Ray's id of it.
        ours: this program has started it: if it is not there, it has died. Else it may be out of sight.

    Yields:
        To be set where it is ended on purpose.
    """
    pid = next(iter(_raylets(f"--node_id={node}")), None)
    if pid is None and ours:
        _say("Ray's raylet on this node has died; the run ends, and can be resumed")
    with _watched(lambda: pid, "and the run ends; it can be resumed") if pid else _unwatched() as expected:
        yield expected


@contextlib.contextmanager
def _watched(look: Callable[[], int | None], what_then: str) -> Iterator[threading.Event]:
    """Say that a raylet has died.

    Args:
        look: gives its pid once it runs.

    Yields:
        To be set where that is expected.
    """
    expected = threading.Event()
    if not hasattr(os, "pidfd_open"):  # of an old kernel's Python: its death is noticed like its standing still
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
    """Within the block, this program ends with exit code 1 once Ray says that its node is dead, or says nothing more.

    Args:
        end: called before with the error, on another thread: keeps what is known, ends what would outlive this program.
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
            asked.exception(_END_S)  # Ray is not to end meanwhile

    thread = threading.Thread(target=watch, name="node-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _END_S)


def _problem(asked: Future[list[dict[str, object]]], node: str, silent: int) -> str | None:
    """What there is to say of a question for all nodes that has been waiting for so many looks; None: nothing."""
    if silent >= _SILENT:
        return f"Ray's GCS has not answered for {silent * _ASK_S:g} s; the run ends, and can be resumed"
    # it may have failed: Ray is ending, or is asked again
    if asked.done() and not asked.exception() and any(o["NodeID"] == node and not o["Alive"] for o in asked.result()):
        return (
            "Ray has given up this node: its raylet died, or did not answer for longer than Ray's "
            "health check allows (RAY_health_check_timeout_ms); the run ends, and can be resumed"
        )
    return None


def _raylets(text: str) -> list[int]:
    """Pids of the raylets of this machine whose command names the text. No other process's command is looked at, which
    may take for ever where that process hangs in its file system.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text() == "raylet\n" and text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def _has_died(pid: int, stop: int) -> bool:
    """Wait for the end of a process, or until `stop` can be read; whether it has ended."""
    try:
        alive = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # this kernel knows no such descriptors
        return False
    try:
        return alive in _ready(alive, stop)
    finally:
        os.close(alive)


def _ready(*descriptors: int, limit_s: float | None = None) -> set[int]:
    """Wait until one of the descriptors can be read, for ever or so long; those that can."""
    wait = select.poll()
    for descriptor in descriptors:
        wait.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in wait.poll(None if limit_s is None else limit_s * 1000)}


def _say(error: str) -> None:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
