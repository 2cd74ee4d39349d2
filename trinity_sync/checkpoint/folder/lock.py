"""Locks a checkpoint folder for one run at a time.

The lock is an flock on ``.lock``, as for the run's own folder; the kernel drops it with the process. The file names the
run, for the message to a refused one.

The monitor is a process of its own, and outlives a killed driver for a moment. So it has a second lock while it lives,
and a run that takes the folder over waits for it. Otherwise the old monitor could commit a step and move a tracker
while the resume puts the folder in order. A monitor that starts later sees that another run writes in the folder, and
ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from trinity_sync.checkpoint.folder.leases import make_leases_folder
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.durable import make_folder
from trinity_sync.host.locks import open_lock, try_lock, wait_for_lock


class InUseError(ConfigError):
    """Another live run writes in the folder."""


_LOCK = ".lock"
_MONITOR = ".monitor.lock"
_LOCK_S = 60.0


class FolderLock:
    """The lock of a checkpoint folder."""

    def __init__(self, descriptor: int, run: Path) -> None:
        self._descriptor = descriptor
        self._run = run

    def sign(self, word: str) -> None:
        """Write a word that identifies the run, see `writer_of` and `word_of`."""
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"the run in {self._run} ({_this_process()})\n{word}".encode(), 0)
        os.fsync(self._descriptor)  # other nodes read it


@contextlib.contextmanager
def locked(
    root: Path,
    run: Path,
    *,
    timeout_s: float = 60.0,
    word: Callable[[str], str] = lambda before: secrets.token_hex(8),
) -> Iterator[FolderLock]:
    """Lock the checkpoint folder inside the block; it is made if it is missing. No monitor writes in it meanwhile.
    Raises InUseError, ConfigError. `timeout_s`: limit of the wait for the monitor of a killed run, seconds.
    """
    try:
        make_folder(root)
        descriptor = open_lock(root / _LOCK, mode=0o644)  # readable for all, to name the writer
    except FileExistsError:
        raise ConfigError(f"checkpoint.dir={root} is a file; name a folder") from None
    except NotADirectoryError:
        raise ConfigError(f"checkpoint.dir={root} lies below a file; name a folder") from None
    except OSError as error:
        raise ConfigError(f"checkpoint.dir={root} cannot be written: {error.strerror}") from error
    try:
        _take(descriptor, root)
        lock = FolderLock(descriptor, run)
        # Before the monitor's lock: a monitor checks the two in the other order, so one of both sees the other.
        lock.sign(word(_word(_content(descriptor))))
        try:
            _wait_for_monitor(root, timeout_s)
        except WaitTimeout as late:
            monitor = _read(root / _MONITOR) or late.who
            raise ConfigError(
                f"checkpoint.dir={root}: the checkpoint monitor of the run before ({monitor}) "
                f"still writes there after {timeout_s:.0f} s; end that process, or delete {root / _MONITOR} where its "
                "machine is gone, or name another folder"
            ) from late
        _open_to_readers(root)
        yield lock
    finally:
        os.close(descriptor)


def writer_of(root: Path) -> str | None:
    """Return the identity of the run that writes in the folder, or did last; None: none did."""
    return _read(root / _LOCK) or None


def word_of(root: Path) -> str:
    """Return the word of the run that writes in the folder, or did last; empty: none did."""
    return _word(_read(root / _LOCK))


def has_no_monitor(root: Path, timeout_s: float) -> bool:
    """Wait until no monitor writes in the folder; return False if one still does after the timeout. Raises ConfigError
    if the folder cannot be written or locked.
    """
    try:
        if root.is_dir():
            _wait_for_monitor(root, timeout_s)
    except WaitTimeout:
        return False
    return True


def _wait_for_monitor(root: Path, timeout_s: float) -> None:
    try:
        descriptor = open_lock(root / _MONITOR)
        try:
            wait_for_lock(descriptor, root / _MONITOR, timeout_s)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{root / _MONITOR} cannot be locked: {error.strerror}") from error


def lock_as_writer(root: Path, expected: str | None = None) -> IO[bytes]:
    """Lock the folder for the monitor, so that later runs see that it writes there. Raises RunError, WaitTimeout.
    Returns a file to keep open while the process writes.
    """
    if expected is not None and not (root / _LOCK).exists():
        raise RunError(
            f"checkpoint.dir: {_this_process()} cannot see what the driver wrote to {root}; "
            f"it must be a folder that all nodes share"
        )
    make_folder(root)
    file = os.fdopen(open_lock(root / _MONITOR), "r+b", buffering=0)
    # Shared: it excludes only a run that takes the folder over, which holds it for an instant.
    try:
        wait_for_lock(file.fileno(), root / _MONITOR, _LOCK_S, shared=True)
    except WaitTimeout:
        file.close()
        raise
    except OSError:
        pass  # a file system without flock, which `locked` refuses
    if expected is not None and writer_of(root) != expected:
        file.close()
        raise RunError(f"{root} has been taken over by {_first_line(writer_of(root) or 'another run')}")
    _open_to_readers(root)
    with contextlib.suppress(OSError):  # a full disk: the text is only for a message
        file.truncate(0)
        file.write(_this_process().encode())
    return file


def _open_to_readers(root: Path) -> None:
    """Make the folder of leases first: one made by another user's reader may be closed to us."""
    with contextlib.suppress(OSError):  # a program that has to write there raises the error
        make_leases_folder(root)


def _take(descriptor: int, root: Path) -> None:
    try:
        if try_lock(descriptor):
            return
    except OSError as error:
        raise ConfigError(
            f"checkpoint.dir={root} cannot be locked ({error.strerror}); name a folder on a file system that has flock"
        ) from error
    name = _first_line(_content(descriptor)) or "another run"
    raise InUseError(f"checkpoint.dir={root} is in use by {name}; stop that run or name another folder")


def _read(path: Path) -> str:
    try:
        descriptor = open_lock(path, create=False, writable=False)
    except OSError:
        return ""
    try:
        return _content(descriptor)
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> str:
    return os.pread(descriptor, 4096, 0).decode(errors="replace")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _word(text: str) -> str:
    return text.partition("\n")[2]


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
