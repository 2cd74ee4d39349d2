"""Where each shard of a part lies in the part's segment of shared memory, and how the segment is cut into buckets.

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
"""What the bytes of a part may be held in."""

ALIGNMENT = 64
"""Bytes. A multiple of every element size and one cache line, so typed views of any shard are aligned."""


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to where the next shard may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


Cut = Literal["bucket", "tensor"]
"""How a part is cut into pieces that travel one by one: see `PartLayout.pieces`."""

_ALONE_BYTES = 1 << 20
"""A message of this size costs little more to send than its bytes."""


class ShardEntry(TypedDict):
    """A shard and its place, as plain values."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    rects: list[list[int]]


class LayoutJson(TypedDict):
    """A layout as plain values: what travels, and what a shard file keeps."""

    part: str
    nbytes: int
    bucket_bytes: int
    entries: list[ShardEntry]


class LayoutError(RunError):
    """A layout that was received is malformed, or a buffer is too small for it."""


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
        """Travel as plain values: who receives a layout checks it, and its digest is of what arrived."""
        return PartLayout.from_json, (self.to_json(),)

    @classmethod
    def build(cls, part: str, shards: Iterable[Shard], bucket_bytes: int) -> PartLayout:
        """Lay out shards one after another, in the given order, each on a 64-byte boundary.

        Args:
            part: the part's name.
            shards: at most one per tensor.
            bucket_bytes: a positive multiple of 64.
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
        """The shards in the order of the segment."""
        return tuple(shard for shard, _ in self.entries)

    @cached_property
    def table(self) -> list[tuple[str, str, int, int, int]]:
        """(name, dtype, elements held, first byte, last byte + 1) of each shard, worked out once for all versions."""
        return [
            (shard.name, shard.dtype, numel, offset, offset + numel * itemsize(shard.dtype))
            for shard, offset in self.entries
            for numel in (shard.numel_local,)
        ]

    def buckets(self) -> list[tuple[int, int]]:
        """(start, stop) of each bucket in bytes, covering ``[0, nbytes)``. They may cut a shard, never an element."""
        return self._by_bucket

    @cached_property
    def _by_bucket(self) -> list[tuple[int, int]]:
        return [
            (start, min(start + self.bucket_bytes, self.nbytes)) for start in range(0, self.nbytes, self.bucket_bytes)
        ]

    def pieces(self, cut: Cut) -> list[tuple[int, int]]:
        """(start, stop) in bytes of what travels at a time.

        Args:
            cut: ``bucket``: `buckets`. ``tensor``: a large shard travels by itself, in pieces of a bucket's length from
                its own start, so that it can be received where it belongs; small ones travel together. What lies
                between shards for alignment is left out.
        """
        return self._by_bucket if cut == "bucket" else self._by_tensor

    @cached_property
    def _by_tensor(self) -> list[tuple[int, int]]:
        alone = min(_ALONE_BYTES, self.bucket_bytes)
        pieces: list[tuple[int, int]] = []
        goes_on = False
        for shard, offset in self.entries:
            end = offset + shard.nbytes
            if shard.nbytes >= alone:
                pieces += [(at, min(at + self.bucket_bytes, end)) for at in range(offset, end, self.bucket_bytes)]
                goes_on = False
            elif goes_on and end - pieces[-1][0] <= self.bucket_bytes:
                pieces[-1] = (pieces[-1][0], end)
            elif shard.nbytes:
                pieces.append((offset, end))
                goes_on = True
        return pieces

    def gaps(self) -> list[tuple[int, int]]:
        """(start, stop) in bytes of what lies between shards for alignment. These bytes are zero."""
        return self._gaps

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        ends = [0, *(end for *_, end in self.table)]
        return [(end, start) for end, (*_, start, _) in zip(ends, self.table, strict=False) if start > end]

    def view(self, buffer: Segment) -> memoryview:
        """The segment's bytes, without a copy and without what a larger buffer holds behind them.

        Args:
            buffer: at least ``nbytes``.

        Returns:
            ``nbytes`` bytes, writable if the buffer is. It keeps the buffer from being closed while it is in use.

        Raises:
            LayoutError: the buffer is too small.
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
        """The layout of some of its tensors, where they lie in the same segment."""
        entries = tuple((shard, offset) for shard, offset in self.entries if shard.name in names)
        end = entries[-1][1] + entries[-1][0].nbytes if entries else 0
        return PartLayout(self.part, entries, end, self.bucket_bytes)

    def lies_as(self, other: PartLayout) -> bool:
        """Whether a segment of the other layout holds the same part, byte for byte; in which buckets does not count."""
        return (self.part, self.entries) == (other.part, other.entries)

    def to_json(self) -> LayoutJson:
        """A dict of plain values, from which `from_json` makes an equal layout."""
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
        """The layout that `to_json` described.

        Raises:
            LayoutError: keys are missing or of another type, or what they say is not a valid layout.
        """
        try:
            entries = tuple(
                (
                    Shard(
                        entry["name"], entry["dtype"], tuple(entry["shape"]), tuple(Rect(*r) for r in entry["rects"])
                    ),
                    entry["offset"],
                )
                for entry in data["entries"]
            )
            return cls(data["part"], entries, data["nbytes"], data["bucket_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"not a valid part layout: {type(error).__name__}: {error}") from error
