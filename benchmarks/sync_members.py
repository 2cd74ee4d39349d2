"""The members of `benchmarks/sync.py`: trainer ranks that hold and stage weights but have no engine, explorers that
load but do not generate, and the actor through which weights went in Trinity-RFT 0.6.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.protocol import rounds
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync import nccl, stream
from trinity_sync.sync.base import LayoutCache
from trinity_sync.sync.broadcast_group import BroadcastGroup, device_of, make_group
from trinity_sync.sync.checkpoint import CheckpointTransport
from trinity_sync.sync.memory import MemoryTransport
from trinity_sync.sync.nccl import NcclTransport
from trinity_sync.sync.weight_loader import LiveTensors, WeightLoader
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import row_slice, whole
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.staging import stage

LIMIT_S = 600.0
WIRE = "BF16"
MESSAGE_BYTES = 64 << 20
Shapes = Mapping[str, tuple[int, ...]]


def layout_of(part: str, rank: int, ranks: int, shapes: Shapes, bucket_bytes: int) -> PartLayout:
    """What a rank holds: a slice of the rows of each tensor, as under FSDP2; one-dimensional tensors are cut too."""
    shards = []
    for name, shape in shapes.items():
        extent = shape[0] if shape else 1
        if ranks == 1:
            shards.append(whole(name, WIRE, shape))
            continue
        start, stop = rank * extent // ranks, (rank + 1) * extent // ranks
        shards.append(row_slice(name, WIRE, shape, start, stop))
    return PartLayout.build(part, shards, bucket_bytes)


def memory() -> dict[str, int]:
    """Of this process, in bytes: resident, of that its own, and of that shared with other processes; and its peak."""
    status = Path("/proc/self/status").read_text()
    found = {key: int(re.search(rf"^{key}:\s+(\d+)", status, re.M)[1]) << 10 for key in ("VmRSS", "VmHWM", "RssAnon")}  # type: ignore[index]
    shared = int(re.search(r"^RssShmem:\s+(\d+)", status, re.M)[1]) << 10  # type: ignore[index]
    return {
        "rss": found["VmRSS"],
        "private": found["RssAnon"],
        "shared": shared,
        "peak": found["VmHWM"],
        "pid": os.getpid(),
    }


def reset_peak() -> None:
    """Let the peak start at what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Member:
    """What ranks and explorers have in common."""

    def memory(self) -> dict[str, int]:
        """See `memory`."""
        return memory()

    def reset_peak(self) -> None:
        """See `reset_peak`."""
        reset_peak()

    def open_raw(self, host: str, port: int, rank: int, size: int) -> None:
        """Enter a group for plain broadcasts."""
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        self._raw = make_group(dist.PrefixStore("raw", store), rank, size, "gloo", LIMIT_S)
        self._raw_broadcasts = BroadcastGroup(self._raw, device_of("gloo"), LIMIT_S)

    def raw_broadcast(self, nbytes: int) -> float:
        """Broadcast bytes from rank 0 in messages of 64 MiB, one after another; seconds."""
        if getattr(self, "_raw_room", None) is None:
            self._raw_room = torch.ones(MESSAGE_BYTES, dtype=torch.uint8)
        self._broadcast(self._raw_room[:1])  # all are here
        began = time.perf_counter()
        for start in range(0, nbytes, MESSAGE_BYTES):
            self._broadcast(self._raw_room[: min(MESSAGE_BYTES, nbytes - start)])
        return time.perf_counter() - began

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._raw_broadcasts.broadcast(tensor)


class Rank(Member):
    """A trainer rank: fp32 master weights, random, and a part in each slot."""

    def __init__(self, layout: PartLayout, seed: int) -> None:
        torch.set_num_threads(1)
        self._layout = layout
        generator = torch.Generator().manual_seed(seed)
        self._sources = {
            shard.name: torch.empty(shard.numel_local).normal_(generator=generator) for shard in self._layout.shards
        }
        self._segments: dict[int, Any] = {}

    def attach(self, agent: AgentClient, paths: dict[int, str]) -> dict[str, int]:
        """Map the slots."""
        self._agent = agent
        before = memory()
        self._segments = {slot: map_segment(path, self._layout.nbytes, writable=True) for slot, path in paths.items()}
        return before

    def change(self) -> None:
        """Stand in for a training step: every version is another one."""
        for source in self._sources.values():
            source[: max(1, len(source) // 1000)].mul_(-1.0)

    def stage(self, version: Version, slot: int, lazily: bool = False) -> float:
        """As `TrinityWorker.stage`."""
        began = time.perf_counter()
        stage(self._layout, self._sources, self._segments[slot])
        blocked = time.perf_counter() - began
        self._agent.part_staged(version, slot, self._layout.part)
        return blocked

    def send(self, broadcast: Broadcast) -> int:
        """As `TrinityWorker.send`."""
        return nccl.send(broadcast, self._layout.part, self._layout, self._segments[broadcast.slot])

    # -- what it is compared with; called on a trainer of one rank

    def _wire(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self._layout.shards:
            yield shard.name, self._sources[shard.name].view(shard.shape).to(torch.bfloat16)

    def prepare_state(self) -> int:
        """The whole state dict in wire dtype, gathered before the clock starts; its bytes."""
        self._state = dict(self._wire())
        return sum(tensor.nbytes for tensor in self._state.values())

    def hand_over(self, holder: Any, step: int) -> float:
        """Trinity 0.6: the state dict as the argument of an actor's method; seconds."""
        began = time.perf_counter()
        ray.get(holder.set_model_state_dict.remote(self._state, step), timeout=LIMIT_S)
        return time.perf_counter() - began

    def broadcast_each(self) -> float:
        """One broadcast per parameter; seconds."""
        self._broadcast(torch.ones(1, dtype=torch.uint8))
        began = time.perf_counter()
        stream.broadcast(self._raw, self._state.items(), timeout_s=LIMIT_S)
        return time.perf_counter() - began


class Holder:
    """The Synchronizer of Trinity-RFT 0.6 in short: an actor that holds the state dict."""

    def set_model_state_dict(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Keep it."""
        self._held = state, step

    def get_model_state_dict(self) -> tuple[dict[str, torch.Tensor], int]:
        """Give it."""
        return self._held


class BenchExplorer(Member):
    """An explorer without an engine."""

    def __init__(
        self, name: str, synchronizer: SynchronizerClient, agents: dict[str, AgentClient], shapes: Shapes
    ) -> None:
        torch.set_num_threads(1)
        self._name = name
        self._synchronizer = synchronizer
        self._agents = agents
        self._model = {tensor: torch.ones(shape, dtype=torch.bfloat16) for tensor, shape in shapes.items()}
        self._loaders: dict[tuple[str, str], WeightLoader] = {}
        self._how = ("memory", "full")
        self._copies: tuple[np.ndarray, np.ndarray] | None = None

    def use(self, mode: str, verify: str) -> None:
        """How the next loads go."""
        self._how = (mode, verify)

    def load(self, version: Version, broadcast: Broadcast | None = None) -> LoadReport:
        """As `Explorer.load`."""
        return self._loader().load(version, broadcast)

    def _loader(self) -> WeightLoader:
        mode, verify = self._how
        if self._how not in self._loaders:
            layouts, node = LayoutCache(self._agents, LIMIT_S), ray.get_runtime_context().get_node_id()
            transports: dict[str, Callable[[], Any]] = {
                "memory": lambda: MemoryTransport(self._agents, layouts, LIMIT_S, node),
                "checkpoint": CheckpointTransport,
                "nccl": lambda: NcclTransport(self._name, layouts),
            }
            transport = transports[mode]()
            target = LiveTensors(self._model, transport, layouts, verify)
            self._loaders[self._how] = WeightLoader(rounds.RoundMember.new(self._name), target, self._synchronizer)
        return self._loaders[self._how]

    def stop_reading(self, version: tuple[int, int]) -> Lease:
        """Take a lease and do nothing with it."""
        return self._synchronizer.lease(self._name, Version(*version)).result(LIMIT_S)

    # -- what it is compared with

    def one_copy(self) -> float:
        """A single-thread copy of the model's bytes between two existing buffers; seconds."""
        if self._copies is None:
            nbytes = sum(tensor.nbytes for tensor in self._model.values())
            self._copies = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        source, target = self._copies
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    def forget_copies(self) -> None:
        """Give the buffers of `one_copy` back."""
        self._copies = None

    def fetch(self, holder: Any) -> float:
        """Trinity 0.6: the state dict from an actor, into the model; seconds."""
        began = time.perf_counter()
        state, _ = ray.get(holder.get_model_state_dict.remote(), timeout=LIMIT_S)
        for name, tensor in state.items():
            self._model[name].copy_(tensor)
        return time.perf_counter() - began

    def receive_each(self) -> float:
        """One broadcast per parameter; seconds."""
        meta = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self._model.items()]
        self._broadcast(torch.ones(1, dtype=torch.uint8))
        began = time.perf_counter()
        for name, tensor in stream.receive(self._raw, meta, timeout_s=LIMIT_S):
            self._model[name].copy_(tensor)
        return time.perf_counter() - began
