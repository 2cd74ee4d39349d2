"""Settings of the synchronizer, as our own class or read from the configuration of a program of Trinity-RFT."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_sync.errors import ConfigError, WaitLimit, grown
from trinity_sync.protocol.choices import plain, trinity_field
from trinity_sync.protocol.versions import LOAD_HOPS


@dataclass(frozen=True, kw_only=True)
class SynchronizerConfig:
    """Settings of the actor.

    Attributes:
        slots: number of snapshots (`sync.slots`).
        lease_s: seconds until a lease expires (`sync.lease_s`).
        timeout_s: timeout of waits that name none (`sync.timeout_s`), seconds.
        min_rate_mbps: slowest rate at which bytes may move, Mbit/s, by which timeouts and leases grow; None: they do
            not (`sync.min_rate_mbps`).
        log_dir: folder of the actor's log; None: Ray's own logs.
        checkpoint_dir: the checkpoint folder, with the versions that are announced without a folder; None: unknown.
        follow_commits: each commit in the checkpoint folder is a version, also one before the start; None: until the
            program hands over a state dict or broadcasts.
        detached: the actor outlives the process that made it, and ends with the last process that uses it.
        namespace: Ray namespace of the actor, filled in by `get_actor`.
        trinity: the program is one of Trinity-RFT's loops: no wait for a version lasts before a trainer has set its
            status; a broadcast that times out is answered with None, not with an error; its version counts from the
            moment when all members are ready.
        trainer_name, explorer_name: of the actors that `coordinate_weight_sync_setup` calls, in the same namespace.
        explorer_world_size: number of the explorer's processes in the group that it sets up.
        group_name: of that group.
    """

    slots: int = 2
    lease_s: float = 600.0
    timeout_s: float = 600.0
    min_rate_mbps: float | None = 100.0
    log_dir: str | None = None
    checkpoint_dir: str | None = None
    follow_commits: bool | None = None
    detached: bool = False
    namespace: str | None = None
    trinity: bool = False
    trainer_name: str = "trainer"
    explorer_name: str = "explorer"
    explorer_world_size: int = 1
    group_name: str = "rollout_weight_sync"

    def lease_of(self, nbytes: int) -> float:
        """Return the seconds until a lease on a version of so many bytes expires."""
        return grown(WaitLimit(self.lease_s, self.min_rate_mbps), LOAD_HOPS * nbytes)


def check_limit(name: str, seconds: object) -> None:
    """Refuse a timeout that is not a number of seconds above 0, by its name."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{name} is {seconds!r}; it has to be a number of seconds above 0")


def synchronizer_config(config: object) -> SynchronizerConfig:
    """Return the settings of a configuration of ours, or of a `Config` of Trinity-RFT, recognized by its fields."""
    if isinstance(config, SynchronizerConfig):
        return config
    if not hasattr(config, "synchronizer") or not hasattr(config, "ray_namespace"):
        raise ConfigError(f"the synchronizer's config is a {type(config).__name__}: pass a SynchronizerConfig, or the "
                          "Config of a Trinity-RFT program")  # fmt: skip
    method = str(plain(trinity_field(config, "synchronizer.sync_method"))).lower()
    timeout_s = trinity_field(config, "synchronizer.sync_timeout")
    check_limit("synchronizer.sync_timeout", timeout_s)
    world_size = trinity_field(config, "synchronizer.explorer_world_size") or 1
    if not isinstance(world_size, int):
        raise ConfigError(f"synchronizer.explorer_world_size is {world_size!r}; it has to be a number of processes")
    return SynchronizerConfig(
        timeout_s=float(timeout_s),
        checkpoint_dir=str(trinity_field(config, "checkpoint_job_dir") or "") or None,
        follow_commits=method == "checkpoint" and trinity_field(config, "mode") != "bench",
        detached=True,
        namespace=str(trinity_field(config, "ray_namespace") or "") or None,
        trinity=True,
        trainer_name=str(trinity_field(config, "trainer.name")),
        explorer_name=str(trinity_field(config, "explorer.name")),
        explorer_world_size=world_size,
        group_name=str(trinity_field(config, "synchronizer.group_name")),
    )
