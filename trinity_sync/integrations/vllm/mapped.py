"""Versions that a worker maps where they lie: nothing is copied before vLLM asks for a tensor, and where a part holds
all of it, vLLM reads its own slice of it there and no more.

Workers share the checks: each looks at some of the tensors, or of the buckets, before the engine pauses.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from trinity_sync.integrations.vllm.arrivals import Arrival, Arrivals, Arrived, Shapes
from trinity_sync.sync.base import MappedPart, PartMaps
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.weights.apply import check_bytes, in_buckets
from trinity_sync.weights.digests import RowPlan
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.tensors import to_torch
from trinity_sync.weights.whole_tensors import VersionTensors, WholeTensors


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
        share: this worker's part of the checks.
    """

    def __init__(self, tensors: Shapes, layouts: LayoutCache, maps: PartMaps, verify: str, share: Share) -> None:
        super().__init__(tensors, layouts)
        self._dtypes = {name: to_torch(dtype) for name, (dtype, _) in tensors.items()}
        self._maps = maps
        self._verify = verify
        self._share = share
        self._plan: _Plan | None = None
        self._tensors: VersionTensors | None = None

    def read(self, name: str, rows: int | None = None) -> torch.Tensor:
        assert self._tensors is not None, "a version has arrived"
        return self._tensors.read(name, rows)

    def memory(self) -> Sequence[torch.Tensor]:
        return self._tensors.parts if self._tensors is not None else ()

    def let_go(self) -> None:
        """Refer to no byte of the version any more."""
        super().let_go()
        self._tensors = None

    def _take(self, arrival: Arrival) -> Arrived:
        parts = self._maps.map(arrival.lease)
        plan = self._planned([part.layout for part in parts])
        if self._verify == "bucket":
            self._check_buckets(parts)
        digests = plan.digests([part.data for part in parts]) if self._verify == "full" else {}
        self._tensors = plan.tensors.of([part.data for part in parts])
        return Arrived(sum(part.layout.nbytes for part in parts), digests, mapped=True)

    def _check_buckets(self, parts: Sequence[MappedPart]) -> None:
        buckets = ((part, *one) for part in parts for one in in_buckets(part.layout, part.data, part.buckets))
        for part, number, data, digest in islice(buckets, self._share.rank, None, self._share.workers):
            check_bytes(f"bucket {number} of part {part.layout.part}", data, len(data), digest)

    def _planned(self, layouts: Sequence[PartLayout]) -> _Plan:
        if self._plan is None or self._plan.of != [layout.digest for layout in layouts]:
            self._plan = _Plan(layouts, self._dtypes, self._share)
        return self._plan


class _Plan:
    """What is worked out once for a set of layouts.

    Attributes:
        of: the digests of the layouts.
        tensors: how they are read.
    """

    def __init__(self, layouts: Sequence[PartLayout], dtypes: Mapping[str, torch.dtype], share: Share) -> None:
        self.of = [layout.digest for layout in layouts]
        self.tensors = WholeTensors(layouts, dtypes)
        mine = share_of(layouts, share)
        self._rows = RowPlan([layout.only(mine) for layout in layouts])

    def digests(self, segments: Sequence[Segment]) -> dict[str, bytes]:
        """The 16-byte digests of the tensors that this worker is to look at."""
        return self._rows.digest(segments).tensor_digests()


def share_of(layouts: Sequence[PartLayout], share: Share) -> set[str]:
    """The names of the tensors that a worker looks at: of about as many bytes as those of each other worker, and each
    tensor by one of them.
    """
    nbytes: dict[str, int] = {}
    for layout in layouts:
        for name, _, _, start, stop in layout.table:
            nbytes[name] = nbytes.get(name, 0) + stop - start
    loads = [(0, rank) for rank in range(share.workers)]
    mine: set[str] = set()
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + nbytes[name], rank))
        if rank == share.rank:
            mine.add(name)
    return mine
