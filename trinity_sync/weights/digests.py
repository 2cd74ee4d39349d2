"""Digests of staged bytes: one per bucket for transfer, one per row for the version. Called by the node agent.

No torch here: the node agent has none. The version digest is built from rows, so only 16 bytes a row are gathered:

1. each node digests the rows of its parts (`digest_rows`), and assembles rows that several of its parts share;
2. the rest of the rows shared with other nodes travels as fragments;
3. one process merges the results of all nodes (`RowDigests.merge`) and computes the digest
   (`RowDigests.version_digest`).

Definitions: the row digest is the 16 bytes of xxh3_128 over the row's contiguous little-endian bytes, a row being a
slice along dim 0 (a tensor of fewer than two dimensions is one row). The tensor digest is xxh3_128 of its row digests
in order. The version digest is the xxh3_128 hex of the lines ``name dtype shape digest\\n`` sorted by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from trinity_sync.errors import RunError
from trinity_sync.weights import native, shards
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shards import CoverageError, listed, shape_text
from trinity_sync.weights.tensor_rows import DIGEST_BYTES, RowBox, TensorPlan, TensorRows, joined, rows_digest, spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trinity_sync.weights.tensor_rows import RowProcesses


_PROCESS_BYTES = 16 << 20
"""For less, a request to processes or threads takes longer than digesting."""


class IncompleteError(RunError):
    """Rows of a version are missing, so it has no digest."""


@dataclass(frozen=True)
class RowDigests:
    """The row digests of some parts of a version, by tensor name. Picklable; 16 bytes a row and the fragments."""

    tensors: dict[str, TensorRows] = field(default_factory=dict)

    def merge(self, others: Iterable[RowDigests]) -> RowDigests:
        """Merge the digests of other nodes, and digest the rows whose fragments are now complete. Raises CoverageError:
        two nodes hold the same row, or disagree about a tensor's dtype or shape.
        """
        gathered: dict[str, list[TensorRows]] = {}
        for one in (self, *others):
            for name, rows in one.tensors.items():
                gathered.setdefault(name, []).append(rows)
        tensors = {name: known[0] if len(known) == 1 else _merged(name, known) for name, known in gathered.items()}
        return RowDigests(tensors)

    def tensor_digests(self) -> dict[str, bytes]:
        """Return the 16-byte digest of each tensor. Raises IncompleteError: names the tensors and rows that are
        missing. Raises CoverageError: several parts hold the same rows.
        """
        digests = {name: digest for name, known in self.tensors.items() if (digest := known.digest()) is not None}
        absent = sorted(self.tensors.keys() - digests.keys())
        missing = [f"{name} rows {self.tensors[name].missing()}" for name in absent]
        if missing:
            raise IncompleteError(f"the version has no digest, as rows are missing: {listed(missing)}")
        twice = sorted(name for name, known in self.tensors.items() if known.fragments)
        if twice:
            raise CoverageError(f"rows are held by several parts: {listed(twice)}")
        return digests

    def version_digest(self, tensors: Mapping[str, bytes] | None = None) -> str:
        """Return the version digest in hex, from the `tensor_digests` if given. Raises the same errors."""
        digests = self.tensor_digests() if tensors is None else tensors
        return version_digest((name, known.dtype, known.shape, digests[name]) for name, known in self.tensors.items())


def bucket_digests(buffer: Segment, layout: PartLayout, pool: Executor | None = None) -> list[bytes]:
    """Return the xxh3_128 digest (16 bytes) of each bucket of a segment, in the order of `PartLayout.buckets`."""
    view = layout.view(buffer)
    spans = [view[start:stop] for start, stop in layout.buckets()]
    return list(pool.map(xxh3_128_digest, spans) if pool else map(xxh3_128_digest, spans))


def digest_rows(parts: Sequence[tuple[PartLayout, Segment]], pool: Executor | None = None) -> RowDigests:
    """Digest the rows of all parts of the node, straight from their segments; see `RowPlan` for repeated use and
    errors.
    """
    return RowPlan([layout for layout, _ in parts]).digest([buffer for _, buffer in parts], pool)


class RowPlan:
    """The rows of all parts of a node, and their places: computed once for the layouts, used for every version. Raises
    CoverageError: two parts hold the same element, or disagree about a tensor's dtype or shape.
    """

    def __init__(self, layouts: Sequence[PartLayout]) -> None:
        self._layouts = list(layouts)
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        pieces: dict[str, list[RowBox]] = {}
        for part, layout in enumerate(self._layouts):
            for shard, offset in layout.entries:
                if kinds.setdefault(shard.name, (shard.dtype, shard.shape)) != (shard.dtype, shard.shape):
                    raise _disagreement(shard.name)
                size = shards.itemsize(shard.dtype)
                pieces.setdefault(shard.name, []).extend(
                    RowBox(rect.row, rect.col * size, rect.rows, rect.cols * size, part, offset + rect.offset)
                    for rect in shard.rects
                )
        self._tensors = [TensorPlan(name, kind, pieces[name]) for name, kind in kinds.items()]
        self._whole = spans(piece for tensor in self._tensors for piece in tensor.whole())
        self._whole_bytes = sum(span.rows.rows * span.rows.width for span in self._whole)

    def digest(
        self,
        segments: Sequence[Segment],
        pool: Executor | None = None,
        processes: tuple[RowProcesses, Sequence[str]] | None = None,
    ) -> RowDigests:
        """Digest the rows. Segments are in the order of the layouts, and free once this returns.

        Whole rows are digested in place. Rows split over several of the parts are assembled first; incomplete ones are
        copied into fragments.

        Raises LayoutError if a segment is too small. `pool`: threads; without the native library for long rows only.
        `processes`: for other rows, with the files of the segments.
        """
        parts = zip(self._layouts, segments, strict=True)
        views = [np.asarray(layout.view(segment)) for layout, segment in parts]
        known = self._digest_whole(views, pool, processes)
        return RowDigests({tensor.name: tensor.digest(views, pool, known) for tensor in self._tensors})

    def _digest_whole(
        self,
        views: Sequence[NDArray[np.uint8]],
        pool: Executor | None,
        processes: tuple[RowProcesses, Sequence[str]] | None,
    ) -> dict[tuple[int, int], bytes]:
        """Return the digests of whole rows for which xxhash keeps the interpreter lock, by part and byte."""

        def here(number: int) -> bytes:
            return rows_digest(self._whole[number].rows.data(views))

        if self._whole_bytes >= _PROCESS_BYTES and pool is not None and native.library() is not None:
            done = _shared_work(pool, here, len(self._whole))
        elif processes is None or self._whole_bytes < _PROCESS_BYTES:
            done = [here(number) for number in range(len(self._whole))]
        else:
            helpers, paths = processes
            asked = [(paths[rows.part], rows.at, rows.rows, rows.width) for rows, _, _ in self._whole]
            done = helpers.digest(asked, here)
        return dict(piece for span, digests in zip(self._whole, done, strict=True) for piece in span.cut(digests))


def _shared_work(pool: Executor, task: Callable[[int], bytes], count: int) -> list[bytes]:
    """Do numbered tasks on the threads of a pool and on this one; return their results."""
    done, numbers = [b""] * count, iter(range(count))  # its steps are atomic

    def work() -> None:
        for number in numbers:
            done[number] = task(number)

    others = [pool.submit(work) for _ in range(min(count, os.cpu_count() or 1))]
    work()
    for other in others:
        other.result()
    return done


def version_digest(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> str:
    """Return the version digest in hex of (name, dtype, shape, 16-byte tensor digest) of all tensors, in any order."""
    lines = [f"{name} {dtype} {_text(tuple(shape))} {digest.hex()}\n" for name, dtype, shape, digest in sorted(tensors)]
    return str(xxh3_128_hexdigest("".join(lines).encode()))


_text = lru_cache(1024)(shape_text)


def _merged(name: str, known: Sequence[TensorRows]) -> TensorRows:
    dtype, shape = known[0].dtype, known[0].shape
    if any((one.dtype, one.shape) != (dtype, shape) for one in known):
        raise _disagreement(name)
    size = shards.itemsize(dtype)
    fragments = [fragment for one in known for fragment in one.fragments]
    pieces = [
        RowBox(one.row, one.col * size, one.rows, one.cols * size, number, 0) for number, one in enumerate(fragments)
    ]
    views = [np.frombuffer(one.data, np.uint8) for one in fragments]
    glued = TensorPlan(name, (dtype, shape), pieces).digest(views, None, {})
    runs = joined(sorted([run for one in known for run in one.runs] + list(glued.runs)))
    for (row, digests), (after, _) in pairwise(runs):
        if row + len(digests) // DIGEST_BYTES > after:
            raise CoverageError(f"{name}: row {after} is held by two nodes; each row must be in one only")
    return TensorRows(dtype, shape, runs, glued.fragments)


def _disagreement(name: str) -> CoverageError:
    return CoverageError(f"{name}: its dtype or shape differs between parts; all ranks must describe one tensor alike")


class RowBook:
    """Row digests by tensor, which a load collects in any order."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, bytes]] = {}

    def add(self, name: str, first: int, digests: bytes) -> None:
        """Add the digests, 16 bytes each, of consecutive rows that have none yet."""
        self._known.setdefault(name, {})[first] = digests

    def missing(self, name: str, rows: int) -> list[tuple[int, int]]:
        if len(self._known.get(name, {}).get(0, b"")) == rows * DIGEST_BYTES:  # added in one call, as most are
            return []
        known = sorted(self._known.get(name, {}).items())
        ends = [0, *(first + len(digests) // DIGEST_BYTES for first, digests in known)]
        starts = [*(first for first, _ in known), rows]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]

    def digests(self, name: str) -> bytes:
        known = sorted(self._known.get(name, {}).items())
        if len(known) == 1:
            return known[0][1]
        assert all(first + len(digests) // DIGEST_BYTES == after for (first, digests), (after, _) in pairwise(known))
        return b"".join(digests for _, digests in known)
