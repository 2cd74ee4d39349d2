"""What is there after a power cut: a file's bytes are once it was fsynced, its name once its folder was."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trinity_sync.host.listing import walk

_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS)


def replace_file(path: Path, data: bytes | str | Iterable[str], *, durable: bool = True) -> None:
    """Replace a file: a reader, or a crash at any moment, sees the old bytes or the new ones.

    Args:
        data: the new contents; a text, or pieces of one as they come, is written in UTF-8.
        durable: the new contents are there after a power cut, too.

    Raises:
        OSError: the disk refuses; where it did so before the end, the old file is still there.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # no pid: hosts may share the folder
    try:
        with open(draft, "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                file.writelines(piece.encode() for piece in ([data] if isinstance(data, str) else data))
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
    """Write to a descriptor until all is written: one call may take only part of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; nothing on file systems that cannot fsync a folder."""
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
    """Make a folder and those above it; all that are on its file system are durable then, whoever made them.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = path.absolute()
    while not os.path.ismount(folder):
        folder = folder.parent
        with suppress(PermissionError):  # somebody else's, which may be entered only
            sync_folder(folder)
