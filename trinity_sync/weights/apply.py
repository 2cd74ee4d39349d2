"""The load: checked bytes copied from a segment into a model's tensors. Called by explorers and by tests of everything.

A `Receiver` is made once per model. What to copy where is worked out once per layout and cut at bucket boundaries, so
that a repeated load is a loop of "digest a bucket, copy what is in it" while the bucket is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shards import Shard, check_cover, listed, matrix_view, shape_text
from trinity_sync.weights.tensors import byte_tensor, castable, from_torch, state_digest, to_torch


class MismatchError(RunError):
    """What was published does not fit the tensors that are to receive it."""


class ChecksumError(RunError):
    """Bytes that arrived are not the bytes that were published."""


class _Run(NamedTuple):
    """Local elements in their order, and where they go.

    Attributes:
        target: the destination, cut along its first dimension into units.
        start: byte in the segment at which the elements start.
        unit: bytes of one unit in the segment.
        dtype: of the segment's elements; None to copy bytes as they are (`target` is uint8 then).
    """

    target: torch.Tensor
    start: int
    unit: int
    dtype: torch.dtype | None


class _Copy(NamedTuple):
    """One copy of a load: segment bytes ``[start, stop)`` in a dtype (None: as bytes) to a destination."""

    start: int
    stop: int
    dtype: torch.dtype | None
    target: torch.Tensor


class _Plan(NamedTuple):
    """The copies of a layout, by the bucket in which their last byte lies."""

    digest: str
    buckets: list[tuple[int, int]]
    copies: list[list[_Copy]]


class Receiver:
    """Tensors that take versions.

    Usage::

        receiver = Receiver(saved_tensors(model))
        receiver.check(layouts)                          # once, before a first byte is applied
        for layout, segment, digests in version:
            receiver.apply(layout, segment, digests)
        assert receiver.digest("BF16") == version_digest

    Args:
        destinations: by Hugging Face name, each with the tensor's global shape; any device, any floating dtype for
            floating tensors. Written in place.

    Raises:
        ValueError: a destination's rows are not evenly strided (its matrix view would be a copy).
    """

    def __init__(self, destinations: Mapping[str, torch.Tensor]) -> None:
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
        self._cuda_devices = {tensor.device for tensor in self._destinations.values() if tensor.is_cuda}
        # By part, so that a layout that replaces another one of the same part does not leave its plan behind.
        self._plans: dict[str, _Plan] = {}

    def check(self, layouts: Iterable[PartLayout]) -> None:
        """Check that the layouts of all parts of a version together fill every destination exactly once.

        Raises:
            MismatchError: lists tensors that are missing, unexpected, or differ in shape or in kind of dtype.
            CoverageError: parts overlap or leave something out.
        """
        parts = [layout.shards for layout in layouts]
        published = {shard.name: shard for shards in parts for shard in shards}
        self._check_fit(published, sorted(self._destinations.keys() - published.keys()))
        check_cover(parts)

    def apply(self, layout: PartLayout, buffer: Segment, digests: Sequence[bytes] | None = None) -> None:
        """Copy a part's shards into the destinations, no byte of a bucket before its digest was checked.

        After an error the destinations hold some of the new bytes: the version must be applied again, whole.

        Args:
            layout: of the part.
            buffer: the part's segment, at least ``layout.nbytes``; not written meanwhile.
            digests: 16 bytes per bucket from `bucket_digests`, or None to trust the bytes.

        Raises:
            ChecksumError: names part and bucket.
            MismatchError: a shard fits no destination.
            LayoutError: the buffer is too small.
        """
        plan = self._plan(layout)
        view = layout.view(buffer)
        segment = byte_tensor(view)
        if digests is not None and len(digests) != len(plan.buckets):
            raise ChecksumError(
                f"part {layout.part} has {len(plan.buckets)} buckets, but {len(digests)} digests were published for it"
            )
        try:
            for bucket, copies in enumerate(plan.copies):
                if digests is not None:
                    start, stop = plan.buckets[bucket]
                    _check_bucket(layout.part, bucket, view[start:stop], digests[bucket])
                for copy in copies:
                    _copy(segment, copy)
        finally:  # also after an error: the caller may give the buffer away
            for device in self._cuda_devices:
                torch.cuda.current_stream(device).synchronize()

    def digest(self, wire_dtype: str | None) -> str:
        """The version digest (hex) of what the destinations hold now, floating tensors in the wire dtype."""
        return state_digest(self._destinations, wire_dtype)

    def _check_fit(self, published: Mapping[str, Shard], missing: Sequence[str]) -> None:
        unexpected = sorted(published.keys() - self._destinations.keys())
        shapes: list[str] = []
        kinds: list[str] = []
        for name in sorted(published.keys() & self._destinations.keys()):
            shard, here = published[name], self._destinations[name]
            if shard.shape != tuple(here.shape):
                shapes.append(f"{name}: {shape_text(shard.shape)} published, {shape_text(here.shape)} here")
            elif not castable(shard.dtype, from_torch(here.dtype)):
                kinds.append(f"{name}: {shard.dtype} published, {from_torch(here.dtype)} here")
        found = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another dtype": kinds}
        problems = [f"{len(names)} {what} ({listed(names)})" for what, names in found.items() if names]
        if problems:
            raise MismatchError(f"the published tensors do not fit this model: {'; '.join(problems)}")

    def _plan(self, layout: PartLayout) -> _Plan:
        plan = self._plans.get(layout.part)
        if plan is None or plan.digest != layout.digest:
            self._check_fit({shard.name: shard for shard in layout.shards}, ())
            plan = self._plans[layout.part] = _plan(layout, self._matrices)
        return plan


def _check_bucket(part: str, bucket: int, data: memoryview, expected: bytes) -> None:
    found = xxh3_128_digest(data)
    if found != expected:
        raise ChecksumError(
            f"bucket {bucket} of part {part} ({len(data)} bytes) arrived damaged: digest {found.hex()}, "
            f"published {expected.hex()}"
        )


def _copy(segment: torch.Tensor, copy: _Copy) -> None:
    source = segment[copy.start : copy.stop]
    target = copy.target
    if copy.dtype is not None:
        source = source.view(copy.dtype).view(target.shape)
        if target.is_cuda:  # cast there: a mixed copy would cast on the CPU
            source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)


def _plan(layout: PartLayout, matrices: Mapping[str, torch.Tensor]) -> _Plan:
    """Cut a layout's runs at bucket boundaries; a unit that crosses one belongs to the bucket with its last byte."""
    buckets = layout.buckets()
    copies: list[list[_Copy]] = [[] for _ in buckets]
    for shard, offset in layout.entries:
        for run in _runs(shard, offset, matrices[shard.name]):
            done, units = 0, len(run.target)
            while done < units:
                bucket = (run.start + (done + 1) * run.unit - 1) // layout.bucket_bytes
                upto = min((buckets[bucket][1] - run.start) // run.unit, units)
                start, stop = run.start + done * run.unit, run.start + upto * run.unit
                copies[bucket].append(_Copy(start, stop, run.dtype, run.target[done:upto]))
                done = upto
    return _Plan(layout.digest, buckets, copies)


def _runs(shard: Shard, offset: int, matrix: torch.Tensor) -> list[_Run]:
    """A shard's rectangles as runs, joined where both the local bytes and the destination go on."""
    dtype = to_torch(shard.dtype)
    cols = matrix.shape[1]
    runs: list[_Run] = []
    spans: list[tuple[int, int, int]] = []  # byte in the segment, first element, last element + 1
    for rect in shard.rects:
        start = offset + rect.offset
        if not matrix.is_contiguous() or (rect.cols < cols and rect.rows > 1):
            block = matrix[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
            runs.append(_Run(block, start, rect.cols * dtype.itemsize, dtype))
            continue
        first = rect.row * cols + rect.col
        if spans and spans[-1][2] == first and spans[-1][0] + (first - spans[-1][1]) * dtype.itemsize == start:
            start, first, _ = spans.pop()
        spans.append((start, first, rect.row * cols + rect.col + rect.rows * rect.cols))
    for start, first, last in spans:
        target = matrix.view(-1)[first:last]
        if target.dtype == dtype:
            runs.append(_Run(target.view(torch.uint8), start, 1, None))
        else:
            runs.append(_Run(target, start, dtype.itemsize, dtype))
    return runs
