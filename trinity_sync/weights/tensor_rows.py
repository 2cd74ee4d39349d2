"""The digests of one tensor's rows, from its pieces in segments.

Whole rows are digested in place; rows in several pieces of this node are assembled first; incomplete rows are copied
into fragments, to be assembled with those of other nodes. `weights.digests` makes a version's digest of them.

A pool may be any executor of *threads*: xxhash releases the interpreter lock while it digests long inputs, and the
native library always. Without the library shorter rows are digested by the caller, because threads would only fight for
the lock, or by processes (`RowProcesses`).
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from trinity_sync.host.child_process import Child, start_child
from trinity_sync.weights import native, shards
from trinity_sync.weights.shards import CoverageError, matrix_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIGEST_BYTES = 16
_BATCH_BYTES = 1 << 20
"""Bytes of rows per task, and so of the temporary for split rows: it stays in the cache."""
_POOL_ROW_BYTES = (64 << 10) + 1
"""For shorter rows xxhash keeps the interpreter lock, so threads gain nothing."""
_COMPILED_ROWS = 16
"""For fewer, a call of the native library takes longer than one of xxhash for each row."""
_EMPTY_ROW = xxh3_128_digest(b"")


class Fragment(NamedTuple):
    """A rectangle (columns in elements) of a tensor's matrix view whose rows are incomplete on this node, with its
    bytes row by row.
    """

    row: int
    col: int
    rows: int
    cols: int
    data: bytes


class TensorRows(NamedTuple):
    """The known digests of one tensor's rows."""

    dtype: str  # safetensors name
    shape: tuple[int, ...]  # global
    runs: tuple[tuple[int, bytes], ...]  # (first row, 16 bytes per row) of consecutive rows, ascending, not adjacent
    fragments: tuple[Fragment, ...]  # pieces of the other rows

    def digest(self) -> bytes | None:
        """Return the 16-byte digest of the tensor; None where rows are missing."""
        rows, known = row_count(self.shape), self.runs
        if not rows:
            return xxh3_128_digest(_EMPTY_ROW * matrix_view(self.shape)[0])
        if len(known) == 1 and known[0][0] == 0 and len(known[0][1]) == rows * DIGEST_BYTES:
            return xxh3_128_digest(known[0][1])
        return None

    def missing(self) -> str:
        """Return the rows without a digest, as text: ``"0-3, 7"``."""
        spans: list[str] = []
        end = 0
        for row, digests in (*self.runs, (row_count(self.shape), b"")):
            if row > end:
                spans.append(f"{end}-{row - 1}" if row > end + 1 else str(end))
            end = row + len(digests) // DIGEST_BYTES
        return ", ".join(spans)


@lru_cache(1024)
def row_count(shape: tuple[int, ...]) -> int:
    """Return the number of a tensor's rows with elements."""
    return matrix_view(shape)[0] if prod(shape) else 0


def rows_digest(matrix: NDArray[np.uint8]) -> bytes:
    """Return the concatenated digests of the rows of a contiguous uint8 matrix of shape (rows, bytes per row)."""
    rows, length = matrix.shape
    compiled = native.library() if rows >= _COMPILED_ROWS and length < _POOL_ROW_BYTES else None
    if compiled is not None:
        return compiled.row_digests(matrix)
    return b"".join(map(xxh3_128_digest, matrix))


class RowBox(NamedTuple):
    """A rectangle of a tensor, and the place of its bytes, row by row."""

    row: int  # the first row in the tensor
    start: int  # the first byte in the row
    rows: int
    width: int  # bytes per row
    part: int  # number of the part
    at: int  # the first byte in the part's segment

    @property
    def place(self) -> tuple[int, int]:
        return self.part, self.at

    @property
    def row_stop(self) -> int:
        return self.row + self.rows

    @property
    def stop(self) -> int:
        return self.start + self.width

    def cut(self, row: int, row_stop: int) -> RowBox:
        if row == self.row and row_stop == self.row + self.rows:
            return self
        at = self.at + (row - self.row) * self.width
        return RowBox(row, self.start, row_stop - row, self.width, self.part, at)

    def data(self, views: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        return views[self.part][self.at : self.at + self.rows * self.width].reshape(self.rows, self.width)


class TensorSpan(NamedTuple):
    """Whole rows of one width that are adjacent in a part, of any number of tensors: digested in one call."""

    rows: RowBox  # all of them; its `row` is meaningless
    places: list[tuple[int, int]]  # of their pieces
    ends: list[int]  # for each piece the bytes of digests up to its last row

    def cut(self, digests: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
        start = 0
        for place, end in zip(self.places, self.ends, strict=True):
            yield place, digests[start:end]
            start = end


def spans(pieces: Iterable[RowBox]) -> list[TensorSpan]:
    """Merge adjacent pieces of whole rows, up to the bytes of one task."""
    groups: list[list[RowBox]] = []
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
        TensorSpan(
            group[0]._replace(rows=sum(piece.rows for piece in group)),
            [piece.place for piece in group],
            [count * DIGEST_BYTES for count in accumulate(piece.rows for piece in group)],
        )
        for group in groups
    ]


class TensorPlan:
    """The steps to digest the rows of one tensor.

    `kind`: its dtype and global shape; `pieces`: its pieces on this node.
    """

    def __init__(self, name: str, kind: tuple[str, tuple[int, ...]], pieces: Sequence[RowBox]) -> None:
        self.name = name
        self._kind = kind
        self._itemsize = shards.itemsize(kind[0])
        self._row_bytes = matrix_view(kind[1])[1] * self._itemsize
        step = max(1, _BATCH_BYTES // max(self._row_bytes, 1))
        self._batches: list[tuple[RowBox, ...]] = []
        self._fragments: list[RowBox] = []
        for band in _bands(name, pieces):
            if sum(piece.width for piece in band) < self._row_bytes:
                self._fragments.extend(band)
                continue
            for row in range(band[0].row, band[0].row_stop, step):
                self._batches.append(tuple(piece.cut(row, min(row + step, piece.row_stop)) for piece in band))
        single = len(self._batches) == 1 == len(self._batches[0]) and not self._fragments
        self._only = self._batches[0][0] if single and self._row_bytes < _POOL_ROW_BYTES else None

    def whole(self) -> Iterator[RowBox]:
        """Yield the pieces of whole rows that threads would not speed up."""
        if self._row_bytes < _POOL_ROW_BYTES:
            yield from (batch[0] for batch in self._batches if len(batch) == 1)

    def digest(
        self, views: Sequence[NDArray[np.uint8]], pool: Executor | None, elsewhere: Mapping[tuple[int, int], bytes]
    ) -> TensorRows:
        if self._only is not None:  # a small tensor; there may be many
            only = self._only
            digests = elsewhere.get(only.place) or rows_digest(only.data(views))
            return TensorRows(*self._kind, ((only.row, digests),), ())
        threads = pool if self._row_bytes >= _POOL_ROW_BYTES else None
        pending: list[tuple[int, bytes | Future[bytes]]] = []
        for batch in self._batches:
            done = elsewhere.get(batch[0].place) if len(batch) == 1 else None
            if done is not None:
                pending.append((batch[0].row, done))
            elif threads is not None:
                pending.append((batch[0].row, threads.submit(_batch_digest, batch, views)))
            else:
                pending.append((batch[0].row, _batch_digest(batch, views)))
        runs = [(row, done.result() if isinstance(done, Future) else done) for row, done in pending]
        fragments = tuple(self._fragment(piece, views) for piece in self._fragments)
        return TensorRows(*self._kind, joined(runs), fragments)

    def _fragment(self, piece: RowBox, views: Sequence[NDArray[np.uint8]]) -> Fragment:
        columns = piece.start // self._itemsize, piece.rows, piece.width // self._itemsize
        return Fragment(piece.row, *columns, piece.data(views).tobytes())


def _bands(name: str, pieces: Sequence[RowBox]) -> Iterator[list[RowBox]]:
    """Cut pieces into bands of rows in which each piece has all rows of the band, pieces by column, bands by row."""
    waiting = sorted(pieces, key=lambda piece: piece.row, reverse=True)
    active: list[RowBox] = []
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


def _batch_digest(band: Sequence[RowBox], views: Sequence[NDArray[np.uint8]]) -> bytes:
    """Return the row digests of pieces that together make whole rows."""
    if len(band) == 1:
        return rows_digest(band[0].data(views))
    matrix = np.empty((band[0].rows, band[-1].stop), np.uint8)
    for piece in band:
        matrix[:, piece.start : piece.stop] = piece.data(views)
    return rows_digest(matrix)


def joined(runs: Sequence[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """Join adjacent runs, given in ascending order."""
    groups: list[tuple[int, list[bytes]]] = []
    end = -1
    for row, digests in runs:
        if row == end:
            groups[-1][1].append(digests)
        else:
            groups.append((row, [digests]))
        end = row + len(digests) // DIGEST_BYTES
    return tuple((row, b"".join(parts)) for row, parts in groups)


# Digests of rows by other processes: threads cannot hash short rows concurrently, because xxhash keeps the interpreter
# lock for less than 64 KiB.

_ANSWER_S = 60.0
"""Timeout of a process's answer; after it the caller digests the rows itself."""
RowSpan = tuple[str, int, int, int]
"""File of a segment, first byte of the rows, number of rows, and bytes per row."""


class RowProcesses:
    """Processes that digest rows of segments. They start at the first use, and end with `close` or with this process.

    `count`: their number; the caller of `digest` works too.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._processes: list[Child] = []

    def digest(self, spans: Sequence[RowSpan], here: Callable[[int], bytes]) -> list[bytes]:
        """Return for each span the 16-byte digests of its rows, one after another.

        `here` digests one span, by its number, in this process, which has its share too.
        """
        with self._lock:
            while len(self._processes) < self._count:
                self._processes.append(start_child(__name__, None))
            first, *shares = _shares(spans, 1 + len(self._processes))
            helpers = list(self._processes)
            for child, share in zip(helpers, shares, strict=True):
                with suppress(OSError):  # it has ended, and will not answer
                    child.pipe.send(list(spans[share.start : share.stop]))
            try:
                found = [here(number) for number in first]
                for child, share in zip(helpers, shares, strict=True):
                    answer = _answer(child)
                    if answer is None:  # it died or was stopped, or could not map the segment
                        self._end()
                    found += [here(number) for number in share] if answer is None else answer
            except BaseException:
                self._end()  # an answer left in the pipe would be taken for the next one
                raise
            return found

    def close(self) -> None:
        """End the processes; a later `digest` starts them again."""
        for child in list(self._processes):  # before the lock: a caller may have it while it waits for a hung process
            child.process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        for child in self._processes:
            child.end()
            child.pipe.close()
        self._processes.clear()


def _shares(spans: Sequence[RowSpan], count: int) -> list[range]:
    ends = list(accumulate(rows * width for _, _, rows, width in spans))
    total = ends[-1] if ends else 0
    cuts = [0, *(bisect_left(ends, total * share / count) for share in range(1, count)), len(spans)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _answer(child: Child) -> list[bytes] | None:
    try:
        if not child.pipe.poll(_ANSWER_S):
            return None
        found: list[bytes] = child.pipe.recv()
    except (EOFError, OSError):
        return None
    return found


def _digest(spans: Sequence[RowSpan], maps: dict[str, NDArray[np.uint8]]) -> list[bytes]:
    found = []
    for path, start, rows, width in spans:
        if path not in maps:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                maps[path] = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
            finally:
                os.close(descriptor)
        matrix: NDArray[np.uint8] = maps[path][start : start + rows * width].reshape(rows, width)
        found.append(rows_digest(matrix))
    return found


def serve(descriptor: int) -> None:
    """Answer requests as the child process until the connection to its parent is closed."""
    maps: dict[str, NDArray[np.uint8]] = {}
    with Connection(descriptor) as connection, suppress(Exception):  # the parent digests the rows of a failed request
        while True:
            connection.send(_digest(connection.recv(), maps))
