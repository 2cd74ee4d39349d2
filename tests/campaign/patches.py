"""Puts the simulated file system and clock in place of the process's own, for paths below ``/sim``.

At the level of `os`, `io.open`, `fcntl` and libc's ``renameat2``: the code under test is not changed.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import io
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.campaign.filesystem import PREFIX, FileSystem, Folder, Raw

_MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
          "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}  # fmt: skip
_FIRST_DESCRIPTOR = 1_000_000


def _ours(path: Any) -> str | None:
    if type(path) is not str:
        if isinstance(path, (int, bytes)) or path is None:
            return None
        path = os.fspath(path)
    return path if isinstance(path, str) and (path == PREFIX or path.startswith(PREFIX + "/")) else None


class _Entry:
    """What `os.scandir` yields."""

    def __init__(self, system: FileSystem, folder: str, name: str, node: Any) -> None:
        self._system, self.name, self.path, self._node = system, name, f"{folder}/{name}", node

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return isinstance(self._node, Folder)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not isinstance(self._node, Folder)

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._system.stat(self.path)

    def inode(self) -> int:
        return int(self._node.ino)

    def __fspath__(self) -> str:
        return self.path


class _Scan:
    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass


class _Libc:
    """libc, of which only ``renameat2`` is asked for."""

    def __init__(self, system: FileSystem, real: Any) -> None:
        self._system, self._real = system, real

    def renameat2(self, _: int, first: bytes, __: int, second: bytes, flags: int) -> int:
        try:
            if flags == 2:
                self._system.exchange(os.fsdecode(first), os.fsdecode(second))
            elif flags == 1 and self._system.find(os.fsdecode(second)) is not None:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            else:
                self._system.rename(os.fsdecode(first), os.fsdecode(second))
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _operations(system: FileSystem) -> dict[str, Callable[..., Any]]:
    """The functions of `os`, by name, for paths of ours."""

    def scandir(path: str) -> _Scan:
        return _Scan([_Entry(system, path.rstrip("/"), name, node) for name, node in system.listing(path)])

    def lstat(path: str, **_: Any) -> os.stat_result:
        return system.stat(path)

    return {
        "stat": lstat,
        "lstat": lstat,
        "scandir": scandir,
        "listdir": lambda path: [name for name, _ in system.listing(path)],
        "mkdir": lambda path, mode=0o777, **_: system.mkdir(path),
        "rmdir": lambda path, **_: system.rmdir(path),
        "unlink": lambda path, **_: system.unlink(path),
        "remove": lambda path, **_: system.unlink(path),
        "rename": lambda path, target, **_: system.rename(path, os.fspath(target)),
        "replace": lambda path, target, **_: system.rename(path, os.fspath(target)),
        "link": lambda path, target, **_: system.link(path, os.fspath(target)),
        "open": lambda path, flags, mode=0o777, **_: system.open(path, flags),
        "access": lambda path, mode, **_: system.find(path) is not None,
        "chmod": lambda path, mode, **_: None,
        "utime": lambda path, *_, **__: system.stat(path) and None,  # raises where there is nothing
    }


def _descriptor_operations(system: FileSystem) -> dict[str, Callable[..., Any]]:
    return {
        "close": system.close,
        "fsync": system.fsync,
        "fdatasync": system.fsync,
        "read": system.read,
        "write": lambda number, data: system.write(number, bytes(data)),
        "pread": lambda number, size, offset: system.read(number, size, offset),
        "pwrite": lambda number, data, offset: system.write(number, bytes(data), offset),
        "ftruncate": system.truncate,
        "truncate": system.truncate,
        "fstat": system.fstat,
        "stat": lambda number, **_: system.fstat(number),
        "fchmod": lambda number, mode: None,
    }


def _open_file(system: FileSystem, real: Callable[..., Any]) -> Callable[..., Any]:
    def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
              newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        path = _ours(file)
        fresh = path is not None
        if not fresh and not (isinstance(file, int) and file >= _FIRST_DESCRIPTOR):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        kind = next(letter for letter in mode if letter in _MODES)
        flags = _MODES[kind]
        if "+" in mode:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        if path is None:
            descriptor, path = file, system.handles[file].path
        else:
            descriptor = opener(path, flags) if opener is not None else system.open(path, flags)
        reads, writes = kind == "r" or "+" in mode, kind != "r" or "+" in mode
        raw = Raw(system, descriptor, path, reads=reads, writes=writes)
        if buffering == 0:
            return raw
        wrap = io.BufferedRandom if reads and writes else io.BufferedReader if reads else io.BufferedWriter
        buffered = wrap(raw)  # type: ignore[arg-type]
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    return open_


@contextlib.contextmanager
def installed(
    system: FileSystem,
    *,
    pid: Callable[[], int],
    token: Callable[[int], str],
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Within the block, paths below ``/sim`` are the system's, and time, process ids and nonces the campaign's. Without
    `clock`, time is that of the process, whose other threads would never pause.
    """
    undo: list[tuple[Any, str, Any]] = []

    def put(place: Any, name: str, value: Any) -> None:
        undo.append((place, name, getattr(place, name)))
        setattr(place, name, value)

    def dispatch(name: str, ours: Callable[..., Any] | None, descriptor: Callable[..., Any] | None) -> Any:
        real = getattr(os, name)

        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if type(path) is int:
                if path >= _FIRST_DESCRIPTOR and descriptor is not None:
                    return descriptor(path, *args, **kwargs)
            elif ours is not None and (found := _ours(path)) is not None:
                return ours(found, *args, **kwargs)
            return real(path, *args, **kwargs)

        return call

    by_path, by_number = _operations(system), _descriptor_operations(system)
    for name in by_path.keys() | by_number.keys():
        put(os, name, dispatch(name, by_path.get(name), by_number.get(name)))
    real_flock, real_libc = fcntl.flock, ctypes.CDLL

    def flock(file: Any, mode: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if number < _FIRST_DESCRIPTOR:
            real_flock(number, mode)
            return
        while not system.flock(number, mode):
            if mode & fcntl.LOCK_NB:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
            sleep(0.05)

    put(fcntl, "flock", flock)
    put(ctypes, "CDLL", lambda name=None, *args, **kwargs: _Libc(system, real_libc(name, *args, **kwargs)))
    put(builtins, "open", _open_file(system, builtins.open))
    put(io, "open", builtins.open)
    put(shutil, "_use_fd_functions", False)
    put(shutil, "_USE_CP_SENDFILE", False)
    if clock is not None:
        put(time, "time", clock)
        put(time, "monotonic", clock)
        put(time, "sleep", sleep)
    put(os, "getpid", pid)
    put(secrets, "token_hex", token)
    try:
        yield
    finally:
        for place, name, value in reversed(undo):
            setattr(place, name, value)
