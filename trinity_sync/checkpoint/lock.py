"""Who writes a checkpoint folder: one run at a time.

An flock on ``.lock``, which the kernel drops with the process, as for the run's own folder. The file names its holder,
for the one who is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from trinity_sync.errors import ConfigError

_LOCK = ".lock"


@contextlib.contextmanager
def locked(root: Path, run: Path) -> Iterator[None]:
    """Hold the checkpoint folder, made if it is not there, for the length of the block.

    Args:
        root: `checkpoint.dir`.
        run: the run's folder, for the message to others.

    Raises:
        ConfigError: it is no folder, cannot be written, or another run that lives holds it.
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"the run in {run} (pid {os.getpid()} on {socket.gethostname()})".encode(), 0)
        yield
    except BlockingIOError:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "another run"
        raise ConfigError(
            f"checkpoint.dir={root} is in use by {holder}; stop that run or name another folder"
        ) from None
    finally:
        os.close(descriptor)
