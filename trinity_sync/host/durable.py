"""Files that survive a power cut: a file's bytes do once it was fsynced, its name once its folder was."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128

from trinity_sync.host.threads import piece

_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS)


def replace_file(path: Path, data: bytes | str | Iterable[str | bytes], *, durable: bool = True) -> None:
    """Replace a file atomically: a reader, or a crash at any moment, sees the old bytes or the new ones."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # not the pid: hosts may share the folder
    try:
        with open(draft, "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                pieces = [data] if isinstance(data, str) else data
                file.writelines(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all data to a descriptor: one call may write only part of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; do nothing on file systems that cannot fsync a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make all files and names below a folder durable, and its own."""
    for parent, names in walk(folder):
        for name in names:
            descriptor = os.open(parent / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make all names on its file system durable, existing ones too."""
    path.mkdir(parents=True, exist_ok=True)
    folder = path.absolute()
    while not os.path.ismount(folder):
        folder = folder.parent
        with suppress(PermissionError):  # another user's folder without read permission
            sync_folder(folder)


PIECE_BYTES = 4 << 20
"""A multiple of all disks' blocks, and small enough for the processor's cache."""


def digest_file(path: Path, *, durable: bool = False, progress: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Digest a file, best right after writing, from the page cache; return its size in bytes, and its xxh3_128 digest
    as hex. `durable`: fsync it as well. `progress`: called with the number of bytes read so far.
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


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders below and last this one, each with the names of its files. A missing folder is empty."""
    for parent, _, names in os.walk(folder, topdown=False, onerror=_refuse):
        yield Path(parent), names


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
