"""A run whose node Ray has given up ends, as one does whose raylet died.

Ray notices that a raylet stands still, after about a minute, and declares its node dead. The driver on that node is not
told: its calls into the raylet never return, and no limit of ours reaches into them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

_ASK_S = 5.0
_END_S = 10.0


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
                sys.stderr.write(
                    "error: Ray has given up this node: its raylet died, or did not answer for longer than Ray's "
                    "health check allows (RAY_health_check_timeout_ms); the run ends, and can be resumed\n"
                )
                sys.stderr.flush()
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
