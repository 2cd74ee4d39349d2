"""The node agents of a run: one on each node that holds trainer ranks, with the slots of these."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from trinity_sync.actors.agent import AgentClient
    from trinity_sync.actors.calls import Call
    from trinity_sync.actors.rank import RankClient, RankInfo
    from trinity_sync.actors.synchronizer import SynchronizerClient
    from trinity_sync.checkpoint import CheckpointCoordinator
    from trinity_sync.weights.layout import PartLayout

_CLOSE_S = 10.0
_RAY_S = 4.0
"""Of the time after an interrupt, what is for the end of Ray."""


def start_agents(
    cfg: DictConfig,
    infos: Sequence[RankInfo],
    trainer: Any,
    *,
    synchronizer: SynchronizerClient,
    make_coordinator: Callable[..., CheckpointCoordinator],
    run_key: str,
    fallback: Path,
    log_dir: str,
) -> dict[str, AgentClient]:
    """Start the agents, have them make their slots, and attach the trainer's ranks to them.

    Args:
        cfg: the run's.
        infos: `RankInfo` of each rank, in the order of the ranks.
        trainer: the group of ranks.
        synchronizer: the run's.
        make_coordinator: makes the coordinator of a rank or an agent, of `node_id` and `job_id`.
        run_key: unique to the run.
        fallback: folder of slots as files, where shared memory is too small.
        log_dir: folder of the log files.

    Returns:
        Ray node id -> agent.

    Raises:
        RunError, WaitTimeout: an agent or a rank does not answer, or has no room.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trinity_sync.actors.agent import AgentClient
    from trinity_sync.actors.calls import results
    from trinity_sync.actors.failures import failures_logged
    from trinity_sync.node.agent import AgentConfig, NodeAgent

    layouts: dict[str, dict[str, PartLayout]] = {}
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
    agents: dict[str, AgentClient] = {}
    lead: AgentClient | None = None
    body = ray.remote(failures_logged(NodeAgent))
    for node in layouts:
        strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = body.options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=1000)
        named = replace(config, log_name=f"node-agent-{len(agents)}" if agents else "node-agent")
        agents[node] = AgentClient(actor.remote(named, synchronizer, lead), node)
        lead = lead or agents[node]

    try:
        # the agent knows no checkpoints
        calls = [
            agents[node].register(layouts[node], partial(make_coordinator, node_id=node, job_id="node-agent"))
            for node in layouts
        ]
        slots = dict(zip(layouts, results(calls, cfg.cluster.start_timeout_s), strict=True))
        for made in slots.values():
            for note in made.notes:
                print(note, file=sys.stderr)

        def attach(rank: RankClient) -> Call[None]:
            info = infos[rank.rank]
            paths = {slot: parts[info.part] for slot, parts in slots[info.node].paths.items() if info.part in parts}
            return rank.attach(agents[info.node], paths, synchronizer, make_coordinator, cfg.checkpoint.timeout_s)

        trainer.all(attach, cfg.cluster.start_timeout_s)
    except BaseException:
        close_agents(agents)
        raise
    return agents


def close_agents(agents: Mapping[str, AgentClient]) -> None:
    """Have agents give their shared memory back. What they no longer can, the end of the run does, or the next one's
    agent.
    """
    from trinity_sync.actors.calls import results

    with suppress(Exception):
        results([agent.close() for agent in agents.values()], _CLOSE_S, reserve_s=_RAY_S)
