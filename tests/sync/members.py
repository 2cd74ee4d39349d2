"""The members of a broadcast, without engines. Apart from the tests, so that their processes start sooner."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import nccl
from trinity_sync.sync.base import Bucket, ExplorerSide, LayoutCache
from trinity_sync.sync.deltas import DeltaTransport
from trinity_sync.sync.nccl import BroadcastDeltas, NcclTransport
from trinity_sync.sync.weight_loader import LiveTensors, WeightLoader
from trinity_sync.weights.apply import ChecksumError
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.slots import map_segment

LIMIT = 60.0


class Sender:
    """A trainer rank's half of a broadcast, as `TrinityWorker` has it."""

    def __init__(self, layout: PartLayout, paths: dict[int, str]) -> None:
        self._layout = layout
        self._segments = {slot: map_segment(path, self._layout.nbytes, writable=True) for slot, path in paths.items()}

    def pid(self) -> int:
        return os.getpid()

    def send(self, broadcast: Broadcast) -> int:
        return nccl.send(broadcast, self._layout.part, self._layout, self._segments[broadcast.slot])


class Misbehaving(NcclTransport):
    """Once it has received the first bucket, sends its own process a signal or takes the bytes for damaged, as told."""

    signum: int | None = None
    damaged = False

    def buckets(self, *given: Any) -> Generator[Bucket, None, None]:
        with closing(super().buckets(*given)) as buckets:
            for bucket in buckets:
                if self.signum is not None:
                    signum, self.signum = self.signum, None
                    os.kill(os.getpid(), signum)
                if self.damaged:
                    self.damaged = False
                    raise ChecksumError("the first bucket arrived damaged")
                yield bucket


class Receiver:
    """An explorer without an engine: it loads into `tensors`."""

    def __init__(
        self,
        member: RoundMember,
        synchronizer: SynchronizerClient,
        agents: dict[str, AgentClient],
        tensors: dict[str, torch.Tensor],
    ) -> None:
        self._given = member, synchronizer, agents
        self._tensors = tensors
        self.restart()

    def restart(self) -> None:
        """Begin without a version, as the process of an actor that has restarted."""
        member, synchronizer, agents = self._given
        layouts, name = LayoutCache(agents, LIMIT), member.name
        self._transport = Misbehaving(name, layouts)
        side = ExplorerSide(name=name, node="", agents=agents, layouts=layouts, timeout_s=LIMIT)
        transport = DeltaTransport(side, BroadcastDeltas(self._transport, name, layouts))
        self._loader = WeightLoader(member, LiveTensors(self._tensors, transport, layouts, "full"), synchronizer)

    def pid(self) -> int:
        return os.getpid()

    def signal_itself(self, signum: int) -> None:
        self._transport.signum = signum

    def take_for_damaged(self) -> None:
        self._transport.damaged = True

    def load(self, version: Version, broadcast: Broadcast | None = None) -> LoadReport:
        return self._loader.load(version, broadcast)

    def held(self) -> Version | None:
        return self._loader.held

    def change(self) -> None:
        """Change an element behind the loader's back."""
        self._tensors["embed.weight"][0, 0] += 1
