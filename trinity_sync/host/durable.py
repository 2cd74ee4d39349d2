"""What is there after a power cut: a folder's names are, once it was fsynced."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS)


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
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


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
