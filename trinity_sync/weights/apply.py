"""The load: checked bytes copied from a segment into a model's tensors. Called by explorers and by tests of everything.

A `Receiver` is made once per model and takes a part bucket by bucket, from wherever the bytes come. What to copy where
is worked out once per layout (`load_plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.weights.layout import Cut, PartLayout, Segment
from trinity_sync.weights.load_plan import Copy, LoadPlan, Rows, plan_load
from trinity_sync.weights.row_book import RowBook
from trinity_sync.weights.shards import Shard, check_cover, listed, matrix_view, shape_text
from trinity_sync.weights.tensor_rows import DIGEST_BYTES, rows_digest
from trinity_sync.weights.tensors import (
    byte_tensor,
    castable,
    from_torch,
    rounds,
    row_digests,
    state_digest,
)
from trinity_sync.weights.wire import Wire


class MismatchError(RunError):
    """What was published does not fit the tensors that are to receive it."""


class ChecksumError(RunError):
    """Bytes that arrived are not the bytes that were published."""


class Receiver:
    """Tensors that take versions.

    Usage::

        receiver = Receiver(saved_tensors(model))
        receiver.check(layouts)                          # once, before a first byte is applied
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
        # The dtype, the shape, and the rows of the matrix view of each.
        self._described = {
            name: (tensor.dtype, tuple(tensor.shape), len(self._matrices[name]))
            for name, tensor in self._destinations.items()
        }
        self._cuda_devices = {tensor.device for tensor in self._destinations.values() if tensor.is_cuda}
        # By part, so that a layout that replaces another one of the same part does not leave its plan behind.
        self._plans: dict[tuple[str, Cut], LoadPlan] = {}
        self._book: RowBook | None = None
        # In which dtypes the destinations are published, as far as layouts were seen.
        self._published: dict[str, str] = {}

    def check(self, layouts: Iterable[PartLayout]) -> None:
        """Check that the layouts of all parts of a version together fill every destination exactly once.

        Raises:
            MismatchError: lists tensors that are missing or unexpected, differ in shape or in kind of dtype, or would
                be rounded.
            CoverageError: parts overlap or leave something out.
        """
        parts = [layout.shards for layout in layouts]
        published = {shard.name: shard for shards in parts for shard in shards}
        self._check_fit(published, sorted(self._destinations.keys() - published.keys()))
        check_cover(parts)

    def begin(self) -> None:
        """A version is going to be taken, and `taken` will be asked for it.

        Raises:
            MismatchError: names destinations that have other memory than they had when they were given.
        """
        here = self._destinations
        moved = [name for name, tensor in self._given.items() if tensor.data_ptr() != here[name].data_ptr()]
        if moved:
            raise MismatchError(
                f"{listed(sorted(moved))} moved to other memory since the destinations were given, so the model would "
                "not hold what is loaded; give the destinations anew"
            )
        self._book = RowBook()

    def apply(self, layout: PartLayout, buffer: Segment, digests: Sequence[bytes] | None = None) -> None:
        """Copy a part's shards into the destinations, no byte of a bucket before its digest was checked.

        After an error the destinations hold some of the new bytes: the version must be applied again, whole.

        Args:
            layout: what lies where in the part's segment.
            buffer: the part's segment, at least ``layout.nbytes``; not written meanwhile.
            digests: 16 bytes per bucket from `bucket_digests`, or None to trust the bytes.

        Raises:
            ChecksumError: names part and bucket.
            MismatchError: a shard fits no destination.
            LayoutError: the buffer is too small.
        """
        for bucket, data, digest in in_buckets(layout, buffer, digests):
            self.take(layout, bucket, data, digest)

    def take(
        self, layout: PartLayout, number: int, data: Segment, digest: bytes | None = None, cut: Cut = "bucket"
    ) -> None:
        """Copy one piece of a part into the destinations; the piece's memory is free once this returns.

        Args:
            layout: what lies where in the part's segment.
            number: which piece it is.
            data: the bytes of the piece.
            digest: what they digest to (16 bytes), or None to trust them.
            cut: what pieces the part is in.

        Raises:
            ChecksumError: names part and piece; nothing of it was copied.
            MismatchError: a shard fits no destination.
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
        finally:  # also after an error: the caller may give the piece's memory away
            for device in self._cuda_devices:
                torch.cuda.current_stream(device).synchronize()

    def destination(self, layout: PartLayout, number: int, cut: Cut) -> torch.Tensor | None:
        """The place in the destinations to which a piece can be received at once: uint8, of the piece's length, on the
        destination's device. None where its bytes have to be cast or belong to several places. `received` comes next.
        """
        return self._plan(layout, cut).destinations[number]

    def received(self, layout: PartLayout, number: int, cut: Cut) -> None:
        """A piece is at its `destination`."""
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
        """(name, dtype, shape, 16-byte digest) of every tensor that the destinations hold, in the dtype in which it
        was published: what `version_digest` makes a version's digest of. Every row was digested after it was written,
        since `begin`.
        """
        book = self._book or RowBook()
        found = []
        for name, (own, shape, rows) in self._described.items():
            dtype = self._published.get(name) or from_torch(own)
            for first, stop in book.missing(name, rows):
                book.add(name, first, row_digests(self._matrices[name][first:stop], dtype))
            found.append((name, dtype, shape, xxh3_128_digest(book.digests(name))))
        return found

    def digest(self, wire: Wire | str | None) -> str:
        """The version digest (hex) of what the destinations hold now, in the dtypes of the wire."""
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
    """(number, bytes, digest or None) of each bucket of a part's segment.

    Raises:
        ChecksumError: there is not one digest for each bucket.
        LayoutError: the buffer is too small.
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
    """Check that bytes that arrived are those that were published.

    Args:
        what: they are, for the error.
        data: the bytes.
        nbytes: how many were published.
        digest: their xxh3_128 (16 bytes), or None to trust them.

    Raises:
        ChecksumError: they are not.
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
