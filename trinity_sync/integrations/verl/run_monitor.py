"""The checkpoint monitor of a verl program, and what a manager has to know of it: one of Ray's actors, or a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.actors.pending import Transport
from trinity_sync.checkpoint.monitor import ACTOR_NAME
from trinity_sync.errors import RunError

if TYPE_CHECKING:
    from ray.actor import ActorHandle


@dataclass(frozen=True, kw_only=True)
class RunMonitor:
    """A run's checkpoint monitor.

    Attributes:
        handle: of the monitor, for a `CheckpointCoordinator`.
        client: for the calls of a checkpoint.
        root: the checkpoint folder; None: nothing is written.
        attempt: the run's attempt.
        roles: places in a step's folder without which no full checkpoint is committed; empty: what is announced is all.
        durable: whether commits survive a power cut.
    """

    handle: ActorHandle | Transport
    client: MonitorClient
    root: Path | None
    attempt: int
    roles: Sequence[str]
    durable: bool

    @classmethod
    def of(cls, handle: ActorHandle | Transport, timeout_s: float) -> RunMonitor:
        """Ask a monitor, Ray's or one of `checkpoint.daemon.connecting.connect`, what it was made with.

        Args:
            timeout_s: limit for its answer, seconds.

        Raises:
            RunError: it is gone.
            WaitTimeout: it did not answer.
        """
        client = MonitorClient(handle)
        facts = client.describe().result(timeout_s)
        return cls(
            handle=handle,
            client=client,
            root=Path(facts["root"]) if facts["root"] is not None else None,
            attempt=facts["attempt"],
            roles=facts["roles"],
            durable=facts["fsync"],
        )

    @classmethod
    def in_namespace(cls, ray_namespace: str, timeout_s: float) -> RunMonitor:
        """Find the one that `open_run` has started.

        Args:
            ray_namespace: the run's; empty: Ray's own for this process.

        Raises:
            RunError: there is none; further as `of`.
        """
        import ray

        try:
            handle = ray.get_actor(ACTOR_NAME, namespace=ray_namespace or None)
        except ValueError:
            raise RunError(
                f"there is no {ACTOR_NAME!r} in Ray namespace {ray_namespace!r}: let the driver start it with "
                "trinity_sync.integrations.verl.open_run before the workers"
            ) from None
        return cls.of(handle, timeout_s)
