"""The slots: files in shared memory, reused for one version's snapshot after another. Owned by the node agent.

::

    <root>/trinity-sync-<uid>/<run key>/owner.lock              flocked by the owner for as long as it lives
    <root>/trinity-sync-<uid>/<run key>/slot-0/rank-00000       one segment per slot and part

Each user has a private folder. Another folder there, with a file `kept`, may outlive its process for a while
(`kept_folder`). A run's folder with a free lock belonged to a dead process, and any process of the user
may delete it. A process that creates a folder, or checks a lock to delete one, has an flock on the user's folder
meanwhile, so that no folder counts as stale between its creation and its locking. Trainer ranks and explorers map
segments by path with `map_segment`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.locks import ForeignFileError, open_lock, open_own_folder, own_name, try_lock, wait_for_lock

DEFAULT_ROOT = "/dev/shm"
_HOME = "trinity-sync"
_LOCK = "owner.lock"
_KEPT, _LEFT = "kept", "left"
_SPARED_S = 3600.0
_LOCK_S = 60.0
"""Timeout for another process of the user that looks for stale folders."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class SegmentError(RunError):
    """A slot's segment cannot be created, is gone, or is too small."""


class SlotArena:
    """The slots of one run on one node.

    Usage::

        with SlotArena.create("run-1", 2, {"rank-00000": layout.nbytes}, fallback=run_folder) as arena:
            hand_out(arena.path(0, "rank-00000"))       # ranks call map_segment(path, nbytes, writable=True)
            bucket_digests(arena.map(0, "rank-00000"), layout)

    `notes` are messages for the user, such as that shared memory was too small; empty if all is well.
    """

    def __init__(self, folder: Path, slots: int, lock: int, notes: list[str]) -> None:
        """Use `create`; this takes over a locked folder."""
        self.folder = folder
        self.slots = slots
        self.notes = notes
        self._lock: int | None = lock
        self._maps: dict[tuple[int, str], mmap.mmap] = {}

    @classmethod
    def create(
        cls, run_key: str, slots: int, parts: Mapping[str, int], root: str | Path = DEFAULT_ROOT, *, fallback: Path
    ) -> SlotArena:
        """Create and lock the folder and reserve all memory, so that the first snapshot has no page faults. `parts`:
        part name -> bytes of its segment. Raises SegmentError if a live process uses the run key, or the fallback has
        no room either.
        """
        if slots < 1:
            raise ValueError(f"{slots} slots; at least 1 is needed")
        for name in (run_key, *parts):
            if not _SAFE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a plain file name of letters, digits, '.', '_' and '-'")
        needed = slots * sum(-(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE for size in parts.values())
        notes: list[str] = []
        try:
            return cls._create_in(Path(root), run_key, slots, parts, needed, notes)
        except ForeignFileError as error:
            notes.append(
                f"{error.strerror}: the slots are mapped files in {fallback} instead, which is slower; have it "
                "removed, or name another folder in memory by sync.shm_dir"
            )
        except OSError as error:
            notes.append(
                f"{root} cannot hold the {slots} slots, which need {_mib(needed)} ({error.strerror}): they are mapped "
                f"files in {fallback} instead, which is slower; give the container more shared memory "
                f"(docker: --shm-size) or lower sync.slots"
            )
        try:
            fallback.mkdir(parents=True, exist_ok=True)
            return cls._create_in(fallback, run_key, slots, parts, needed, notes)
        except OSError as error:
            raise SegmentError(
                f"no room for {slots} slots, which need {_mib(needed)}: neither {root} nor {fallback} can hold them "
                f"({error.strerror}); free memory or disk, or lower sync.slots"
            ) from error

    @classmethod
    def _create_in(
        cls, root: Path, run_key: str, slots: int, parts: Mapping[str, int], needed: int, notes: list[str]
    ) -> SlotArena:
        usage = os.statvfs(root)
        free = usage.f_bavail * usage.f_frsize
        if free < needed:
            raise OSError(0, f"{_mib(free)} free")
        with _home(root, create=True) as home:
            folder = home / run_key
            if folder.exists() and not _remove_if_stale(folder):
                raise SegmentError(f"{folder} is in use by a live process; a run key must be unique on its node")
            folder.mkdir(mode=0o700)
            lock = open_lock(folder / _LOCK)
            fcntl.flock(lock, fcntl.LOCK_EX)  # of a new file that no other process can have open
        arena = cls(folder, slots, lock, notes)
        try:
            for slot in range(slots):
                (folder / f"slot-{slot}").mkdir(mode=0o700)
                for part, size in parts.items():
                    _reserve(arena.path(slot, part), max(size, 1))
                    arena._maps[slot, part] = map_segment(arena.path(slot, part), size, writable=True)
        except BaseException:
            arena.close()
            raise
        return arena

    def path(self, slot: int, part: str) -> Path:
        return self.folder / f"slot-{slot}" / part

    def map(self, slot: int, part: str) -> mmap.mmap:
        """Return the owner's writable mapping of a segment; always the same object, with all its pages in place. Raises
        SegmentError: there is no such slot or part, or the arena is closed.
        """
        try:
            return self._maps[slot, part]
        except KeyError:
            state = "is closed" if self._lock is None else f"has {self.slots} slots"
            raise SegmentError(f"no segment {part} in slot {slot}: {self.folder} {state}") from None

    def close(self) -> None:
        """Delete the folder and release the lock; repeatable. Memory in use is freed with its last mapping."""
        if self._lock is None:
            return
        for mapping in self._maps.values():
            with suppress(BufferError):  # a view is still in use: it keeps the memory, not the file
                mapping.close()
        self._maps.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None
        # Deletes the user's folder if it is empty; if it is locked, the other process does so.
        with suppress(OSError, WaitTimeout), _home(self.folder.parent.parent, create=False, timeout_s=0):
            pass

    def __enter__(self) -> SlotArena:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def map_segment(path: str | Path, nbytes: int, writable: bool = False, populate: bool = True) -> mmap.mmap:
    """Map a segment (from `SlotArena.path`) that another process created; shared, `nbytes` long (at least one byte).
    `writable`: to stage into it. `populate`: have all its pages in place, else each is mapped at its first use. Raises
    SegmentError: the file is gone or too small.
    """
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SegmentError(f"segment {path} no longer exists: its node agent ended or was replaced") from None
    try:
        size = os.fstat(descriptor).st_size
        if size < max(nbytes, 1):
            raise SegmentError(f"segment {path} is torn: it has {size} bytes, the layout needs {nbytes}")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(descriptor, max(nbytes, 1), flags, access)
    finally:
        os.close(descriptor)


class MappedSegments:
    """Segments that are read repeatedly: each is mapped once, because mapping its pages costs more than copying them.

    `populate`: see `map_segment`; `pinned`: page-lock them where this process uses a GPU, which then reads them about
    seven times as fast.
    """

    def __init__(self, populate: bool = True, *, pinned: bool = False) -> None:
        self._populate = populate
        self._pinned = pinned
        self._maps: dict[str, tuple[tuple[int, int], mmap.mmap]] = {}
        if pinned:
            weakref.finalize(self, _unpin, self._maps).atexit = False

    def get(self, path: str | Path, nbytes: int) -> mmap.mmap:
        """Return the read-only mapping of a segment, a new one if its file was replaced; errors as of `map_segment`."""
        key = str(path)
        known = self._maps.get(key)
        if known is not None and known[0] == _identity(path) and len(known[1]) >= nbytes:
            return known[1]
        if known is not None:
            if self._pinned:
                _unpin({key: known})
            del self._maps[key]  # its memory is free once its last view is gone
        identity = _identity(path)  # before mapping, so that the next call notices a replacement in between
        mapping = map_segment(path, nbytes, populate=self._populate)
        if identity is not None:
            self._maps[key] = identity, mapping
            if self._pinned:
                from trinity_sync.weights.staging import pin_where_used

                pin_where_used(mapping)
        return mapping


def _unpin(maps: Mapping[str, tuple[object, mmap.mmap]]) -> None:
    """Undo `pin_where_used`, before the memory is unmapped: where its address is used again, a GPU would read the
    former pages.
    """
    from trinity_sync.weights.staging import unpin_segment

    for _, mapping in maps.values():
        unpin_segment(mapping)


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Return what tells a file from a later one of its name; None: there is none.

    The system may reuse an inode's number, but not while the file is mapped.
    """
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove_stale(root: str | Path = DEFAULT_ROOT, *, spared_s: float = _SPARED_S) -> list[Path]:
    """Delete this user's folders under `root` whose owner has died, and return them. A `kept_folder` stays for
    `spared_s` seconds after its owner was first found dead: a supervised driver is about to start again.
    """
    try:
        with _home(Path(root), create=False) as home:
            folders = [folder for folder in sorted(home.iterdir()) if folder.is_dir()]
            return [one for one in folders if _remove_if_stale(one, time.time() - spared_s)]
    except (FileNotFoundError, ForeignFileError):
        return []


@contextmanager
def _home(root: Path, *, create: bool, timeout_s: float | None = None) -> Iterator[Path]:
    """Lock this user's folder in a root; on leaving, delete it if it is empty. Raises ForeignFileError if another user
    has a folder, or a link, of that name.
    """
    home = root / own_name(_HOME)
    while True:
        descriptor = open_own_folder(home, create=create)
        try:
            wait_for_lock(descriptor, home, _LOCK_S if timeout_s is None else timeout_s)
        except BaseException:
            os.close(descriptor)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(home.lstat(), os.fstat(descriptor)):
                break
        os.close(descriptor)  # the previous holder removed it while we waited for its lock
    try:
        yield home
    finally:
        with suppress(OSError):
            home.rmdir()
        os.close(descriptor)


def _remove_if_stale(folder: Path, until: float = 0.0) -> bool:
    """Delete a run's folder unless its owner lives, or was found dead later than `until`. The caller has locked its
    parent.
    """
    try:
        lock = open_lock(folder / _LOCK, create=False)
    except (FileNotFoundError, ForeignFileError):
        lock = None  # without a lock file there is no owner
    except PermissionError:
        return False
    try:
        if lock is not None and not try_lock(lock):
            return False
        if (folder / _KEPT).exists() and _is_spared(folder / _LEFT, until):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)
    return not folder.exists()


def _is_spared(left: Path, until: float) -> bool:
    """Return whether the owner of a kept folder was found dead later than a time; `left` notes the first time."""
    with suppress(OSError):
        if not left.exists():
            left.touch()
        return left.stat().st_mtime > until
    return False


@dataclass
class KeptFolder:
    """A folder in shared memory that outlives a process. `stays`: it is not deleted at the end of its block."""

    path: Path
    stays: bool = True


@contextmanager
def kept_folder(root: str | Path, name: str) -> Iterator[KeptFolder]:
    """Lock a folder of this user under `root` for the block, and delete it afterwards unless it `stays`. What a dead
    process has left in a folder of this name is there. Raises SegmentError: a live process uses it.
    """
    with _home(Path(root), create=True) as home:
        folder = home / name
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = open_lock(folder / _LOCK)
        if not try_lock(lock):
            os.close(lock)
            raise SegmentError(f"{folder} is in use by a live process")
    kept = KeptFolder(folder)
    try:
        (folder / _LEFT).unlink(missing_ok=True)
        (folder / _KEPT).touch()
        yield kept
    finally:
        with suppress(OSError):  # the user may have deleted it
            if not kept.stays or not any(one.is_dir() for one in folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with suppress(OSError, WaitTimeout), _home(Path(root), create=False, timeout_s=0):
            pass


def kept_path(root: str | Path, name: str) -> Path:
    """Return the path of a `kept_folder`."""
    return Path(root) / own_name(_HOME) / name


def _reserve(path: Path, nbytes: int) -> None:
    """Create a file with allocated blocks: a write to its mapping cannot fail for lack of space."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
