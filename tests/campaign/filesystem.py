"""A file system in memory that crashes like a real one: what was not made durable may be gone after a power cut.

Two kinds of state are kept apart, as on a disk:

- *Data* of a file is durable as of its last fsync. After a power cut a file that was changed since holds the old bytes,
  the new ones, or a part of the new ones.
- *Names* (create, link, rename, unlink, mkdir, rmdir) go into a log, and are durable when one of the folders they
  touch is fsynced, together with all that they build upon. After a power cut any part of the log may have happened, but
  in each folder only in order, and a rename in both its folders or in none.

The death of a process loses nothing. `FileSystem.before` is called ahead of every operation, with its name and its
path: there the campaign switches between processes, kills one, or raises an `OSError`.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

PREFIX = "/sim"


class File:
    """Bytes, those that are durable, and a number that tells whether they have changed."""

    __slots__ = ("data", "durable", "ino", "links", "mtime", "version")

    def __init__(self, ino: int, mtime: float) -> None:
        self.ino, self.data, self.durable = ino, b"", b""
        self.version, self.mtime, self.links = 0, mtime, 1


class Folder:
    """Names, and those that are durable."""

    __slots__ = ("durable", "ino", "names")

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.names: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node = File | Folder
Edit = tuple[Folder, str, Node | None]


@dataclass
class Handle:
    """An open file."""

    node: Node
    path: str
    owner: Any
    append: bool = False
    position: int = 0
    lock: int = 0


@dataclass
class FileSystem:
    """The tree below `/sim`, and what of it is durable.

    Args:
        before: called with (operation, path) ahead of each.
        now: seconds, for modification times.
        owner: the process that is at work; what it has open ends with it.
        exchanges: whether two folders can change places in one call; not everywhere.
    """

    before: Callable[[str, str], None] = lambda operation, path: None
    now: Callable[[], float] = lambda: 0.0
    owner: Callable[[], Any] = lambda: None
    exchanges: bool = True
    root: Folder = field(default_factory=lambda: Folder(1))
    handles: dict[int, Handle] = field(default_factory=dict)
    operations: int = 0
    changes: int = 0
    _log: list[list[Edit]] = field(default_factory=list)
    _inodes: Iterator[int] = field(default_factory=lambda: itertools.count(2))
    _descriptors: Iterator[int] = field(default_factory=lambda: itertools.count(1_000_000))

    # ---- looking, without an operation (for the invariants)

    def find(self, path: str) -> Node | None:
        """What is at a path now; None: nothing."""
        node: Node = self.root
        for name in path[len(PREFIX) :].split("/"):
            if name:
                found = node.names.get(name) if isinstance(node, Folder) else None
                if found is None:
                    return None
                node = found
        return node

    # ---- operations

    def stat(self, path: str) -> os.stat_result:
        node = self._look("stat", path)
        return self._stat(node)

    def listing(self, path: str) -> list[tuple[str, Node]]:
        node = self._look("list", path)
        if not isinstance(node, Folder):
            raise _error(errno.ENOTDIR, path)
        return list(node.names.items())

    def mkdir(self, path: str) -> None:
        parent, name = self._parent("mkdir", path)
        if name in parent.names:
            raise _error(errno.EEXIST, path)
        self._edit((parent, name, Folder(next(self._inodes))))

    def rmdir(self, path: str) -> None:
        parent, name = self._parent("rmdir", path)
        node = self._child(parent, name, path)
        if not isinstance(node, Folder):
            raise _error(errno.ENOTDIR, path)
        if node.names:
            raise _error(errno.ENOTEMPTY, path)
        self._edit((parent, name, None))

    def unlink(self, path: str) -> None:
        parent, name = self._parent("unlink", path)
        node = self._child(parent, name, path)
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, path)
        node.links -= 1
        self._edit((parent, name, None))

    def link(self, source: str, target: str) -> None:
        parent, name = self._parent("link", target)
        node = self._existing(source)
        if isinstance(node, Folder):
            raise _error(errno.EPERM, source)
        if name in parent.names:
            raise _error(errno.EEXIST, target)
        node.links += 1
        self._edit((parent, name, node))

    def rename(self, source: str, target: str) -> None:
        parent, name = self._parent("rename", source)
        node = self._child(parent, name, source)
        into, new = self._folder_of(target), target.rpartition("/")[2]
        there = into.names.get(new)
        if there is node:
            return
        if isinstance(there, Folder):
            if not isinstance(node, Folder):
                raise _error(errno.EISDIR, target)
            if there.names:
                raise _error(errno.ENOTEMPTY, target)
        elif there is not None:
            if isinstance(node, Folder):
                raise _error(errno.ENOTDIR, target)
            there.links -= 1
        self._edit((parent, name, None), (into, new, node))

    def exchange(self, first: str, second: str) -> None:
        parent, name = self._parent("exchange", first)
        if not self.exchanges:
            raise _error(errno.EINVAL, first)
        node = self._child(parent, name, first)
        into, new = self._folder_of(second), second.rpartition("/")[2]
        other = self._child(into, new, second)
        self._edit((parent, name, other), (into, new, node))

    def open(self, path: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        self._start("create" if flags & os.O_CREAT else "open", path)
        parent, name = self._folder_of(path), path.rpartition("/")[2]
        node = self.root if path == PREFIX else parent.names.get(name) if name else parent
        if node is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            node = File(next(self._inodes), self.now())
            self._edit((parent, name, node))
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if isinstance(node, Folder):
            if writes:
                raise _error(errno.EISDIR, path)
        elif flags & os.O_DIRECTORY:
            raise _error(errno.ENOTDIR, path)
        elif flags & os.O_TRUNC and node.data:
            self._set(node, b"")
        descriptor = next(self._descriptors)
        self.handles[descriptor] = Handle(node, path, self.owner(), bool(flags & os.O_APPEND))
        return descriptor

    def close(self, descriptor: int) -> None:
        self.handles.pop(descriptor, None)

    def read(self, descriptor: int, size: int, offset: int | None = None) -> bytes:
        handle, node = self._opened("read", descriptor)
        start = handle.position if offset is None else offset
        data = node.data[start : start + size]
        if offset is None:
            handle.position += len(data)
        return data

    def write(self, descriptor: int, data: bytes, offset: int | None = None) -> int:
        handle, node = self._opened("write", descriptor)
        start = len(node.data) if handle.append else handle.position if offset is None else offset
        self._set(node, node.data[:start].ljust(start, b"\0") + data + node.data[start + len(data) :])
        if offset is None:
            handle.position = start + len(data)
        return len(data)

    def truncate(self, descriptor: int, size: int) -> None:
        _, node = self._opened("truncate", descriptor)
        self._set(node, node.data[:size].ljust(size, b"\0"))

    def seek(self, descriptor: int, offset: int, whence: int) -> int:
        handle = self._handle(descriptor)
        assert isinstance(handle.node, File)
        handle.position = offset + (0, handle.position, len(handle.node.data))[whence]
        return handle.position

    def fstat(self, descriptor: int) -> os.stat_result:
        return self._stat(self._handle(descriptor).node)

    def fsync(self, descriptor: int) -> None:
        handle = self._handle(descriptor)
        self._start("fsync", handle.path)
        if isinstance(handle.node, File):
            handle.node.durable = handle.node.data
        else:
            self._settle(handle.node)

    def flock(self, descriptor: int, mode: int) -> bool:
        """Take or drop a lock; False: somebody else's is in the way."""
        import fcntl

        handle = self._handle(descriptor)
        wanted = mode & (fcntl.LOCK_SH | fcntl.LOCK_EX)
        others = [
            other.lock
            for other in self.handles.values()
            if other.node is handle.node and other is not handle and other.lock
        ]
        if wanted and others and (wanted == fcntl.LOCK_EX or fcntl.LOCK_EX in others):
            return False
        handle.lock = wanted
        return True

    # ---- ends

    def close_all(self, owner: Any) -> None:
        """A process has ended."""
        for descriptor in [number for number, handle in self.handles.items() if handle.owner is owner]:
            del self.handles[descriptor]

    def make_durable(self) -> None:
        """All that is there is on the disk."""
        for edits in self._log:
            _apply(edits, durable=True)
        self._log.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Everything ends; what was not durable survives by chance."""
        self.handles.clear()
        kept_share = rng.choice((0.0, 0.5, 0.9, 1.0))
        cut: set[int] = set()
        for edits in self._log:
            touched = {folder.ino for folder, _, _ in edits}
            if touched & cut or rng.random() >= kept_share:
                cut |= touched
            else:
                _apply(edits, durable=True)
        self._log.clear()
        self._restore(self.root, rng, set())
        self.changes += 1

    # ---- inside

    def _restore(self, folder: Folder, rng: random.Random, seen: set[int]) -> None:
        folder.names = dict(folder.durable)
        for node in folder.names.values():
            if isinstance(node, Folder):
                self._restore(node, rng, seen)
            elif node.ino not in seen:
                seen.add(node.ino)
                if node.data != node.durable:
                    cut = rng.randrange(len(node.data) + 1)
                    self._set(node, rng.choice((node.durable, node.data, node.data[:cut])))
                    node.durable = node.data

    def _settle(self, folder: Folder) -> None:
        """Make durable what touches a folder, and what that builds upon."""
        touched, kept, settled = {folder.ino}, [], []
        for edits in reversed(self._log):
            own = {place.ino for place, _, _ in edits}
            if own & touched:
                touched |= own
                settled.append(edits)
            else:
                kept.append(edits)
        for edits in reversed(settled):
            _apply(edits, durable=True)
        self._log = kept[::-1]

    def _edit(self, *edits: Edit) -> None:
        self.changes += 1
        _apply(edits, durable=False)
        self._log.append(list(edits))

    def _set(self, node: File, data: bytes) -> None:
        self.changes += 1
        node.data, node.version, node.mtime = bytes(data), node.version + 1, self.now()

    def _start(self, operation: str, path: str) -> None:
        self.operations += 1
        self.before(operation, path)

    def _look(self, operation: str, path: str) -> Node:
        self._start(operation, path)
        return self._existing(path)

    def _existing(self, path: str) -> Node:
        name = path.rpartition("/")[2]
        return self._child(self._folder_of(path), name, path) if path != PREFIX else self.root

    def _parent(self, operation: str, path: str) -> tuple[Folder, str]:
        self._start(operation, path)
        return self._folder_of(path), path.rpartition("/")[2]

    def _folder_of(self, path: str) -> Folder:
        node: Node | None = self.find(path.rpartition("/")[0])
        if node is None:
            raise _error(errno.ENOENT, path)
        if not isinstance(node, Folder):
            raise _error(errno.ENOTDIR, path)
        return node

    @staticmethod
    def _child(folder: Folder, name: str, path: str) -> Node:
        if name not in folder.names:
            raise _error(errno.ENOENT, path)
        return folder.names[name]

    def _handle(self, descriptor: int) -> Handle:
        if descriptor not in self.handles:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.handles[descriptor]

    def _opened(self, operation: str, descriptor: int) -> tuple[Handle, File]:
        handle = self._handle(descriptor)
        self._start(operation, handle.path)
        if not isinstance(handle.node, File):
            raise _error(errno.EISDIR, handle.path)
        return handle, handle.node

    @staticmethod
    def _stat(node: Node) -> os.stat_result:
        if isinstance(node, Folder):
            return os.stat_result((stat.S_IFDIR | 0o700, node.ino, 1, 2, os.getuid(), os.getgid(), 0, 0, 0, 0))
        when = int(node.mtime)
        size = len(node.data)
        return os.stat_result(
            (stat.S_IFREG | 0o600, node.ino, 1, node.links, os.getuid(), os.getgid(), size, when, when, when)
        )


class Raw(io.RawIOBase):
    """The unbuffered file that `open` makes of a descriptor."""

    def __init__(self, system: FileSystem, descriptor: int, name: str, *, reads: bool, writes: bool) -> None:
        self._system, self._descriptor, self.name = system, descriptor, name
        self._reads, self._writes = reads, writes

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._system.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        if self._descriptor not in self._system.handles:  # its process is dead: what was buffered is gone
            return len(data)
        return self._system.write(self._descriptor, bytes(data))

    def seek(self, offset: int, whence: int = 0) -> int:
        if self._descriptor not in self._system.handles:
            return 0
        return self._system.seek(self._descriptor, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        self._system.truncate(self._descriptor, size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._system.close(self._descriptor)
            super().close()


def _apply(edits: Any, *, durable: bool) -> None:
    for folder, name, node in edits:
        names = folder.durable if durable else folder.names
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
