"""Writing a file of which the large pieces lie in a segment of shared memory. No torch: the node agent does it.

Whoever made the file left holes in it (`weights.torch_file`), so that what lies between them is there already. Each
piece goes through the processor's cache once: digested, then written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from xxhash import xxh3_128

from trinity_sync.errors import RunError
from trinity_sync.weights.layout import Segment

Extent = tuple[int, int, int]
"""(offset in the file, offset in the segment, length), in bytes."""

_CHUNK_BYTES = 1 << 20


class ImageError(RunError):
    """The extents do not fit the file or the segment."""


def fill(path: Path, extents: Sequence[Extent], segment: Segment, *, durable: bool) -> tuple[int, str]:
    """Put bytes of a segment into the holes of a file.

    Args:
        path: a file of its final length.
        extents: ascending in the file, without overlap.
        segment: where the bytes are.
        durable: fsync, so that the bytes are on the disk when this returns.

    Returns:
        (length of the file in bytes, xxh3_128 hex of the whole file).

    Raises:
        ImageError: an extent reaches beyond the file or the segment, or into the extent before.
        OSError: the file cannot be written.
    """
    hasher = xxh3_128()
    source = memoryview(segment).cast("B")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        end = 0
        for offset, at, length in extents:
            if offset < end or offset + length > size or at + length > len(source):
                raise ImageError(
                    f"{path}: {length} bytes at {offset} of {size}, from {at} of {len(source)}, do not fit"
                )
            for piece in _read(descriptor, end, offset):
                hasher.update(piece)
            for start in range(0, length, _CHUNK_BYTES):
                held = source[at + start : at + min(start + _CHUNK_BYTES, length)]
                hasher.update(held)
                _write_all(descriptor, held, offset + start)
            end = offset + length
        for piece in _read(descriptor, end, size):
            hasher.update(piece)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, hasher.hexdigest()


def _read(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    while start < stop:
        piece = os.pread(descriptor, min(_CHUNK_BYTES, stop - start), start)
        if not piece:
            raise ImageError(f"the file became shorter than {stop} bytes while it was read")
        yield piece
        start += len(piece)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """One call may write only part of it."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
