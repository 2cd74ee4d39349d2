"""A worker's share of a load, beside its engine: versions arrive here, are checked, and wait to be put into the model.

Until then the engine goes on generating, and bytes that turn out to be damaged never reach it. Where the parts of a
version can be mapped, they are `mapped`; else they are `Received` into memory of the worker's own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Transport
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
        together: the file of the segment in which workers put together what no part holds whole; None: none is needed.
    """

    lease: Lease
    broadcast: Broadcast | None
    layouts: Sequence[PartLayout]
    together: str | None = None


class Arrived(NamedTuple):
    """What a worker says of a version that has arrived.

    Attributes:
        moved: bytes of the version.
        digests: 16 bytes of each tensor that this worker has looked at, by name; empty where `sync.verify` is not
            ``full``.
        reread: tensors are read once more when they are put into the model, from where the lease keeps them.
    """

    moved: int
    digests: Mapping[str, bytes]
    reread: bool


class Arrivals(ABC):
    """The versions that arrive in one worker, one at a time.

    Args:
        tensors: what a version consists of.
        layouts: of parts that were told of before.

    Attributes:
        shapes: the tensors, layer by layer.
    """

    def __init__(self, tensors: Shapes, layouts: LayoutCache) -> None:
        self.shapes = {name: tensors[name] for name in sorted(tensors, key=_layer)}
        self._layouts = layouts
        self._version: Version | None = None

    def take(self, arrival: Arrival) -> Arrived:
        """Have a version arrive, whole.

        Raises:
            ChecksumError: bytes are damaged.
            MismatchError: it does not fit the tensors.
            RunError: it cannot be read.
        """
        self.let_go()
        for layout in arrival.layouts:
            self._layouts.learn(layout)
        arrived = self._take(arrival)
        self._version = arrival.lease.version
        return arrived

    def check(self, version: str) -> None:
        """Check that it is this version that has arrived.

        Raises:
            RunError: it is not.
        """
        if str(self._version) != version:
            raise RunError(f"version {version} is to be used, but {self._version or 'none'} has arrived")

    def tensors(self, version: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the version that has arrived, layer by layer. They are to be read only, and not to be
        kept when the version is let go. Raises as `check`.
        """
        self.check(version)
        for name in self.shapes:
            yield name, self.read(name)

    @abstractmethod
    def read(self, name: str, rows: int | None = None) -> torch.Tensor:
        """A tensor of the version that has arrived.

        Args:
            name: of the tensor.
            rows: no more than so many slices along dim 0 are needed; of a tensor of fewer than two dimensions: all.
        """
        ...

    @abstractmethod
    def memory(self) -> Sequence[torch.Tensor]:
        """All memory of which `read` gives views."""
        ...

    def let_go(self) -> None:
        """Hold no version any more."""
        self._version = None

    @abstractmethod
    def _take(self, arrival: Arrival) -> Arrived: ...


class Received(Arrivals):
    """Versions that are received into memory of this worker's own, which is kept from load to load.

    Args:
        tensors: held in these dtypes.
        layouts: of parts that were told of before.
        transport: what they come by.
        verify: `sync.verify`.
    """

    def __init__(self, tensors: Shapes, layouts: LayoutCache, transport: Transport, verify: str) -> None:
        super().__init__(tensors, layouts)
        self._tensors = {name: torch.empty(shape, dtype=to_torch(dtype)) for name, (dtype, shape) in tensors.items()}
        self._target = InPlace(self._tensors, transport, layouts, verify)
        self._verify = verify

    def read(self, name: str, rows: int | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if rows is None or tensor.dim() < 2 else tensor[:rows]

    def memory(self) -> Sequence[torch.Tensor]:
        return list(self._tensors.values())

    def _take(self, arrival: Arrival) -> Arrived:
        self._target.check(arrival.lease)
        taken = self._target.take(arrival.lease, arrival.broadcast, lambda: None)
        return Arrived(taken.moved, self._target.digests() if self._verify == "full" else {}, reread=False)


def _layer(name: str) -> int:
    """The number of the layer, by the first number in the name; -1 for what is in none."""
    found = _FIRST_NUMBER.search(name)
    return int(found[1]) if found else -1
