"""A worker's share of a load, beside its engine: versions arrive here, are checked, and wait to be put into the model.

Until then the engine goes on generating, and bytes that turn out to be damaged never reach it. Where the parts of a
version can be mapped, they are `mapped`; else they are `Received` into memory of the worker's own.
"""

from __future__ import annotations

import heapq
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import LayoutCache, MappedPart, PartMaps, Transport
from trinity_sync.sync.weight_loader import InPlace
from trinity_sync.weights.apply import Receiver, check_bytes, in_buckets
from trinity_sync.weights.digests import RowPlan
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.packing import WholeTensors
from trinity_sync.weights.slots import map_segment
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


# Versions that a worker maps where they lie. Of a tensor that one part holds whole, vLLM reads its own slice there
# and no more; the others are put together once, in a segment that all workers map.


class Share(NamedTuple):
    """Which of the workers this one is, and how many there are."""

    rank: int
    workers: int


class Mapped(Arrivals):
    """Versions whose parts are mapped.

    Args:
        tensors: given to vLLM in these dtypes.
        layouts: of parts that were told of before.
        maps: where the parts are.
        verify: `sync.verify`.
        share: this worker's part of the work.
    """

    def __init__(self, tensors: Shapes, layouts: LayoutCache, maps: PartMaps, verify: str, share: Share) -> None:
        super().__init__(tensors, layouts)
        self._dtypes = {name: to_torch(dtype) for name, (dtype, _) in tensors.items()}
        self._maps = maps
        self._verify = verify
        self._share = share
        self._plan: _Plan | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}

    def read(self, name: str, rows: int | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if rows is None or tensor.dim() < 2 else tensor[:rows]

    def memory(self) -> Sequence[torch.Tensor]:
        return list(self._tensors.values())

    def let_go(self) -> None:
        """Refer to no byte of the version's parts any more."""
        super().let_go()
        self._tensors = {}

    def _take(self, arrival: Arrival) -> Arrived:
        parts = self._maps.map(arrival.lease)
        plan = self._planned([part.layout for part in parts], arrival.together)
        if self._verify == "bucket":
            self._check_buckets(parts)
        segments = [part.data for part in parts]
        digests = plan.put_together(segments, digest=self._verify == "full")
        if self._verify == "full":
            digests |= plan.digests(segments)
        self._tensors = plan.views(segments)
        return Arrived(sum(part.layout.nbytes for part in parts), digests, plan.reread)

    def _check_buckets(self, parts: Sequence[MappedPart]) -> None:
        buckets = ((part, *one) for part in parts for one in in_buckets(part.layout, part.data, part.buckets))
        for part, number, data, digest in islice(buckets, self._share.rank, None, self._share.workers):
            check_bytes(f"bucket {number} of part {part.layout.part}", data, len(data), digest)

    def _planned(self, layouts: Sequence[PartLayout], together: str | None) -> _Plan:
        if self._plan is None or self._plan.of != ([layout.digest for layout in layouts], together):
            self._plan = _Plan(layouts, self._dtypes, together, self._share)
        return self._plan


class _Plan:
    """What is worked out once for a set of layouts.

    Attributes:
        of: the digests of the layouts, and the file of the segment in which tensors are put together.
        reread: some tensors are not put together, but read from the parts.
    """

    def __init__(
        self, layouts: Sequence[PartLayout], dtypes: Mapping[str, torch.dtype], together: str | None, share: Share
    ) -> None:
        self.of = [layout.digest for layout in layouts], together
        self._whole = WholeTensors(layouts, dtypes)
        nbytes = dict[str, int]()
        for layout in layouts:
            for name, _, _, start, stop in layout.table:
                nbytes[name] = nbytes.get(name, 0) + stop - start
        spread = {shard.name: nbytes.pop(shard.name) for shard in self._whole.together.shards}
        self.reread = bool(nbytes)
        mine = share_of(nbytes, share)
        self._rows = RowPlan([layout.only(mine) for layout in layouts])
        mine = share_of(spread, share)
        self._spread = [layout.only(mine) for layout in layouts]
        size = self._whole.together.nbytes
        self._together: Segment = (
            b"" if together is None else map_segment(together, size, writable=True, populate=False)
        )
        own = WholeTensors([self._whole.together], dtypes).views([self._together, b""])
        self._receiver = Receiver({name: own[name] for name in mine})

    def put_together(self, segments: Sequence[Segment], *, digest: bool) -> dict[str, bytes]:
        """Put together what this worker is to.

        Args:
            segments: those of the parts.
            digest: whether to say what was put together, in 16 bytes for each tensor.
        """
        if digest:
            self._receiver.begin()
        for layout, segment in zip(self._spread, segments, strict=True):
            self._receiver.apply(layout, segment)
        return {name: found for name, *_, found in self._receiver.taken()} if digest else {}

    def digests(self, segments: Sequence[Segment]) -> dict[str, bytes]:
        """The 16-byte digests of the tensors that this worker is to look at, of those that a part holds whole."""
        return self._rows.digest(segments).tensor_digests()

    def views(self, segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
        """All tensors, once all workers are done."""
        return self._whole.views([*segments, self._together])


def share_of(nbytes: Mapping[str, int], share: Share) -> set[str]:
    """The names of the tensors that a worker deals with: of about as many bytes as those of each other worker, and each
    tensor by one of them.
    """
    loads = [(0, rank) for rank in range(share.workers)]
    mine: set[str] = set()
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + nbytes[name], rank))
        if rank == share.rank:
            mine.add(name)
    return mine
