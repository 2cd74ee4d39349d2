"""The digests of one tensor's rows, from the pieces of it that lie in segments.

Whole rows are digested in place; rows of which several pieces lie here are put together first; what stays incomplete
is copied into fragments, to be put together with those of other nodes. `digests` makes a version's digest of them.

A pool may be any executor of *threads*: xxhash lets go of the interpreter lock while it digests long inputs. Shorter
rows are digested by the caller, where threads would only fight for the lock, or by processes (`row_process`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from trinity_sync.weights import dtypes, short_rows
from trinity_sync.weights.shards import CoverageError, matrix_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIGEST_BYTES = 16
_BATCH_BYTES = 1 << 20
"""Bytes of rows per task, and so of the temporary in which split rows are put together: it stays in the cache."""
_POOL_ROW_BYTES = (64 << 10) + 1
"""Below this xxhash keeps the interpreter lock, so threads gain nothing."""
_EMPTY_ROW = xxh3_128_digest(b"")


class Fragment(NamedTuple):
    """A rectangle of a tensor's matrix view whose rows are not complete on this node, with its bytes.

    Attributes:
        row, col, rows, cols: the rectangle, columns in elements.
        data: its elements row by row.
    """

    row: int
    col: int
    rows: int
    cols: int
    data: bytes


class TensorRows(NamedTuple):
    """What is known of one tensor's rows.

    Attributes:
        dtype: safetensors name.
        shape: global shape.
        runs: (first row, 16 bytes per row) of consecutive rows whose digests are known, ascending and apart.
        fragments: pieces of rows that are not known.
    """

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, bytes], ...]
    fragments: tuple[Fragment, ...]

    def digest(self) -> bytes | None:
        """The 16-byte digest of the tensor; None where rows are missing."""
        rows, known = row_count(self.shape), self.runs
        if not rows:
            return xxh3_128_digest(_EMPTY_ROW * matrix_view(self.shape)[0])
        if len(known) == 1 and known[0][0] == 0 and len(known[0][1]) == rows * DIGEST_BYTES:
            return xxh3_128_digest(known[0][1])
        return None

    def missing(self) -> str:
        """The rows without a digest, as text: ``"0-3, 7"``."""
        spans: list[str] = []
        end = 0
        for row, digests in (*self.runs, (row_count(self.shape), b"")):
            if row > end:
                spans.append(f"{end}-{row - 1}" if row > end + 1 else str(end))
            end = row + len(digests) // DIGEST_BYTES
        return ", ".join(spans)


@lru_cache(1024)
def row_count(shape: tuple[int, ...]) -> int:
    """How many rows of a tensor have elements."""
    return matrix_view(shape)[0] if prod(shape) else 0


def rows_digest(matrix: NDArray[np.uint8]) -> bytes:
    """The concatenated digests of the rows of a contiguous uint8 matrix of shape (rows, bytes per row)."""
    rows, length = matrix.shape
    if length in short_rows.LENGTHS and rows >= short_rows.worth_while(length):
        return short_rows.digests(matrix)
    return b"".join(map(xxh3_128_digest, matrix))


class Piece(NamedTuple):
    """A rectangle and where its bytes are, row by row.

    Attributes:
        row: the first row in the tensor.
        start: the first byte in the row.
        rows: how many rows.
        width: bytes per row.
        part: the number of the part.
        at: the first byte in the part's segment.
    """

    row: int
    start: int
    rows: int
    width: int
    part: int
    at: int

    @property
    def place(self) -> tuple[int, int]:
        """Part and byte: no other piece has the same."""
        return self.part, self.at

    @property
    def row_stop(self) -> int:
        return self.row + self.rows

    @property
    def stop(self) -> int:
        return self.start + self.width

    def cut(self, row: int, row_stop: int) -> Piece:
        """The part of it that lies in these rows."""
        if row == self.row and row_stop == self.row + self.rows:
            return self
        at = self.at + (row - self.row) * self.width
        return Piece(row, self.start, row_stop - row, self.width, self.part, at)

    def data(self, views: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """Its bytes, of shape (rows, width)."""
        return views[self.part][self.at : self.at + self.rows * self.width].reshape(self.rows, self.width)


class Span(NamedTuple):
    """Whole rows of one width that lie one after another in a part, of any number of tensors: digested at once.

    Attributes:
        rows: all of them; of its attributes `row` says nothing.
        places: of the pieces that they are.
        ends: for each piece how many bytes of digests there are up to its last row.
    """

    rows: Piece
    places: list[tuple[int, int]]
    ends: list[int]

    def cut(self, digests: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
        """Yield the place of each piece and its digests, from those of all rows."""
        start = 0
        for place, end in zip(self.places, self.ends, strict=True):
            yield place, digests[start:end]
            start = end


def spans(pieces: Iterable[Piece]) -> list[Span]:
    """Pieces of whole rows, together where they lie together, up to what is digested at a time."""
    groups: list[list[Piece]] = []
    last, nbytes = None, 0
    for piece in sorted(pieces, key=attrgetter("part", "at")):
        length = piece.rows * piece.width
        nbytes += length
        if (piece.part, piece.at, piece.width) == last and nbytes <= _BATCH_BYTES:
            groups[-1].append(piece)
        else:
            groups.append([piece])
            nbytes = length
        last = piece.part, piece.at + length, piece.width
    return [
        Span(
            group[0]._replace(rows=sum(piece.rows for piece in group)),
            [piece.place for piece in group],
            [count * DIGEST_BYTES for count in accumulate(piece.rows for piece in group)],
        )
        for group in groups
    ]


class TensorPlan:
    """How to digest the rows of one tensor.

    Args:
        name: the tensor's name.
        kind: its dtype and global shape.
        pieces: what is held of it.
    """

    def __init__(self, name: str, kind: tuple[str, tuple[int, ...]], pieces: Sequence[Piece]) -> None:
        self.name = name
        self._kind = kind
        self._itemsize = dtypes.itemsize(kind[0])
        self._row_bytes = matrix_view(kind[1])[1] * self._itemsize
        step = max(1, _BATCH_BYTES // max(self._row_bytes, 1))
        self._batches: list[tuple[Piece, ...]] = []
        self._fragments: list[Piece] = []
        for band in _bands(name, pieces):
            if sum(piece.width for piece in band) < self._row_bytes:
                self._fragments.extend(band)
                continue
            for row in range(band[0].row, band[0].row_stop, step):
                self._batches.append(tuple(piece.cut(row, min(row + step, piece.row_stop)) for piece in band))
        single = len(self._batches) == 1 == len(self._batches[0]) and not self._fragments
        self._only = self._batches[0][0] if single and self._row_bytes < _POOL_ROW_BYTES else None

    def whole(self) -> Iterator[Piece]:
        """The pieces of whole rows that threads would not speed up."""
        if self._row_bytes < _POOL_ROW_BYTES:
            yield from (batch[0] for batch in self._batches if len(batch) == 1)

    def digest(
        self, views: Sequence[NDArray[np.uint8]], pool: Executor | None, elsewhere: Mapping[tuple[int, int], bytes]
    ) -> TensorRows:
        """The rows' digests, where they are not among those that were made elsewhere."""
        if self._only is not None:  # a small tensor, of which there may be many
            only = self._only
            digests = elsewhere.get(only.place) or rows_digest(only.data(views))
            return TensorRows(*self._kind, ((only.row, digests),), ())
        threads = pool if self._row_bytes >= _POOL_ROW_BYTES else None
        begun: list[tuple[int, bytes | Future[bytes]]] = []
        for batch in self._batches:
            done = elsewhere.get(batch[0].place) if len(batch) == 1 else None
            if done is not None:
                begun.append((batch[0].row, done))
            elif threads is not None:
                begun.append((batch[0].row, threads.submit(_batch_digest, batch, views)))
            else:
                begun.append((batch[0].row, _batch_digest(batch, views)))
        runs = [(row, done.result() if isinstance(done, Future) else done) for row, done in begun]
        fragments = tuple(self._fragment(piece, views) for piece in self._fragments)
        return TensorRows(*self._kind, joined(runs), fragments)

    def _fragment(self, piece: Piece, views: Sequence[NDArray[np.uint8]]) -> Fragment:
        columns = piece.start // self._itemsize, piece.rows, piece.width // self._itemsize
        return Fragment(piece.row, *columns, piece.data(views).tobytes())


def _bands(name: str, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Cut pieces into bands of rows in which each piece has all rows of the band, pieces by column, bands by row."""
    waiting = sorted(pieces, key=lambda piece: piece.row, reverse=True)
    active: list[Piece] = []
    while waiting or active:
        row = active[0].row if active else waiting[-1].row
        while waiting and waiting[-1].row == row:
            active.append(waiting.pop())
        row_stop = min([piece.row_stop for piece in active] + ([waiting[-1].row] if waiting else []))
        band = sorted((piece.cut(row, row_stop) for piece in active), key=lambda piece: piece.start)
        if any(left.stop > right.start for left, right in pairwise(band)):
            raise CoverageError(f"{name}: row {row} is held twice; each element must be in one part only")
        yield band
        active = [piece.cut(row_stop, piece.row_stop) for piece in active if piece.row_stop > row_stop]


def _batch_digest(band: Sequence[Piece], views: Sequence[NDArray[np.uint8]]) -> bytes:
    """The row digests of pieces that together make whole rows."""
    if len(band) == 1:
        return rows_digest(band[0].data(views))
    glued = np.empty((band[0].rows, band[-1].stop), np.uint8)
    for piece in band:
        glued[:, piece.start : piece.stop] = piece.data(views)
    return rows_digest(glued)


def joined(runs: Sequence[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """Runs, given in ascending order, with those that follow each other joined."""
    groups: list[tuple[int, list[bytes]]] = []
    end = -1
    for row, digests in runs:
        if row == end:
            groups[-1][1].append(digests)
        else:
            groups.append((row, [digests]))
        end = row + len(digests) // DIGEST_BYTES
    return tuple((row, b"".join(parts)) for row, parts in groups)
