"""Where a mirror is kept: files below a folder that fsspec reaches, behind put, get, files and delete.

fsspec is imported when a place is first opened: the monitor does not pay for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from glob import has_magic
from pathlib import Path
from typing import TypedDict

from trinity_sync.host.durable import make_folder, replace_file, sync_folder
from trinity_sync.host.urls import local_folder


class _Info(TypedDict):
    """What is used of what fsspec tells of a file or folder."""

    name: str
    type: str
    size: int | None


class Storage:
    """A folder at a place, with a connection of its own. Not for several threads at a time. Writes to a path on this
    machine are durable when the call returns.

    Names are relative to the folder, with ``/``. Everything raises what the place's client raises: an `OSError`, or an
    error of its own where the connection is lost.

    Args:
        place: a path, or a URL that fsspec knows; it need not exist yet.
        options: options of the fsspec class of the place.
    """

    def __init__(self, place: str, options: Mapping[str, object] | None = None) -> None:
        from fsspec.asyn import sync_wrapper
        from fsspec.core import url_to_fs

        # fsspec hands out one instance per place, whose connection may be a dead one of an earlier try.
        self._fs, base = url_to_fs(place, skip_instance_cache=True, **(options or {}))
        self._base = base.rstrip("/")
        self._local = local_folder(place) is not None
        # That of sshfs is the base class's, which does nothing.
        rmdir = getattr(self._fs, "_rmdir", None)
        self._rmdir = self._fs.rmdir if rmdir is None else sync_wrapper(rmdir, obj=self._fs)
        self._folders: set[str] = set()

    def put(self, source: Path, name: str) -> None:
        """Copy a file there; a file of that name is replaced."""
        path = self._writable(name)
        self._fs.put_file(str(source), path)
        if self._local:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(Path(path).parent)

    def get(self, name: str, target: Path) -> None:
        """Copy a file from there.

        Raises:
            FileNotFoundError: there is none.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._path(name), str(target))

    def write(self, name: str, text: str) -> None:
        """Write a small file; on a path of this machine all of it or nothing."""
        path = self._writable(name)
        if self._local:
            replace_file(Path(path), text)
        else:
            self._fs.pipe_file(path, text.encode())

    def read(self, name: str) -> str | None:
        """Read a small file; None where there is none.

        Raises:
            UnicodeDecodeError: it holds no text.
        """
        try:
            text: str = self._fs.cat_file(self._path(name)).decode()
        except FileNotFoundError:
            return None
        return text

    def files(self, name: str = "") -> dict[str, int]:
        """List all files below a folder: name relative to it -> bytes. Empty where there is no such folder."""
        return dict(self._walk(self._path(name), ""))

    def names(self) -> list[str]:
        """List the names of all files and folders that lie here directly."""
        return sorted(name for name, _ in self._children(self._base))

    def folders(self) -> list[str]:
        """List the names of the folders that lie here directly."""
        return sorted(name for name, info in self._children(self._base) if info["type"] == "directory")

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing where there is none."""
        try:
            self._fs.invalidate_cache()
            path = self._path(name)
            # Of most clients `rm` takes `*`, `?` and `[` for a pattern, which the paths of other runs may match.
            if self._local or not has_magic(path):
                self._fs.rm(path, recursive=True)
            else:
                self._remove(path, self._fs.info(path)["type"])
            if self._local:
                sync_folder(Path(path).parent)
        except FileNotFoundError:
            pass
        self._folders.clear()

    def _remove(self, path: str, kind: str) -> None:
        if kind != "directory":
            self._fs.rm_file(path)
            return
        for name, info in list(self._children(path)):
            self._remove(f"{path}/{name}", info["type"])
        with suppress(FileNotFoundError, FileExistsError):  # as object stores say, which have no folders
            self._rmdir(path)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _writable(self, name: str) -> str:
        path = self._path(name)
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            if self._local:
                make_folder(Path(folder))
            else:
                self._fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, int]]:
        # fsspec's own find() takes a folder that cannot be listed for an empty one.
        for name, info in self._children(folder):
            if info["type"] == "directory":
                yield from self._walk(f"{folder}/{name}", f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", int(info["size"] or 0)

    def _children(self, folder: str) -> Iterator[tuple[str, _Info]]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(folder or "/", detail=True)
        except FileNotFoundError:
            return
        for info in entries:
            path = info["name"].rstrip("/")
            name = path.rpartition("/")[2]
            # Object stores list a folder's own placeholder among its contents.
            if name and path.strip("/") != folder.strip("/"):
                yield name, info
