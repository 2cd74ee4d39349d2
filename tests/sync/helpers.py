"""A trainer of which nothing is real but what it stages, and an explorer's half without its engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.sync.light import PretendNodeAgent
from tests.weights.helpers import cut, local_elements
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.synchronizer_client import SealedVersion, SynchronizerClient
from trinity_sync.protocol.parts import part_name
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.base import LayoutCache, TrainerSide
from trinity_sync.sync.memory import MemoryTransport
from trinity_sync.sync.node_agent import AgentConfig, NodeAgent
from trinity_sync.sync.weight_loader import LiveTensors, WeightLoader
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.staging import stage

LIMIT = 60.0
WIRE = "BF16"
BUCKET_BYTES = 256
SHAPES = {"embed.weight": (33, 16), "layers.0.mlp.weight": (24, 10), "layers.0.norm.weight": (24,), "scale": ()}

# Of all trainers, so that several of them may use one synchronizer.
_steps = itertools.count()


def odd_weights() -> dict[str, torch.Tensor]:
    """Of no bytes, of no dimension, not contiguous, of dtypes that torch does little with."""
    return {
        "nothing": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "expanded": torch.ones(1, 4).expand(3, 4),
        "mask": torch.tensor([True, False, True]),
        "eight": torch.arange(5.0).to(torch.float8_e4m3fn),
        "short": torch.tensor(7, dtype=torch.int16),
        "nothing last": torch.empty(0, dtype=torch.int64),
    }


def random_weights(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """Master weights in float32, and an integer tensor."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**weights, "steps": torch.randint(0, 99, (3,), generator=generator)}


def empty(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model without weights."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def node_id() -> str:
    """The only real node."""
    return str(ray.get_runtime_context().get_node_id())


def remote_agent(
    synchronizer: SynchronizerClient,
    lead: AgentClient | None,
    node: str | None,
    settings: dict[str, Any],
    on: str | None = None,
) -> AgentClient:
    """Start an agent on this node, or `on` another one; with `node` it takes itself for one there."""
    config = AgentConfig(**{"slots": 2, "verify": "full", "nodes": 1, "threads": 1, **settings})
    here = NodeAffinitySchedulingStrategy(on or node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": 100, "scheduling_strategy": here}
    if node is None:
        handle = ray.remote(NodeAgent).options(**options).remote(config, synchronizer, lead)
    else:
        handle = ray.remote(PretendNodeAgent).options(**options).remote(config, synchronizer, lead, node)
    return AgentClient(handle, node or on or node_id())


class PretendTrainer:
    """Ranks that hold nothing but their parts, one or more on each node, staged by the calling process.

    Args:
        synchronizer: of the run.
        agents: node -> agent, registered here.
        weights: their names, shapes and dtypes are the run's; how they are cut is drawn at random.
        ranks: how many.
        bucket_bytes: unit of transfer and checking.
    """

    def __init__(
        self,
        synchronizer: SynchronizerClient,
        agents: Mapping[str, AgentClient],
        *,
        weights: Mapping[str, torch.Tensor] | None = None,
        ranks: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.synchronizer = synchronizer
        self.agents = dict(agents)
        weights = random_weights(0) if weights is None else weights
        self.layouts = {
            layout.part: layout for layout in cut(dict(weights), WIRE, ranks, bucket_bytes, random.Random(5)).layouts
        }
        assert list(self.layouts) == [part_name(rank) for rank in range(ranks)]
        nodes = itertools.cycle(self.agents)
        self._node_of = {part: next(nodes) for part in self.layouts}
        self.paths: dict[tuple[int, str], str] = {}
        for node, agent in self.agents.items():
            mine = {part: self.layouts[part] for part in self.layouts if self._node_of[part] == node}
            slots = agent.register(mine).result(LIMIT).paths
            self.paths |= {(slot, part): path for slot, parts in slots.items() for part, path in parts.items()}

    def open(self, timeout_s: float = LIMIT) -> tuple[Version, int]:
        """Begin the next version: it and its slot."""
        version = Version(0, next(_steps))
        slot = self.synchronizer.begin(version, list(self.layouts), timeout_s).result(timeout_s + 30)
        return version, slot

    def stage_part(self, version: Version, slot: int, part: str, weights: Mapping[str, torch.Tensor]) -> None:
        """What one rank does."""
        layout = self.layouts[part]
        stage(layout, sources(layout, weights), self.segment(slot, part, writable=True))
        self.agents[self._node_of[part]].part_staged(version, slot, part).result(LIMIT)

    def seal(self, weights: Mapping[str, torch.Tensor]) -> SealedVersion:
        """Stage all parts of the next version."""
        version, slot = self.open()
        for part in self.layouts:
            self.stage_part(version, slot, part, weights)
        return self.synchronizer.wait_sealed(version, LIMIT).result(LIMIT)

    def publish(self, weights: Mapping[str, torch.Tensor]) -> SealedVersion:
        """Stage and commit the next version, as the memory mode does."""
        sealed = self.seal(weights)
        self.synchronizer.commit(sealed.version).result(LIMIT)
        return sealed

    def segment(self, slot: int, part: str, writable: bool = False) -> Any:
        """A rank's bytes of a slot, mapped."""
        return map_segment(self.paths[slot, part], self.layouts[part].nbytes, writable=writable)

    def damage(self, sealed: SealedVersion, part: str, byte: int) -> None:
        """Change one byte of what was sealed; once more restores it."""
        with self.segment(sealed.slot, part, writable=True) as segment:
            segment[byte] ^= 0xFF


def sources(layout: PartLayout, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's own share of whole tensors."""
    return {shard.name: local_elements(weights[shard.name], shard) for shard in layout.shards}


def make_loader(
    side: PretendTrainer | TrainerSide,
    destinations: Mapping[str, torch.Tensor],
    *,
    transport: Any = None,
    verify: str = "full",
    name: str = "explorer-0",
    member: RoundMember | None = None,
) -> WeightLoader:
    """An explorer's half in this process; over shared memory unless told otherwise."""
    layouts = LayoutCache(side.agents, LIMIT)
    transport = transport or MemoryTransport(side.agents, layouts, LIMIT, node_id())
    target = LiveTensors(destinations, transport, layouts, verify)
    return WeightLoader(member or RoundMember.new(name), target, side.synchronizer)
