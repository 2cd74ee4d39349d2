"""The digest of a file. Loads nothing heavy: who looks at checkpoints needs no numpy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_128

from trinity_sync.host.yielding import piece

PIECE_BYTES = 4 << 20
"""A multiple of all disks' blocks, and little enough to stay in the processor's cache."""


def digest_file(path: Path, *, durable: bool = False, progress: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Digest a file. Best right after writing, from the page cache.

    Args:
        path: the file.
        durable: fsync it as well.
        progress: called with the number of bytes read so far.

    Returns:
        Its size in bytes, and its xxh3_128 digest as hex.
    """
    hasher = xxh3_128()
    size = 0
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:

        def read() -> int:
            count = file.readinto(buffer)
            hasher.update(view[:count])
            return count

        while count := piece(read):
            size += count
            if progress is not None:
                progress(size)
        if durable:
            os.fsync(file.fileno())
    return size, str(hasher.hexdigest())
