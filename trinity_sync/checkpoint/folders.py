"""What not every file system can: let two folders change places in one step, give a file a second name."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

#: What `os.link` says where a file cannot be linked: not every shared file system has hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS)


def exchange(first: Path, second: Path) -> bool:
    """Let two folders change places in one step; False where the file system cannot (some network ones)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, swap = -100, 2
    if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(second))


def link(source: Path, target: Path) -> bool:
    """Hard-link a file, in a folder that is made where it is not there; False where the file system cannot."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> None:
    """Hard-link a file as `link` does; copy it where that cannot be done, or where `copy` says so."""
    if copy or not link(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
