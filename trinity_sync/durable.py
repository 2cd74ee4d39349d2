"""Names that are there after a power cut: a folder's are, once it was fsynced."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; nothing on file systems that cannot fsync a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there, durable; also where an earlier try came to its making only.

    Raises:
        OSError: it cannot be made.
    """
    absent = [folder for folder in path.parents if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in (path, *absent):
        with suppress(PermissionError):  # somebody else's, which may be entered only
            sync_folder(folder.parent)
