"""Who writes a checkpoint folder: one run at a time.

An flock on ``.lock``, which the kernel drops with the process, as for the run's own folder. The file names its holder,
for the one who is refused.

The monitor is a process of its own, which a killed driver leaves behind for a moment. So it holds a second lock for as
long as it lives, and a run that takes the folder over waits for it: else the monitor of the run before could commit a
step, and let a tracker name it, while the resume puts the folder in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from trinity_sync.errors import ConfigError

_LOCK = ".lock"
_MONITOR = ".monitor.lock"
_POLL_S = 0.05


@contextlib.contextmanager
def locked(root: Path, run: Path, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the checkpoint folder, made if it is not there, for the length of the block. No monitor writes in it then.

    Args:
        root: `checkpoint.dir`.
        run: the run's folder, for the message to others.
        timeout_s: how long to wait for the monitor of a run that was killed.

    Raises:
        ConfigError: it is no folder, cannot be written, or another run that lives holds it, or the monitor of a killed
            one does not end.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise ConfigError(f"checkpoint.dir={root} is a file; name a folder") from None
    except NotADirectoryError:
        raise ConfigError(f"checkpoint.dir={root} lies below a file; name a folder") from None
    except OSError as error:
        raise ConfigError(f"checkpoint.dir={root} cannot be written: {error.strerror}") from error
    try:
        _take(descriptor, root)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"the run in {run} ({_this_process()})".encode(), 0)
        _wait_for_monitor(root, timeout_s)
        yield
    finally:
        os.close(descriptor)


def hold_as_writer(root: Path) -> IO[bytes]:
    """Tell runs to come that this process writes in the folder. For the monitor.

    Returns:
        What the process keeps as long as it writes.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = open(root / _MONITOR, "a+b", buffering=0)  # noqa: SIM115  the caller keeps it open
    # Shared, since it keeps out nobody but a run that takes the folder over, and that one looks for an instant only.
    with contextlib.suppress(OSError):  # a file system without flock, which `locked` refuses
        fcntl.flock(file, fcntl.LOCK_SH)
    file.truncate(0)
    file.write(_this_process().encode())
    return file


def _take(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "another run"
        raise ConfigError(
            f"checkpoint.dir={root} is in use by {holder}; stop that run or name another folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"checkpoint.dir={root} cannot be locked ({error.strerror}); name a folder on a file system that has flock"
        ) from error


def _wait_for_monitor(root: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with open(root / _MONITOR, "a+b") as file:
        while not _is_free(file):
            if time.monotonic() > deadline:
                file.seek(0)
                monitor = file.read().decode(errors="replace")
                raise ConfigError(
                    f"checkpoint.dir={root}: the checkpoint monitor of the run before ({monitor}) still writes there "
                    f"after {timeout_s:.0f} s; end that process or name another folder"
                )
            time.sleep(_POLL_S)


def _is_free(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
