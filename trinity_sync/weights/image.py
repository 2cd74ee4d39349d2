"""Writing a file of which the large pieces lie in a segment of shared memory. No torch: the node agent does it.

Whoever made the file left holes in it (`weights.torch_file`), so that what lies between them is there already. The
whole file, which is written once from beginning to end, takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from trinity_sync.errors import RunError
from trinity_sync.host.file_digest import digest_file
from trinity_sync.weights.digested_file import DigestedFile
from trinity_sync.weights.layout import Segment

Extent = tuple[int, int, int]
"""(offset in the file, offset in the segment, length), in bytes."""

_CHUNK_BYTES = 1 << 20


class ImageError(RunError):
    """The extents do not fit the file or the segment."""


def write_image(path: Path, extents: Sequence[Extent], segment: Segment, *, durable: bool) -> tuple[int, str]:
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
    if not extents:
        return digest_file(path, durable=durable)
    source = memoryview(segment).cast("B")
    whole = path.with_name(f"{path.name}.whole")
    with path.open("rb") as skeleton, DigestedFile(whole, durable=durable) as file:
        size = os.fstat(skeleton.fileno()).st_size
        end = 0
        for offset, at, length in extents:
            if offset < end or offset + length > size or at + length > len(source):
                raise ImageError(
                    f"{path}: {length} bytes at {offset} of {size}, from {at} of {len(source)}, do not fit"
                )
            _copy(skeleton, end, offset, file)
            file.write(source[at : at + length])
            end = offset + length
        _copy(skeleton, end, size, file)
        found = file.finish()
    whole.replace(path)
    return found


def _copy(source: BinaryIO, start: int, stop: int, target: DigestedFile) -> None:
    source.seek(start)
    while start < stop:
        data = source.read(min(_CHUNK_BYTES, stop - start))
        if not data:
            raise ImageError(f"the file became shorter than {stop} bytes while it was read")
        target.write(data)
        start += len(data)
