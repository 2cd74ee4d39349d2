"""The delta of a part between two versions: `PartEncoder` on the side where both lie beside each other, `PartDelta` at
a reader.

A part is cut into pieces of one dtype (`PartLayout.by_shard`), each with a delta of its own. A reader that missed
versions takes merged deltas: the encoder makes one for each span of `SPANS` versions as well. docs/delta.md has the
format.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trinity_sync.weights import delta, native
from trinity_sync.weights.delta import DeltaError, Part, WrongBaseError
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shards import itemsize

if TYPE_CHECKING:
    from trinity_sync.weights.delta_gaps import Elements, Places

Point = tuple[int, int]
"""A version: (attempt, step)."""

SPANS = (4, 16)
"""Lengths in versions of the merged deltas. A reader that is k versions behind needs 3 + 3 + k / 16 deltas or fewer."""

_FORMAT = 1
_LENGTH_BYTES = 8
_MOST_LOGGED = 1 / 8
"""Share of a part's bytes from which on a span is given up: its log costs too much memory."""


class EncodedDelta(NamedTuple):
    """The delta of a part from one version to the encoder's newest."""

    start: Point
    parts: list[Part]  # to be written one after another, before the newest segment changes
    codecs: list[str]
    changed: int  # elements; of a span those that changed at some version in it
    elements: int


class _Piece(NamedTuple):
    parts: list[Part]
    result: bytes
    changed: int


@dataclass
class _Span:
    """The elements that changed since `start`, by piece: their places, ascending, and their bits at `start`."""

    start: Point
    digests: list[bytes]
    logs: list[tuple[Elements, Elements] | None] = field(default_factory=list)

    def note(self, number: int, old: Elements, places: Places) -> None:
        """Note the places of a piece that change now, in which it had the bits of `old`."""
        known = self.logs[number]
        if known is not None:
            places = places[~np.isin(places, known[0], assume_unique=True)]
        fresh = places.astype(np.min_scalar_type(old.size)), old[places]
        if known is not None:
            joined = [np.concatenate(pair) for pair in zip(known, fresh, strict=True)]
            order = np.argsort(joined[0], kind="stable")
            fresh = joined[0][order], joined[1][order]
        self.logs[number] = fresh

    @property
    def nbytes(self) -> int:
        return sum(places.nbytes + bits.nbytes for places, bits in filter(None, self.logs))


class PartEncoder:
    """Encodes the versions of one part, each against the one before.

    It keeps digests of the last version's pieces and the logs of the open spans, at most an eighth of the part for
    each length; the versions themselves stay where the caller has them.

    Args:
        codec: a name of `delta.CODECS`, or ``auto``: `class_gap`, without the native library `gap8z`.
    """

    def __init__(self, layout: PartLayout, codec: str) -> None:
        self._layout = layout
        self._codec = codec if codec != "auto" else "class_gap" if native.library() is not None else "gap8z"
        self._last: Point | None = None
        self._digests: list[bytes] = []
        self._count = 0
        self._spans: dict[int, _Span] = {}

    def encode(
        self, base: Point, version: Point, segments: tuple[Segment, Segment], pool: Executor
    ) -> list[EncodedDelta]:
        """Return the deltas that end at `version`: the one from `base` and those of the spans that end here.

        Args:
            base, version: `base` is the version of the last call, or spans begin anew.
            segments: the part's bytes of both. They do not change during the call.
            pool: encodes the pieces.
        """
        old, new = (_arrays(self._layout, segment) for segment in segments)
        if base != self._last:
            self._count, self._digests = 0, list(pool.map(delta.digest, old))
            self._spans = {length: self._span(base) for length in SPANS}
        self._last = None  # after an error the next call begins anew
        pieces = list(pool.map(self._piece, range(len(old)), old, new))
        self._count, self._digests = self._count + 1, [piece.result for piece in pieces]
        found = [self._joined(base, version, pieces)]
        for length in SPANS:
            span = self._spans.get(length)
            if span is not None and span.nbytes > _MOST_LOGGED * self._layout.nbytes:
                del self._spans[length]
                span = None
            if self._count % length:
                continue
            if span is not None:
                merged = pool.map(self._merged, [span] * len(new), range(len(new)), new)
                found.append(self._joined(span.start, version, list(merged)))
            self._spans[length] = self._span(version)
        self._last = version
        return found

    def _span(self, start: Point) -> _Span:
        return _Span(start, self._digests, [None] * len(self._digests))

    def _piece(self, number: int, old: Elements, new: Elements) -> _Piece:
        dtype = self._layout.by_shard[number][2]
        parts = delta.encode(old, new, dtype, self._codec, base_digest=self._digests[number])
        about = delta.describe(parts[0])
        if about is None:
            return _Piece(parts, self._digests[number], 0)
        changed = about.changes
        if self._spans or about.codec == "full":
            places = np.flatnonzero(old != new)
            changed = len(places)
            for span in self._spans.values():
                span.note(number, old, places)
        return _Piece(parts, about.result, changed)

    def _merged(self, span: _Span, number: int, new: Elements) -> _Piece:
        log, result = span.logs[number], self._digests[number]
        places, bits = (np.empty(0, np.uint8), new[:0]) if log is None else log
        before = new.copy()
        before[places] = bits
        known = {"base_digest": span.digests[number], "result_digest": result}
        parts = delta.encode(before, new, self._layout.by_shard[number][2], self._codec, **known)
        return _Piece(parts, result, len(places))

    def _joined(self, start: Point, version: Point, pieces: Sequence[_Piece]) -> EncodedDelta:
        described = [delta.describe(piece.parts[0]) for piece in pieces]
        head = json.dumps(
            {
                "format": _FORMAT,
                "part": self._layout.part,
                "layout": self._layout.digest,
                "from": start,
                "to": version,
                "pieces": [[sum(map(len, piece.parts)), piece.result.hex()] for piece in pieces],
            },
            separators=(",", ":"),
        ).encode()
        parts: list[Part] = [len(head).to_bytes(_LENGTH_BYTES, "little"), head]
        return EncodedDelta(
            start,
            parts + [part for piece in pieces for part in piece.parts],
            sorted({about.codec for about in described if about is not None}),
            sum(piece.changed for piece in pieces),
            sum((stop - start) // itemsize(dtype) for start, stop, dtype in self._layout.by_shard),
        )


class PartDelta:
    """The delta of a part, read.

    Args:
        layout: of the part.
        data: of the whole delta; the caller has checked its digest.

    Attributes:
        start, version: it leads from one to the other.
        digests: of the pieces of `version`.

    Raises:
        DeltaError: it is damaged, of another format, or of another layout.
    """

    def __init__(self, layout: PartLayout, data: bytes | memoryview) -> None:
        self._layout = layout
        view = memoryview(data)
        end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
        try:
            head = json.loads(bytes(view[_LENGTH_BYTES:end]))
            known = head["format"], head["part"], head["layout"]
            self.start, self.version = _point(head["from"]), _point(head["to"])
            lengths = [int(length) for length, _ in head["pieces"]]
            self.digests = [bytes.fromhex(digest) for _, digest in head["pieces"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DeltaError(f"a damaged delta of {layout.part}: {type(error).__name__}: {error}") from error
        if known[0] != _FORMAT:
            raise DeltaError(f"a delta of a part in format {known[0]}; this program reads format {_FORMAT}")
        if known[1:] != (layout.part, layout.digest):
            raise WrongBaseError(f"a delta of {known[1]} in layout {known[2]}, not of {layout.part} in {layout.digest}")
        ends = np.cumsum([end, *lengths]).tolist()
        if len(lengths) != len(layout.by_shard) or min(lengths, default=1) < 1 or ends[-1] != len(view):
            raise DeltaError(f"a damaged delta of {layout.part}: its pieces are not those of the part")
        self._pieces = [view[start:stop] for start, stop in itertools.pairwise(ends)]

    def piece(self, number: int) -> memoryview | None:
        """Return the delta of a piece; None: the piece has not changed."""
        piece = self._pieces[number]
        return piece if len(piece) > 1 else None


def _arrays(layout: PartLayout, segment: Segment) -> list[Elements]:
    """Return the pieces of a segment as integers that hold the bits of their elements."""
    view = layout.view(segment)
    return [np.frombuffer(view[start:stop], f"<u{itemsize(dtype)}") for start, stop, dtype in layout.by_shard]


def _point(value: Sequence[int]) -> Point:
    attempt, step = value
    return int(attempt), int(step)
