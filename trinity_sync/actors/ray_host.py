"""What an actor of Ray's has to know of Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import ray
from ray._private import utils
from ray.exceptions import RayError

from trinity_sync.host.interrupts import leave_to_driver
from trinity_sync.host.module_path import look_there
from trinity_sync.host.process import DRIVER, end_with_driver
from trinity_sync.host.threads import in_background

_ORPHAN_S = 20.0
"""A process that is left by its raylet has so long to end by itself, seconds."""


def end_with_raylet() -> None:
    """Kill this process, one of Ray's workers, some time after its raylet is gone. Ray only asks it to end, and a task
    that does not return hears nothing of it. Nothing in a Ray of a run's own, whose workers end with the driver, and
    may be forks, see `host.process.end_with_driver`.
    """
    if DRIVER in os.environ:
        return
    raylet = os.getppid()

    def watch() -> None:
        while os.getppid() == raylet:
            time.sleep(1.0)
        time.sleep(_ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    in_background(watch, "raylet")


class RayHost:
    """Ray, as the `hosting.Host` of the actor in this process, which ends with its raylet."""

    def __init__(self) -> None:
        end_with_raylet()

    @property
    def restarted(self) -> bool:
        """Whether Ray has started the actor again."""
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def call_id(self) -> str:
        """Return Ray's id of the current task."""
        return str(ray.get_runtime_context().get_task_id())

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for a reference, which fails with the process that it belongs to."""
        try:
            await owned[0]  # type: ignore[misc]
        except RayError:
            return True
        return False


def prepare_worker() -> None:
    """Prepare one of Ray's workers for this run: it ends with the driver or with its raylet, finds the user's modules,
    and leaves signals that end a run to the driver (Ray's own handler would end the worker). Ray calls it in the main
    thread, before all else.
    """
    end_with_driver()
    look_there()
    end_with_raylet()
    leave_to_driver()
    utils.set_sigterm_handler = lambda handler: None
