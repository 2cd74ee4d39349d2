"""The load: copies checked bytes from a segment into a model's tensors. Called by explorers.

A `Receiver` is made once per model and takes a part bucket by bucket, from any source of the bytes. Its copies are
planned once per layout (`plan_load`).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.weights.digests import RowBook
from trinity_sync.weights.layout import Cut, PartLayout, Segment
from trinity_sync.weights.shards import Rect, Shard, check_cover, listed, matrix_view, shape_text, whole
from trinity_sync.weights.staging import Stretch
from trinity_sync.weights.tensor_rows import DIGEST_BYTES, rows_digest
from trinity_sync.weights.tensors import (
    byte_tensor,
    castable,
    each_row_digests,
    from_torch,
    rounds,
    row_digests,
    state_digest,
    to_torch,
)
from trinity_sync.weights.wire import WireFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MismatchError(RunError):
    """The published tensors do not fit the tensors that are to receive them."""


class ChecksumError(RunError):
    """Received bytes differ from the published ones."""


class Receiver:
    """Tensors that take versions.

    Usage::

        receiver = Receiver(saved_tensors(model))
        receiver.check(layouts)                          # once, before the first byte is applied
        receiver.begin()
        for layout, segment, digests in version:
            receiver.apply(layout, segment, digests)     # or bucket by bucket: receiver.take(layout, 0, data, digest)
        assert version_digest(receiver.taken()) == published

    Args:
        destinations: by Hugging Face name, each with the tensor's global shape; any device, any floating dtype for
            floating tensors. Written in place.

    Raises:
        ValueError: a destination's rows are not evenly strided (its matrix view would be a copy).
    """

    def __init__(self, destinations: Mapping[str, torch.Tensor]) -> None:
        self._given = dict(destinations)
        self._destinations = {name: tensor.detach() for name, tensor in destinations.items()}
        self._matrices: dict[str, torch.Tensor] = {}
        for name, tensor in self._destinations.items():
            try:
                self._matrices[name] = tensor.view(matrix_view(tensor.shape))
            except RuntimeError:
                raise ValueError(
                    f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} cannot be written as a matrix "
                    f"of rows; give a contiguous tensor"
                ) from None
        # dtype, shape, number of rows of the matrix view
        self._described = {
            name: (tensor.dtype, tuple(tensor.shape), len(self._matrices[name]))
            for name, tensor in self._destinations.items()
        }
        self._cuda_devices = {tensor.device for tensor in self._destinations.values() if tensor.is_cuda}
        # By part, so that a new layout of a part replaces the old plan.
        self._plans: dict[tuple[str, Cut], LoadPlan] = {}
        self._book: RowBook | None = None
        # The published dtypes of the destinations, as far as layouts were seen.
        self._published: dict[str, str] = {}

    def check(self, layouts: Iterable[PartLayout]) -> None:
        """Check that the layouts of all parts of a version together fill every destination exactly once. Raises
        MismatchError: lists tensors that are missing or unexpected, differ in shape or in kind of dtype, or would be
        rounded. Raises CoverageError: parts overlap or leave something out.
        """
        parts = [layout.shards for layout in layouts]
        published = {shard.name: shard for shards in parts for shard in shards}
        self._check_fit(published, sorted(self._destinations.keys() - published.keys()))
        check_cover(parts)

    def begin(self) -> None:
        """Begin a version for which `taken` will be called. Raises MismatchError: names destinations whose memory was
        replaced since the constructor.
        """
        here = self._destinations
        moved = [name for name, tensor in self._given.items() if tensor.data_ptr() != here[name].data_ptr()]
        if moved:
            raise MismatchError(
                f"{listed(sorted(moved))} moved to other memory since the destinations were given, so the model would "
                "not hold the loaded weights; call it with the new destinations"
            )
        self._book = RowBook()

    def apply(self, layout: PartLayout, buffer: Segment, digests: Sequence[bytes] | None = None) -> None:
        """Copy a part's shards into the destinations, each bucket after its digest was checked.

        After an error the destinations hold some of the new bytes: the whole version must be applied again. `buffer`:
        the part's segment, not written meanwhile; `digests`: from `bucket_digests`, or None to trust the bytes.

        Raises ChecksumError: names part and bucket. Raises MismatchError if a shard fits no destination. Raises
        LayoutError: the buffer is too small.
        """
        try:
            for bucket, data, digest in in_buckets(layout, buffer, digests):
                self.take(layout, bucket, data, digest, wait=False)
        finally:  # also after an error: the caller may reuse the memory
            self.settle()

    def take(
        self,
        layout: PartLayout,
        number: int,
        data: Segment,
        digest: bytes | None = None,
        cut: Cut = "bucket",
        *,
        wait: bool = True,
    ) -> None:
        """Copy piece `number` of a part into the destinations; the memory of `data` is free once this returns, or,
        without `wait`, once `settle` does.

        `digest`: 16 bytes, or None to trust the bytes; `cut`: how the part is cut into pieces.

        Raises ChecksumError: names part and piece; nothing of it was copied. Raises MismatchError if a shard fits no
        destination.
        """
        plan = self._plan(layout, cut)
        view = memoryview(data).cast("B")
        start, stop = plan.pieces[number]
        check_bytes(f"{cut} {number} of part {layout.part}", view, stop - start, digest)
        array, tensor = np.frombuffer(view, np.uint8), byte_tensor(view)
        try:
            for copy in plan.copies[number]:
                if isinstance(copy.target, np.ndarray):
                    np.copyto(copy.target, array[copy.start : copy.stop])
                else:
                    _copy(tensor, copy, copy.target)
                self._note(copy.rows)
        finally:  # also after an error: the caller may reuse the piece's memory
            if wait:
                self.settle()

    def settle(self) -> None:
        """Wait for copies to GPUs."""
        for device in self._cuda_devices:
            torch.cuda.current_stream(device).synchronize()

    def destination(self, layout: PartLayout, number: int, cut: Cut) -> torch.Tensor | None:
        """Return the destination's bytes of a piece, to receive it there directly; call `received` afterwards.

        uint8, of the piece's length, on the destination's device. None where the bytes have to be cast or belong to
        several places.
        """
        return self._plan(layout, cut).destinations[number]

    def __call__(self, layout: PartLayout, number: int, cut: Cut) -> torch.Tensor | None:
        """See `destination`."""
        return self.destination(layout, number, cut)

    def read(self, layout: PartLayout, number: int, cut: Cut, into: memoryview) -> None:
        """Write the bytes of a piece to memory of its length, as they travel; casts may change the bits of a NaN."""
        here = byte_tensor(into)
        for copy in self._plan(layout, cut).copies[number]:
            held = torch.from_numpy(copy.target) if isinstance(copy.target, np.ndarray) else copy.target
            place = here[copy.start : copy.stop]
            if copy.dtype is not None:
                place = place.view(copy.dtype).view(held.shape)
            place.copy_(held.to(place.dtype))

    def received(self, layout: PartLayout, number: int, cut: Cut) -> None:
        for copy in self._plan(layout, cut).copies[number]:
            self._note(copy.rows)

    def _note(self, rows: Rows | None) -> None:
        if rows is None or self._book is None:
            return
        digests = _digests_of(rows)
        start = 0
        for name, first, count in rows.of:
            stop = start + count * DIGEST_BYTES
            self._book.add(name, first, digests[start:stop])
            start = stop

    def taken(self) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        """Return (name, dtype, shape, 16-byte digest) of every destination, in its published dtype, for
        `version_digest`.

        Every row was digested after it was written, since `begin`.
        """
        book = self._book or RowBook()
        dtypes = {name: self._published.get(name) or from_torch(own) for name, (own, *_) in self._described.items()}
        missing = [(name, *rows) for name, (*_, count) in self._described.items() for rows in book.missing(name, count)]
        of_each = each_row_digests((self._matrices[name][first:stop], dtypes[name]) for name, first, stop in missing)
        for (name, first, _), digests in zip(missing, of_each, strict=True):
            book.add(name, first, digests)
        return [
            (name, dtypes[name], shape, xxh3_128_digest(book.digests(name)))
            for name, (_, shape, _) in self._described.items()
        ]

    def digest(self, wire: WireFormat | str | None) -> str:
        """Return the version digest (hex) of the destinations' present values, in the dtypes of the wire."""
        return state_digest(self._destinations, wire)

    def _check_fit(self, published: Mapping[str, Shard], missing: Sequence[str]) -> None:
        unexpected = sorted(published.keys() - self._destinations.keys())
        shapes: list[str] = []
        kinds: list[str] = []
        rounded: list[str] = []
        for name in sorted(published.keys() & self._destinations.keys()):
            shard, here = published[name], self._destinations[name]
            if shard.shape != tuple(here.shape):
                shapes.append(f"{name}: {shape_text(shard.shape)} published, {shape_text(here.shape)} here")
            elif not castable(shard.dtype, from_torch(here.dtype)):
                kinds.append(f"{name}: {shard.dtype} published, {from_torch(here.dtype)} here")
            elif rounds(shard.dtype, from_torch(here.dtype)):
                rounded.append(f"{name}: {shard.dtype} published, {from_torch(here.dtype)} here")
        found = {
            "missing": missing,
            "unexpected": unexpected,
            "of another shape": shapes,
            "of another dtype": kinds,
            "that would be rounded; hold them in fp32 (explorer.dtype), or see sync.wire_dtype and sync.keep_fp32": (
                rounded
            ),
        }
        problems = [f"{len(names)} {what} ({listed(names)})" for what, names in found.items() if names]
        if problems:
            raise MismatchError(f"the published tensors do not fit this model: {'; '.join(problems)}")
        self._published |= {name: shard.dtype for name, shard in published.items()}

    def _plan(self, layout: PartLayout, cut: Cut) -> LoadPlan:
        plan = self._plans.get((layout.part, cut))
        if plan is None or plan.digest != layout.digest:
            self._check_fit({shard.name: shard for shard in layout.shards}, ())
            plan = self._plans[layout.part, cut] = plan_load(layout, layout.pieces(cut), self._matrices)
        return plan


def in_buckets(
    layout: PartLayout, buffer: Segment, digests: Sequence[bytes] | None
) -> Iterator[tuple[int, memoryview, bytes | None]]:
    """Yield (number, bytes, digest or None) of each bucket of a part's segment. Raises ChecksumError if there is not
    one digest for each bucket. Raises LayoutError if the buffer is too small.
    """
    buckets = layout.buckets()
    view = layout.view(buffer)
    if digests is not None and len(digests) != len(buckets):
        raise ChecksumError(
            f"part {layout.part} has {len(buckets)} buckets, but {len(digests)} digests were published for it"
        )
    for number, (start, stop) in enumerate(buckets):
        yield number, view[start:stop], None if digests is None else digests[number]


def check_bytes(what: str, data: memoryview, nbytes: int, digest: bytes | None) -> None:
    """Check received bytes against their published length and digest (xxh3_128, 16 bytes; None: trust them). Raises
    ChecksumError: they differ; `what` names them.
    """
    if len(data) != nbytes:
        raise ChecksumError(f"{what} has {len(data)} bytes instead of {nbytes}")
    if digest is not None and (found := xxh3_128_digest(data)) != digest:
        raise ChecksumError(f"{what} is damaged: {nbytes} bytes of digest {found.hex()}, published {digest.hex()}")


def _copy(piece: torch.Tensor, copy: Copy, target: torch.Tensor) -> None:
    source = piece[copy.start : copy.stop]
    if copy.dtype is not None:
        source = source.view(copy.dtype).view(target.shape)
        if target.is_cuda:  # cast there: a mixed copy would cast on the CPU
            source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)


def _digests_of(rows: Rows) -> bytes:
    return rows_digest(rows.data) if isinstance(rows.data, np.ndarray) else row_digests(rows.data, rows.dtype)


class ShardGroup:
    """Shards that are copied as one: whole tensors that are adjacent in the segment and in memory, such as a layer's
    experts, or any one shard. `matrix`: the matrix view of the first shard's destination.
    """

    def __init__(self, shard: Shard, offset: int, matrix: torch.Tensor) -> None:
        self._stretch = Stretch(matrix)
        self._shards = [shard]
        self._starts = [0, len(matrix)]
        self.offset, self.end = offset, offset + shard.nbytes  # bytes in the segment

    def take(self, shard: Shard, offset: int, matrix: torch.Tensor) -> bool:
        first = self._shards[0]
        fits = offset == self.end and shard.dtype == first.dtype and shard.matrix[1] == first.matrix[1]
        if not (fits and first.is_whole and shard.is_whole and self._stretch.take(matrix)):
            return False
        self._shards.append(shard)
        self._starts.append(self._starts[-1] + len(matrix))
        self.end += shard.nbytes
        return True

    @property
    def matrix(self) -> torch.Tensor:
        return self._stretch.elements().view(self._starts[-1], -1)

    @property
    def shard(self) -> Shard:
        first = self._shards[0]
        return first if len(self._shards) == 1 else whole(first.name, first.dtype, (self._starts[-1], first.matrix[1]))

    def rows(self, first: int, count: int) -> tuple[tuple[str, int, int], ...]:
        """Return the tensors of these rows; see `Rows.of`."""
        found: list[tuple[str, int, int]] = []
        number = bisect_right(self._starts, first) - 1
        while count:
            within = first - self._starts[number]
            taken = min(count, self._starts[number + 1] - first)
            found.append((self._shards[number].name, within, taken))
            first, count, number = first + taken, count - taken, number + 1
        return tuple(found)


def groups(layout: PartLayout, matrices: Mapping[str, torch.Tensor]) -> list[ShardGroup]:
    """Return a layout's shards in groups, without the empty ones."""
    found: list[ShardGroup] = []
    for shard, offset in layout.entries:
        matrix = matrices[shard.name]
        if shard.rects and not (found and found[-1].take(shard, offset, matrix)):
            found.append(ShardGroup(shard, offset, matrix))
    return found


# The copies of a load, planned once per layout.

_CACHED_BYTES = 512 << 10
"""Bytes of one copy within the CPU's memory before they are digested: fits the second-level cache of one core."""


class Rows(NamedTuple):
    """Rows that follow each other in memory, of the matrix view of one tensor or of several."""

    of: tuple[tuple[str, int, int], ...]  # (tensor, number of the first row in it, number of rows), in order
    data: torch.Tensor | NDArray[np.uint8]  # bytes, if the rows are contiguous and in wire dtype
    dtype: str  # on the wire, as safetensors names it


class Copy(NamedTuple):
    """One copy of a load."""

    start: int  # bytes of the piece
    stop: int
    dtype: torch.dtype | None  # of the bytes; None to copy them as they are (`target` is uint8 then)
    target: torch.Tensor | NDArray[np.uint8]  # an array within the CPU's memory, where a tensor costs more
    rows: Rows | None  # complete after this copy; None: there are none, or reading them back is expensive


class LoadPlan(NamedTuple):
    """The copies of a layout, by piece."""

    digest: str  # of the layout
    pieces: list[tuple[int, int]]  # (start, stop) in the segment
    copies: list[list[Copy]]
    destinations: list[torch.Tensor | None]  # the bytes in which the piece can be received as it is


def plan_load(layout: PartLayout, pieces: list[tuple[int, int]], matrices: Mapping[str, torch.Tensor]) -> LoadPlan:
    """Cut a layout's shards into copies, none of which crosses the end of a piece ((start, stop) in bytes)."""
    copies: list[list[Copy]] = [[] for _ in pieces]
    destinations: list[torch.Tensor | None] = [None] * len(pieces)
    starts, ends = [start for start, _ in pieces], [stop for _, stop in pieces]
    for group in groups(layout, matrices):
        cutter = _Cutter(group, ends)
        for copy in cutter.copies():
            number = bisect_right(starts, copy.start) - 1
            begin = starts[number]
            copies[number].append(copy._replace(start=copy.start - begin, stop=copy.stop - begin))
        for number in range(bisect_left(starts, group.offset), bisect_left(starts, group.end)):
            destinations[number] = cutter.destination(*pieces[number])
    return LoadPlan(layout.digest, pieces, copies, destinations)


class _ByteRun(NamedTuple):
    """Bytes that are contiguous in the segment and in the destination."""

    start: int  # byte in the segment
    first: int  # elements of the destination, the last one not included
    last: int


class _Cutter:
    """Cuts a group into copies at the ends of pieces and at the size of the cache, between rows where it can.

    `ends`: the ends of all pieces in the segment, ascending.
    """

    def __init__(self, group: ShardGroup, ends: Sequence[int]) -> None:
        self._group = group
        self._shard = group.shard
        self._offset = group.offset
        self._matrix = matrix = group.matrix
        self._ends = ends
        self._dtype = to_torch(self._shard.dtype)
        self._size = self._dtype.itemsize
        self._cols = matrix.shape[1]
        # A copy to a device costs per call, and is not read back from a cache.
        self._most = sys.maxsize if matrix.is_cuda else _CACHED_BYTES
        self._bytes: torch.Tensor | NDArray[np.uint8] | None = None
        self._row_bytes: NDArray[np.uint8] | None = None
        if matrix.is_contiguous() and matrix.dtype == self._dtype and matrix.numel():
            raw = matrix.view(-1).view(torch.uint8)
            self._bytes = raw if matrix.is_cuda else raw.numpy()
            if isinstance(self._bytes, np.ndarray):
                self._row_bytes = self._bytes.reshape(len(matrix), -1)

    def copies(self) -> Iterator[Copy]:
        for rect in self._shard.rects:
            if not self._is_flat(rect):
                block = self._matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
                yield from self._block(self._offset + rect.offset, block, rect.row)
        for start, first, last in self._runs:
            yield from self._flat(start, first, last)

    def destination(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the destination's bytes for these of the segment, if they are contiguous there and need no cast."""
        if self._bytes is None:
            return None
        for run in self._runs:
            begin = run.first * self._size + start - run.start
            if run.start <= start and begin + stop - start <= run.last * self._size:
                return self._matrix.view(-1).view(torch.uint8)[begin : begin + stop - start]
        return None

    def _is_flat(self, rect: Rect) -> bool:
        return self._matrix.is_contiguous() and (rect.cols == self._cols or rect.rows == 1)

    @cached_property
    def _runs(self) -> list[_ByteRun]:
        runs: list[_ByteRun] = []
        for rect in filter(self._is_flat, self._shard.rects):
            start, first = self._offset + rect.offset, rect.row * self._cols + rect.col
            last = first + rect.rows * rect.cols
            if runs and runs[-1].last == first and runs[-1].start + (first - runs[-1].first) * self._size == start:
                start, first, _ = runs.pop()
            runs.append(_ByteRun(start, first, last))
        return runs

    def _block(self, start: int, block: torch.Tensor, row: int) -> Iterator[Copy]:
        width = block.shape[1] * self._size
        for at, taken, index, within in self._pieces(start, len(block) * width, width, 0):
            if taken < width:
                col = within // self._size
                yield Copy(at, at + taken, self._dtype, block[index, col : col + taken // self._size], None)
                continue
            count = taken // width
            rows = self._rows(row + index, count) if block.shape[1] == self._cols else None
            yield Copy(at, at + taken, self._dtype, block[index : index + count], rows)

    def _flat(self, start: int, first: int, last: int) -> Iterator[Copy]:
        width = self._cols * self._size
        row, col = divmod(first, self._cols)
        for at, taken, index, within in self._pieces(start, (last - first) * self._size, width, col * self._size):
            rows = self._rows(row + index, taken // width) if not within and taken >= width else None
            begin = (row + index) * width + within
            if self._bytes is not None:
                yield Copy(at, at + taken, None, self._bytes[begin : begin + taken], rows)
            else:
                target = self._matrix.view(-1)[begin // self._size : (begin + taken) // self._size]
                yield Copy(at, at + taken, self._dtype, target, rows)

    def _pieces(self, start: int, nbytes: int, width: int, phase: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (byte in the segment, length, row, byte in the row) of whole rows of `width` bytes, or of a part of
        one.

        `phase`: byte in the first row at which the pieces begin.
        """
        done = 0
        while done < nbytes:
            row, within = divmod(phase + done, width)
            at = start + done
            room = min(nbytes - done, self._ends[bisect_right(self._ends, at)] - at)
            if within or room < width:
                taken = min(room, width - within)
            else:
                taken = max(min(room, self._most) // width, 1) * width
            yield at, taken, row, within
            done += taken

    def _rows(self, first: int, count: int) -> Rows | None:
        if self._matrix.is_cuda:
            return None
        data = self._matrix if self._row_bytes is None else self._row_bytes
        return Rows(self._group.rows(first, count), data[first : first + count], self._shard.dtype)
