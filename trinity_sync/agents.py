"""The node agents of a run: one on each node that holds trainer ranks, with the slots of these."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

_CLOSE_S = 10.0


def start_agents(
    cfg: DictConfig,
    infos: Sequence[Any],
    trainer: Any,
    *,
    synchronizer: Any,
    monitor: Any,
    attempt: int,
    run_key: str,
    fallback: Path,
    log_dir: str,
) -> dict[str, Any]:
    """Start the agents, have them make their slots, and attach the trainer's ranks to them.

    Args:
        cfg: the run's.
        infos: `RankInfo` of each rank, in the order of the ranks.
        trainer: the group of ranks.
        synchronizer: the run's, see `sync.Synchronizer`.
        monitor: handle of the checkpoint monitor.
        attempt: of the run.
        run_key: unique to the run.
        fallback: folder of slots as files, where shared memory is too small.
        log_dir: folder of the log files.

    Returns:
        Ray node id -> handle.

    Raises:
        RunError, WaitTimeout: an agent or a rank does not answer, or has no room.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trinity_sync.checkpoint import CheckpointCoordinator
    from trinity_sync.sync.agent import AgentConfig, NodeAgent
    from trinity_sync.sync.remote import resolve

    layouts: dict[str, dict[str, Any]] = {}
    for info in infos:
        held = layouts.setdefault(info.node, {})
        if info.layout is not None:
            held[info.part] = info.layout
    config = AgentConfig(
        run_key=run_key,
        slots=cfg.sync.slots,
        root=cfg.sync.shm_dir,
        fallback=str(fallback),
        verify=cfg.sync.verify,
        nodes=sum(bool(held) for held in layouts.values()),
        threads=max(1, (os.cpu_count() or 2) // 2),
        durable=cfg.checkpoint.fsync,
        save_timeout_s=cfg.checkpoint.timeout_s,
        log_dir=log_dir,
    )
    agents: dict[str, Any] = {}
    lead = None
    for node in layouts:
        strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=1000)
        agents[node] = actor.remote(config, synchronizer.actor, lead)
        lead = lead or agents[node]

    def coordinator_of(node: str) -> Any:
        """Makes the coordinator through which an agent saves; passed in, as the agent knows no checkpoints."""
        timeout_s = cfg.checkpoint.timeout_s
        return partial(
            CheckpointCoordinator, monitor, node_id=node, job_id="node-agent", timeout_s=timeout_s, attempt=attempt
        )

    try:
        calls = {
            f"the agent of node {node}": agents[node].register.remote(layouts[node], coordinator_of(node))
            for node in layouts
        }
        arenas = dict(zip(layouts, resolve(calls, "make its slots", cfg.cluster.start_timeout_s).values(), strict=True))
        for arena in arenas.values():
            for note in arena["notes"]:
                print(note, file=sys.stderr)
        arguments = []
        for info in infos:
            mine = {slot: parts[info.part] for slot, parts in arenas[info.node]["paths"].items() if info.part in parts}
            arguments.append((agents[info.node], mine, synchronizer.actor, monitor, attempt, cfg.checkpoint.timeout_s))
        trainer.call_each("attach", arguments, "attach to its node agent", cfg.cluster.start_timeout_s)
    except BaseException:
        close_agents(agents)
        raise
    return agents


def close_agents(agents: Mapping[str, Any]) -> None:
    """Have agents give their shared memory back. What they no longer can, the end of the run does, or the next one's
    agent.
    """
    import ray

    with suppress(Exception):
        ray.get([agent.close.remote() for agent in agents.values()], timeout=_CLOSE_S)
