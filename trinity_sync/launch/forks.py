"""Has the workers of a Ray of one's own begin as forks of one process, which imports what they need once for all.

A run has half a dozen processes, and importing torch, transformers and verl takes each of them seconds of a core. On
GPUs they start as Ray has them: what is imported there may have spoken to the GPU, and a fork cannot then.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_sync.errors import RunError
from trinity_sync.host.interrupts import left_to_driver
from trinity_sync.launch import forked_worker

FIRST = ("torch", "torch.distributed.fsdp", "torch.nn.parallel", "transformers", "tensordict", "safetensors.torch")
"""Modules that know nothing of Ray, whose library keeps the settings that it finds when it is loaded."""
LATER = ("trinity_sync.launch.fork_contents",)
_SERVER = Path(__file__).parents[1] / "host" / "fork_server.py"
_SESSION = "forks.session"
_END_S = 10.0


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
    from trinity_sync.actors.deaths import ends_noted_in

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
            yield Forks({forked_worker.SOCKET: str(path), forked_worker.SETUP: _setup_worker()}, server.stdin.close)
    finally:
        server.stdin.close()
        server.kill()  # it has nothing to tidy up, and may be importing, or stand still
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_S)


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
        self._ray_params.setup_worker_path = forked_worker.__file__
        return start(self, *args, **kwargs)

    Node.start_raylet = start_raylet
    try:
        yield
    finally:
        Node.start_raylet = start


def _setup_worker() -> str:
    import ray

    return str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")
