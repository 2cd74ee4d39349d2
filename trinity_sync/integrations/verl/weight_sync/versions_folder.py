"""The folder of mode ``checkpoint``: versions that are written, committed by one rename, read, and removed.

::

    <dir>/.lock                        held for the instant in which a folder is made or looked through
    <dir>/.sending-<token>/            a version that is being written, or removed
    <dir>/version_20-<token>/          a committed one, of step 20
        lease                          flocked, shared, by everybody who needs the folder
        version.json                   step, tensors, digest, files
        bucket-00000.safetensors       each bucket

Who leaves a version that is not to stay removes it if nobody else has its lease. A killed process has none, so the last
of the others cleans up after it; where there are no others, the next sender in this folder. What has another name, or
is committed and has no lease, is none of ours: it is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trinity_sync.errors import RunError
from trinity_sync.host.durable import make_folder, sync_folder
from trinity_sync.host.locks import open_lock, try_lock, wait_for_lock

_DRAFT = ".sending-"
_COMMITTED = "version"
_OURS = re.compile(r"(?:\.sending|version(?:_\d+)?)-[0-9a-f]{16}")
_LEASE = "lease"
_LOCK = ".lock"


class VersionLock:
    """A version's folder, which is not removed as long as this is held.

    Args:
        root: the folder of all versions.
        token: what is in the names of the version's folder.
        lease: descriptor of its locked lease.
    """

    def __init__(self, root: Path, token: str, lease: int) -> None:
        self._root = root
        self._token = token
        self._lease: int | None = lease

    @property
    def path(self) -> Path:
        """Where the folder is now.

        Raises:
            RunError: it is gone.
        """
        for found in self._root.glob(f"*-{self._token}"):
            return found
        raise RunError(f"the version {self._token} in {self._root} is gone: somebody else has removed it")

    def commit(self, step: int | None) -> Path:
        """Give the folder its name, once all in it is durable; return it.

        Raises:
            OSError: it cannot be renamed.
        """
        number = "" if step is None else f"_{step}"
        target = self._root / f"{_COMMITTED}{number}-{self._token}"
        sync_folder(self.path)
        self.path.rename(target)
        sync_folder(self._root)
        return target

    def leave(self, *, remove: bool) -> None:
        """Let the folder go. May be called again.

        Args:
            remove: remove it, if nobody else has its lease.
        """
        if self._lease is None:
            return
        os.close(self._lease)
        self._lease = None
        if remove:
            for folder in self._root.glob(f"*-{self._token}"):
                _remove_if_left(folder)


def begin(root: Path, timeout_s: float) -> VersionLock:
    """Make the folder of a version that is going to be written; drafts that nobody has are removed.

    Args:
        root: the folder of all versions; made if it is not there.
        timeout_s: limit of the wait for others that look through it, seconds.

    Raises:
        RunError: it cannot be made or locked.
        WaitTimeout: another process keeps it locked.
    """
    token = secrets.token_hex(8)
    try:
        make_folder(root)
        with _locked(root, timeout_s):
            for draft in _versions(root, f"{_DRAFT}*"):
                _remove_if_left(draft)
            folder = root / f"{_DRAFT}{token}"
            folder.mkdir(mode=0o700)
            lease = _lease(folder, create=True)
    except OSError as error:
        raise RunError(f"no version can be written to {root}: {error.strerror} ({error.filename})") from error
    return VersionLock(root, token, lease)


def hold(folder: Path) -> VersionLock:
    """Take a share of a version's lease.

    Args:
        folder: as the sender has named it when it began.

    Raises:
        RunError: this process does not see it.
    """
    token = folder.name.rsplit("-", 1)[1]
    try:
        return VersionLock(folder.parent, token, _lease(folder, create=False))
    except OSError as error:
        raise RunError(
            f"{folder}, which the sender has made, cannot be read here ({error.strerror}): engine_kwargs' dir has to "
            "be a folder that all nodes share"
        ) from error


def remove_others(root: Path, timeout_s: float) -> None:
    """Remove all versions and drafts that nobody has.

    Raises:
        WaitTimeout: another process keeps the folder locked.
    """
    with _locked(root, timeout_s):
        for folder in _versions(root, "*"):
            _remove_if_left(folder)


def _versions(root: Path, pattern: str) -> list[Path]:
    return [found for found in root.glob(pattern) if _OURS.fullmatch(found.name) and not found.is_symlink()]


def _lease(folder: Path, *, create: bool) -> int:
    descriptor = open_lock(folder / _LEASE, create=create)
    try:
        wait_for_lock(descriptor, folder / _LEASE, 0, shared=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(root: Path, timeout_s: float) -> Iterator[None]:
    descriptor = open_lock(root / _LOCK)
    try:
        wait_for_lock(descriptor, root / _LOCK, timeout_s)
        yield
    finally:
        os.close(descriptor)


def _remove_if_left(folder: Path) -> None:
    try:
        lease = open_lock(folder / _LEASE, create=False)
    except FileNotFoundError:
        if not folder.name.startswith(_DRAFT):
            return
        lease = None  # it is being removed, or its sender was killed before it had made one
    try:
        if lease is not None and not try_lock(lease):
            return
        aside = folder.with_name(f"{_DRAFT}{folder.name.rsplit('-', 1)[1]}")  # half of a version has no version's name
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        if lease is not None:
            os.close(lease)
