"""The place of each shard in the segment of a part, and the buckets of the segment.

A part is what one rank stages: its shards one after another, each on a 64-byte boundary. The layout is agreed once per
run and travels as JSON; its digest names it. The same layout describes the segment, the bytes on the wire and the data
section of a shard file.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypedDict

import xxhash

from trinity_sync.errors import RunError
from trinity_sync.weights.shards import Rect, Shard, itemsize

Segment = bytes | bytearray | memoryview | mmap.mmap
"""The memory of a part's bytes."""

ALIGNMENT = 64
"""Bytes: one cache line, and a multiple of every element size, so typed views of any shard are aligned."""


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to the next possible start of a shard."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


Cut = Literal["bucket", "tensor", "shard"]
"""How a part is cut into messages: see `PartLayout.pieces`."""

_ALONE_BYTES = 1 << 20
"""From this size on, the cost of a message per call is small."""


class ShardEntry(TypedDict):
    """A shard and its place, as plain values."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    rects: list[list[int]]


class LayoutJson(TypedDict):
    """A layout as plain values, for the wire and the shard file."""

    part: str
    nbytes: int
    bucket_bytes: int
    entries: list[ShardEntry]


class LayoutError(RunError):
    """A received layout is malformed, or a buffer is too small for it."""


@dataclass(frozen=True)
class PartLayout:
    """The place of each shard in a part's segment.

    Usage::

        layout = PartLayout.build("rank-00000", backend.shards(), bucket_bytes=4 << 20)
        segment = map_segment(path, layout.nbytes, writable=True)
        stage(layout, backend.sources(), segment)
        digests = bucket_digests(segment, layout)

    Attributes:
        part: the part's name, such as ``"rank-00000"``.
        entries: (shard, byte offset in the segment), ascending; the bytes between shards are zero.
        nbytes: length of the segment, up to the last byte of the last shard.
        bucket_bytes: length of a bucket; the last one may be shorter.

    Raises:
        ValueError: shards overlap, are out of order or misaligned, a tensor appears twice, or the bucket length is not
            a positive multiple of 64.
    """

    part: str
    entries: tuple[tuple[Shard, int], ...]
    nbytes: int
    bucket_bytes: int

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"{self.part}: {self.bucket_bytes} bytes per bucket; expected a multiple of {ALIGNMENT}")
        names: set[str] = set()
        end = 0
        for shard, offset in self.entries:
            if shard.name in names:
                raise ValueError(f"{self.part}: {shard.name} appears twice; give one shard with several rectangles")
            if offset < end or offset % ALIGNMENT:
                raise ValueError(
                    f"{self.part}: {shard.name} starts at byte {offset}, in the shard before or misaligned"
                )
            names.add(shard.name)
            end = offset + shard.nbytes
        if self.nbytes != end:
            raise ValueError(f"{self.part}: the segment has {self.nbytes} bytes but its shards end at {end}")

    def __reduce__(self) -> tuple[Callable[[LayoutJson], PartLayout], tuple[LayoutJson]]:
        """Travel as plain values, so that the receiver checks the layout and digests what arrived."""
        return PartLayout.from_json, (self.to_json(),)

    @classmethod
    def build(cls, part: str, shards: Iterable[Shard], bucket_bytes: int) -> PartLayout:
        """Lay out shards (at most one per tensor) one after another, each on a 64-byte boundary.

        `bucket_bytes`: a positive multiple of 64.
        """
        entries: list[tuple[Shard, int]] = []
        end = 0
        for shard in shards:
            offset = aligned(end)
            entries.append((shard, offset))
            end = offset + shard.nbytes
        return cls(part, tuple(entries), end, bucket_bytes)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard, _ in self.entries)

    @cached_property
    def table(self) -> list[tuple[str, str, int, int, int]]:
        """(name, dtype, local elements, first byte, last byte + 1) of each shard."""
        return [
            (shard.name, shard.dtype, numel, offset, offset + numel * itemsize(shard.dtype))
            for shard, offset in self.entries
            for numel in (shard.numel_local,)
        ]

    def buckets(self) -> list[tuple[int, int]]:
        """Return (start, stop) of each bucket in bytes, covering ``[0, nbytes)``. They may cut a shard, never an
        element.
        """
        return self._by_bucket

    @cached_property
    def _by_bucket(self) -> list[tuple[int, int]]:
        return [
            (start, min(start + self.bucket_bytes, self.nbytes)) for start in range(0, self.nbytes, self.bucket_bytes)
        ]

    def pieces(self, cut: Cut) -> list[tuple[int, int]]:
        """Return (start, stop) in bytes of each message. `cut`: ``bucket``: `buckets`. ``tensor``: a large shard
        travels by itself, in pieces of a bucket's length from its own start, so that it can be received in its
        destination; small ones travel together. ``shard``: as ``tensor``, but each shard by itself, so that a piece has
        one dtype. The gaps between shards are left out.
        """
        if cut == "shard":
            return self._by_shard
        return self._by_bucket if cut == "bucket" else self._by_tensor

    @cached_property
    def by_shard(self) -> list[tuple[int, int, str]]:
        """(start, stop) in bytes and the dtype of each piece of the cut ``shard``."""
        return [
            (at, min(at + self.bucket_bytes, end), dtype)
            for _, dtype, _, start, end in self.table
            for at in range(start, end, self.bucket_bytes)
        ]

    @cached_property
    def _by_shard(self) -> list[tuple[int, int]]:
        return [(start, stop) for start, stop, _ in self.by_shard]

    @cached_property
    def _by_tensor(self) -> list[tuple[int, int]]:
        alone = min(_ALONE_BYTES, self.bucket_bytes)
        pieces: list[tuple[int, int]] = []
        open_piece = False
        for shard, offset in self.entries:
            end = offset + shard.nbytes
            if shard.nbytes >= alone:
                pieces += [(at, min(at + self.bucket_bytes, end)) for at in range(offset, end, self.bucket_bytes)]
                open_piece = False
            elif open_piece and end - pieces[-1][0] <= self.bucket_bytes:
                pieces[-1] = (pieces[-1][0], end)
            elif shard.nbytes:
                pieces.append((offset, end))
                open_piece = True
        return pieces

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """(start, stop) in bytes of each alignment gap between shards. These bytes are zero."""
        ends = [0, *(end for *_, end in self.table)]
        return [(end, start) for end, (*_, start, _) in zip(ends, self.table, strict=False) if start > end]

    def view(self, buffer: Segment) -> memoryview:
        """Return the segment's first ``nbytes`` bytes without a copy, or raise a `LayoutError` if the buffer is too
        small.

        The view keeps the buffer from being closed while it is in use.
        """
        view = memoryview(buffer).cast("B")
        if len(view) < self.nbytes:
            raise LayoutError(f"part {self.part} needs {self.nbytes} bytes, but only {len(view)} are there: it is torn")
        return view[: self.nbytes]

    @cached_property
    def digest(self) -> str:
        """xxh3_128 hex of the canonical JSON. Two layouts with one digest are the same."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return str(xxhash.xxh3_128_hexdigest(text.encode()))

    def only(self, names: Container[str]) -> PartLayout:
        """Return the layout of some of its tensors, at their places in the same segment."""
        entries = tuple((shard, offset) for shard, offset in self.entries if shard.name in names)
        end = entries[-1][1] + entries[-1][0].nbytes if entries else 0
        return PartLayout(self.part, entries, end, self.bucket_bytes)

    def lies_as(self, other: PartLayout) -> bool:
        """Return whether a segment of the other layout holds the same part, byte for byte; buckets may differ."""
        return (self.part, self.entries) == (other.part, other.entries)

    def to_json(self) -> LayoutJson:
        return {
            "part": self.part,
            "nbytes": self.nbytes,
            "bucket_bytes": self.bucket_bytes,
            "entries": [
                {
                    "name": shard.name,
                    "dtype": shard.dtype,
                    "shape": list(shard.shape),
                    "offset": offset,
                    "rects": [list(rect) for rect in shard.rects],
                }
                for shard, offset in self.entries
            ],
        }

    @classmethod
    def from_json(cls, data: LayoutJson) -> PartLayout:
        """Return the layout that `to_json` described. Raises LayoutError: keys are missing or of another type, or the
        values are not a valid layout.
        """
        try:
            entries = []
            for entry in data["entries"]:
                rects = tuple(Rect(*rect) for rect in entry["rects"])
                entries.append((Shard(entry["name"], entry["dtype"], tuple(entry["shape"]), rects), entry["offset"]))
            return cls(data["part"], tuple(entries), data["nbytes"], data["bucket_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"not a valid part layout: {type(error).__name__}: {error}") from error
