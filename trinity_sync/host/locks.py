"""Lock files and folders in places where others can write, such as `/dev/shm`, `/tmp` and a shared checkpoint folder.

No link is followed, nothing but a regular file is locked (a pipe would be waited for), and every wait for a lock ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from trinity_sync.errors import WaitTimeout

_POLL_S = 0.02


class ForeignFileError(OSError):
    """What has the name that we want is a link, of another kind, or somebody else's."""


def open_lock(path: Path, *, create: bool = True, writable: bool = True, mode: int = 0o600) -> int:
    """Open a lock file, which is not locked yet; return its descriptor.

    Args:
        path: the lock file.
        create: make it where it is not there.
        writable: open it to write into it; else only to look at it.
        mode: permissions of a file that is made.

    Raises:
        ForeignFileError: it is no regular file.
        OSError: it cannot be opened.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise ForeignFileError(error.errno, f"{path} is no regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ForeignFileError(errno.EINVAL, f"{path} is no regular file", str(path))
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file if nobody else has locked it; return whether it is locked.

    Args:
        shared: let others lock it too, if they share it as well.

    Raises:
        OSError: the file system has no flock.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, path: Path, timeout_s: float, *, shared: bool = False) -> None:
    """Lock an open file, once nobody else has locked it.

    Args:
        descriptor: the open file.
        path: its path, for the message.
        timeout_s: limit, seconds.
        shared: let others lock it too, if they share it as well.

    Raises:
        WaitTimeout: it is still locked; names who has locked it, as far as the kernel tells.
        OSError: the file system has no flock.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            raise WaitTimeout(_owner(descriptor), f"let go of its lock on {path}", timeout_s)
        time.sleep(_POLL_S)


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
    """Return a folder that is about to be written to; ForeignFileError where a link has its name."""
    if folder.is_symlink():
        raise ForeignFileError(errno.ELOOP, f"{folder} is a link", str(folder))
    return folder


def own_name(name: str) -> str:
    """Return a name of this user's own, where each user has one."""
    return f"{name}-{os.geteuid()}"


def is_own_folder(path: Path) -> bool:
    """Return whether this user made a folder: what is there is no link, and belongs to them."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def open_own_folder(path: Path, *, create: bool) -> int:
    """Open a folder that nobody but this user may look into; return its descriptor.

    Args:
        path: the folder; where others can write too, it belongs to whoever was first.
        create: make it where it is not there.

    Raises:
        ForeignFileError: a link, something else or another user's folder has the name.
        FileNotFoundError: it is not there and is not to be made.
        OSError: it cannot be made or opened.
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
    # Where nobody else can write, a network file system may show another owner than the one who writes.
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
