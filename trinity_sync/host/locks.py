"""Lock files and folders in places where others can write, such as `/dev/shm`, `/tmp` and a shared checkpoint folder.

Links are not followed, only regular files are locked (a pipe would block), and every wait for a lock has a timeout.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from functools import partial
from pathlib import Path

from trinity_sync.errors import WaitTimeout
from trinity_sync.host.threads import comes_true

_POLL_S = 0.02


class ForeignFileError(OSError):
    """The path is a link, of another kind, or another user's."""


def open_lock(path: Path, *, create: bool = True, writable: bool = True, mode: int = 0o600) -> int:
    """Open a lock file, which is not locked yet; return its descriptor. `mode`: permissions of a created file. Raises
    ForeignFileError: it is not a regular file.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise ForeignFileError(error.errno, f"{path} is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ForeignFileError(errno.EINVAL, f"{path} is not a regular file", str(path))
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file (`shared`: with others that share it) if it is free; return whether it is locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, path: Path, timeout_s: float, *, shared: bool = False) -> None:
    """Lock an open file (`shared`: with others that share it), and wait until it is free."""
    if not comes_true(partial(try_lock, descriptor, shared=shared), timeout_s, _POLL_S):
        raise WaitTimeout(_owner(descriptor), f"release its lock on {path}", timeout_s)


def _owner(descriptor: int) -> str:
    """Name the process that has locked an open file."""
    found = os.fstat(descriptor)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []
    for fields in (line.split() for line in lines):
        if fields[1] == "FLOCK" and fields[5] == f"{device}:{found.st_ino}" and int(fields[4]) > 0:
            return f"process {fields[4]}"
    return "another process"


def check_no_link(folder: Path) -> Path:
    """Return a folder for writing; a ForeignFileError if it is a link."""
    if folder.is_symlink():
        raise ForeignFileError(errno.ELOOP, f"{folder} is a link", str(folder))
    return folder


def own_name(name: str) -> str:
    """Return a name with this user's id."""
    return f"{name}-{os.geteuid()}"


def is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, and not a link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def open_own_folder(path: Path, *, create: bool) -> int:
    """Open a private folder of this user; return its descriptor. Where others can write, it belongs to the first
    creator. Raises ForeignFileError: a link, something else or another user's folder has the name. Raises
    FileNotFoundError: it is missing, without `create`.
    """
    if create:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise _not_ours(path, path.lstat()) from None
        raise
    found = os.fstat(descriptor)
    # Where only this user can write, a network file system may show another owner.
    if found.st_uid != os.geteuid() and path.parent.stat().st_mode & 0o022:
        os.close(descriptor)
        raise _not_ours(path, found)
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.fchmod(descriptor, 0o700)
    return descriptor


def _not_ours(path: Path, found: os.stat_result) -> ForeignFileError:
    is_folder = stat.S_ISDIR(found.st_mode)
    kind = f"a folder of user {found.st_uid}" if is_folder else "a link" if stat.S_ISLNK(found.st_mode) else "a file"
    return ForeignFileError(errno.EPERM, f"{path} is {kind}, not a folder of user {os.geteuid()}", str(path))
