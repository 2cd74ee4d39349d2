"""Ray for tests that need real actors: ``cluster = local_ray.cluster`` in a module or a conftest.

A node of Ray takes longer to start than most tests: one, in a process of its own, serves all modules that a process of
pytest runs. Each module joins it as a new driver, and with the driver go all actors and objects of the module. Actors'
processes are forks, as in a run on CPUs: importing torch takes each of them longer than most tests, too. Those that are
made in a block of `alone` import for themselves what they need.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray.exceptions import RayActorError

from trinity_sync.host.process import environment
from trinity_sync.launch import local_ray, worker_fork

_ALONE = {"env_vars": {"TRINITY_TEST_ALONE": "$HOME"}}
"""Ray has to look such a variable up itself, so no fork begins with it."""

_FORKED = ("requests", "jsonschema", "torch._inductor.compile_fx", "transformers.models.qwen3.modeling_qwen3")
_FORKED += ("trinity_sync.explorer.hf", "trinity_sync.checkpoint.monitor")
"""What actors import besides torch, as far as it is without Ray."""
_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
_END_LIMIT = 60.0
_ROOT = Path(__file__).parents[1]
_numbers = itertools.count()


@contextmanager
def running() -> Iterator[None]:
    """A Ray of one's own for the length of the block, which ends with this process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tr-", dir="/tmp")))
        with ExitStack() as starting:
            patched = starting.enter_context(pytest.MonkeyPatch.context())
            patched.setattr(local_ray, "LATER", _FORKED)
            patched.setattr(worker_fork, "__file__", str(Path(__file__).with_name("forked_actor.py")))
            started = stack.enter_context(local_ray.fork_server(folder))
            starting.enter_context(local_ray.workers_forked())
            starting.enter_context(environment(started.env))
            local_ray.start_ray(
                120.0,
                num_cpus=4,
                include_dashboard=False,
                _system_config=dict(local_ray.SYSTEM_CONFIG),
                **_QUIET,
            )
        try:
            yield
        finally:
            started.release()
            ray.shutdown()


@contextmanager
def joined() -> Iterator[None]:
    """The Ray of all tests of this process, joined for the length of the block."""
    enable_token_auth_by_default()  # as where Ray is started; `ray.init` does it for no address that it is given
    ray.shutdown()  # a module before may have left its own
    ray.init(address=_address(), **_QUIET)
    try:
        yield
    finally:
        ray.shutdown()


@functools.cache
def _address() -> str:
    """Of the Ray of all tests of this process, which is started."""
    command = [sys.executable, "-m", "tests.local_ray"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    atexit.register(_end, process)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address, "Ray did not start"
    return address


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=_END_LIMIT)


@contextmanager
def alone() -> Iterator[None]:
    """Actors that are made in the block are no forks, for tests of what an actor loads and of its memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray, "remote", ray.remote(runtime_env=_ALONE))
        yield


def new_name() -> str:
    """A name for a run, such as that of its namespace. The actors of a driver that left end a moment after it."""
    return f"run-{next(_numbers)}"


def kill(actor: Any) -> None:
    """Kill an actor that is not restarted, and return when nothing reaches it any more."""
    ray.kill(actor)
    with suppress(RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote(), timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray for the length of a module."""
    with joined():
        yield


if __name__ == "__main__":
    with running():
        print(ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.read()  # until the tests have ended, in whatever way
