"""Ray for tests that need real actors: ``cluster = local_ray.cluster`` in a module or a conftest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from trinity_sync.launch.cluster import start_ray


@contextmanager
def running() -> Iterator[None]:
    """Ray for the length of the block."""
    start_ray(
        120.0,
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        # Processes start when a test needs one; idle ones would compete with it for the machine.
        _system_config={"prestart_worker_first_driver": False},
    )
    try:
        yield
    finally:
        ray.shutdown()


def kill(actor: Any) -> None:
    """Kill an actor that is not restarted, and return when nothing reaches it any more."""
    ray.kill(actor)
    with suppress(RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote(), timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray for the length of a module."""
    with running():
        yield
