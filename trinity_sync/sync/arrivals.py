"""Versions for engines whose weights are in worker processes, such as vLLM's. A version arrives in each worker and is
checked while the engine generates, so damaged bytes never reach the model. Parts are mapped where the mode can map them
(`MappedArrivals`), and else received into the worker's memory (`ReceivedArrivals`).
"""

from __future__ import annotations

import heapq
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.host.logs import story
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import LayoutCache, MappedPart, PartMaps, Transport
from trinity_sync.sync.weight_loader import LiveTensors
from trinity_sync.weights.apply import Receiver, check_bytes, in_buckets
from trinity_sync.weights.digests import RowPlan
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.packing import WholeTensors
from trinity_sync.weights.shards import layer_of
from trinity_sync.weights.slots import DEFAULT_ROOT, SlotArena, map_segment, remove_stale
from trinity_sync.weights.tensors import to_torch

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name -> (dtype as safetensors names it, shape)."""


class Arrival(NamedTuple):
    """The request to a worker to take a version."""

    lease: Lease  # names parts of other nodes by their copies on this node
    broadcast: Broadcast | None  # in nccl mode
    layouts: Sequence[PartLayout]  # those that were not sent before
    together: str | None = None  # file of the segment for tensors that are split over parts; None: there are none


class ArrivalReport(NamedTuple):
    """A worker's answer about an arrived version."""

    moved: int  # bytes of the version
    digests: Mapping[str, bytes]  # tensor -> 16 bytes, this worker's share; empty unless `sync.verify` is full
    reread: bool  # the update reads tensors from the leased parts again
    apply_s: float = 0.0  # as of `LoadReport`


class Arrivals(ABC):
    """Versions that arrive in one worker, one at a time. `shapes`: the tensors of a version, layer by layer."""

    def __init__(self, tensors: Shapes, layouts: LayoutCache) -> None:
        self.shapes = {name: tensors[name] for name in sorted(tensors, key=layer_of)}
        self._layouts = layouts
        self._version: Version | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}

    def take(self, arrival: Arrival) -> ArrivalReport:
        """Take a whole version.

        Raises:
            ChecksumError: bytes are damaged.
            MismatchError: it does not fit the tensors.
        """
        self.let_go()
        for layout in arrival.layouts:
            self._layouts.learn(layout)
        arrived = self._take(arrival)
        self._version = arrival.lease.version
        return arrived

    def check(self, version: str) -> None:
        """Raise `RunError` unless this version has arrived."""
        if str(self._version) != version:
            raise RunError(f"version {version} is to be used, but {self._version or 'none'} has arrived")

    def tensors(self, version: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of the arrived version, layer by layer; read-only, and valid until `let_go`. Raises
        as `check`.
        """
        self.check(version)
        for name in self.shapes:
            yield name, self.read(name)

    def read(self, name: str, rows: int | None = None) -> torch.Tensor:
        """Return a tensor of the arrived version, or only its first rows if it has two dimensions or more."""
        tensor = self._tensors[name]
        return tensor if rows is None or tensor.dim() < 2 else tensor[:rows]

    def memory(self) -> Sequence[torch.Tensor]:
        """Return the memory behind the tensors of `read`."""
        return list(self._tensors.values())

    def let_go(self) -> None:
        """Drop the version."""
        self._version = None

    @abstractmethod
    def _take(self, arrival: Arrival) -> ArrivalReport: ...


class ReceivedArrivals(Arrivals):
    """Versions received into this worker's memory, which is reused."""

    def __init__(self, tensors: Shapes, layouts: LayoutCache, transport: Transport, verify: str) -> None:
        super().__init__(tensors, layouts)
        self._tensors = {name: torch.empty(shape, dtype=to_torch(dtype)) for name, (dtype, shape) in tensors.items()}
        self._target = LiveTensors(self._tensors, transport, layouts, verify)
        self._verify = verify

    def _take(self, arrival: Arrival) -> ArrivalReport:
        self._target.check(arrival.lease)
        taken = self._target.take(arrival.lease, arrival.broadcast, lambda: None)
        digests = self._target.digests() if self._verify == "full" else {}
        return ArrivalReport(taken.moved, digests, reread=False, apply_s=taken.apply_s)


# ---- mapped versions: of a tensor that lies in one part, the worker's slice is read there; a tensor that is split over
# parts is assembled once per node, in a segment that all workers map


class Share(NamedTuple):
    """This worker's rank, and the number of workers."""

    rank: int
    workers: int


class MappedArrivals(Arrivals):
    """Versions whose parts are mapped."""

    def __init__(self, tensors: Shapes, layouts: LayoutCache, maps: PartMaps, verify: str, share: Share) -> None:
        super().__init__(tensors, layouts)
        self._dtypes = {name: to_torch(dtype) for name, (dtype, _) in tensors.items()}
        self._maps = maps
        self._verify = verify
        self._share = share
        self._plan: _Plan | None = None

    def let_go(self) -> None:
        """Drop the version and all views of its parts."""
        super().let_go()
        self._tensors = {}

    def _take(self, arrival: Arrival) -> ArrivalReport:
        parts = self._maps.map(arrival.lease)
        plan = self._planned([part.layout for part in parts], arrival.together)
        if self._verify == "bucket":
            self._check_buckets(parts)
        segments = [part.data for part in parts]
        digests = plan.put_together(segments, digest=self._verify == "full")
        if self._verify == "full":
            digests |= plan.digests(segments)
        self._tensors = plan.views(segments)
        return ArrivalReport(sum(part.layout.nbytes for part in parts), digests, plan.reread)

    def _check_buckets(self, parts: Sequence[MappedPart]) -> None:
        buckets = ((part, *one) for part in parts for one in in_buckets(part.layout, part.data, part.buckets))
        for part, number, data, digest in islice(buckets, self._share.rank, None, self._share.workers):
            check_bytes(f"bucket {number} of part {part.layout.part}", data, len(data), digest)

    def _planned(self, layouts: Sequence[PartLayout], together: str | None) -> _Plan:
        if self._plan is None or self._plan.of != ([layout.digest for layout in layouts], together):
            self._plan = _Plan(layouts, self._dtypes, together, self._share)
        return self._plan


class _Plan:
    """The work on versions of one set of layouts. `reread`: some tensors are read from the parts."""

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
        """Assemble this worker's share of the split tensors; with `digest` return 16 bytes for each."""
        if digest:
            self._receiver.begin()
        for layout, segment in zip(self._spread, segments, strict=True):
            self._receiver.apply(layout, segment)
        return {name: found for name, *_, found in self._receiver.taken()} if digest else {}

    def digests(self, segments: Sequence[Segment]) -> dict[str, bytes]:
        """Return the 16-byte digests of this worker's share of the other tensors."""
        return self._rows.digest(segments).tensor_digests()

    def views(self, segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
        """Return all tensors; called when all workers have assembled theirs."""
        return self._whole.views([*segments, self._together])


def share_of(nbytes: Mapping[str, int], share: Share) -> set[str]:
    """Return the names of a worker's tensors: each tensor has one worker, and the workers have about equal bytes."""
    loads = [(0, rank) for rank in range(share.workers)]
    mine: set[str] = set()
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + nbytes[name], rank))
        if rank == share.rank:
            mine.add(name)
    return mine


# ---- the explorer's memory for its engine


def engine_memory(owner: str, part: str, nbytes: int) -> SlotArena:
    """Create an arena of one slot with one part, in shared memory or else in a file; delete those of killed programs.

    Raises:
        SegmentError: there is no room for it.
    """
    fallback = Path(tempfile.gettempdir())
    for root in (DEFAULT_ROOT, fallback):
        remove_stale(root)
    return SlotArena.create(f"{owner}-{secrets.token_hex(8)}", 1, {part: nbytes}, fallback=fallback)


class SharedSegment:
    """A segment that an engine's workers map. It is replaced when the layout changes, and deleted by `close`; that of a
    killed process is deleted when the next one is made.
    """

    def __init__(self) -> None:
        self._arena: SlotArena | None = None
        self._layout: PartLayout | None = None

    def laid_out(self, layout: PartLayout) -> SlotArena:
        """Return an arena of one slot with the layout's part.

        Raises:
            SegmentError: there is no room for it.
        """
        if self._arena is None or self._layout != layout:
            self.close()
            self._arena = engine_memory("vllm", layout.part, layout.nbytes)
            self._layout = layout
            for note in self._arena.notes:
                story.warning("%s", note)
        return self._arena

    def close(self) -> None:
        """Free the memory; it lasts until all workers have unmapped it."""
        if self._arena is not None:
            self._arena.close()
        self._arena = None
