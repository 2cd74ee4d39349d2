"""A worker's share of a load, beside its engine: versions arrive here, are checked, and wait to be put into the model.

What arrives lies in memory of its own, kept from load to load, so that the engine goes on generating meanwhile, and so
that bytes that turn out to be damaged never reach it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import ExplorerSide, SyncMode
from trinity_sync.sync.in_place import InPlace
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.tensors import to_torch

_FIRST_NUMBER = re.compile(r"\.(\d+)\.")

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name -> (dtype as safetensors names it, shape)."""


class Arrival(NamedTuple):
    """What a worker is told of a version that it is to take.

    Attributes:
        lease: of the version; parts of other nodes are named by where they lie on this one.
        broadcast: the broadcast in which it comes, in nccl mode.
        layouts: those of its parts that were not told before.
    """

    lease: Lease
    broadcast: Broadcast | None
    layouts: Sequence[PartLayout]


class Arrived(NamedTuple):
    """What a worker says of a version that has arrived.

    Attributes:
        moved: bytes.
        digest: of what arrived; None where `sync.verify` is not ``full``.
    """

    moved: int
    digest: str | None


class Arrivals:
    """The versions that arrive in one worker, one at a time.

    Args:
        name: of the worker as a receiver, see `Broadcast.explorers`.
        node: Ray id of the node.
        tensors: what a version consists of; held in these dtypes.
        mode: the sync mode.
        verify: `sync.verify`.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, *, name: str, node: str, tensors: Shapes, mode: SyncMode, verify: str, timeout_s: float) -> None:
        self._layouts = LayoutCache({}, timeout_s)
        side = ExplorerSide(name=name, node=node, agents={}, layouts=self._layouts, timeout_s=timeout_s)
        self._tensors = {name: torch.empty(shape, dtype=to_torch(dtype)) for name, (dtype, shape) in tensors.items()}
        self._target = InPlace(self._tensors, mode.transport(side), self._layouts, verify)
        self.version: Version | None = None

    def take(self, arrival: Arrival) -> Arrived:
        """Have a version arrive, whole.

        Raises:
            ChecksumError: bytes are damaged.
            MismatchError: it does not fit the tensors.
            RunError: it cannot be read.
        """
        self.version = None
        for layout in arrival.layouts:
            self._layouts.learn(layout)
        self._target.check(arrival.lease)
        taken = self._target.take(arrival.lease, arrival.broadcast, lambda: None)
        self.version = arrival.lease.version
        return Arrived(taken.moved, taken.digest)

    def digests(self) -> dict[str, bytes]:
        """The 16-byte digest of each tensor that arrived, with `sync.verify=full`."""
        return self._target.digests()

    def tensors(self, version: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the version that has arrived, layer by layer.

        Raises:
            RunError: it is not this one.
        """
        if str(self.version) != version:
            raise RunError(f"version {version} is to be used, but {self.version or 'none'} has arrived")
        for name in sorted(self._tensors, key=_layer):
            yield name, self._tensors[name]


def _layer(name: str) -> int:
    """The number of the layer, by the first number in the name; -1 for what is in none."""
    found = _FIRST_NUMBER.search(name)
    return int(found[1]) if found else -1
