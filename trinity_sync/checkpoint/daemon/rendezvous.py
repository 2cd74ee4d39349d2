"""Where the monitor of a checkpoint folder listens: a file in it, for this user's eyes only, as the secret is in it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.locks import ForeignFileError, open_lock

_NAME = ".monitor.json"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A monitor that listens, or did when this was written.

    Attributes:
        program: whose monitor it is.
        address, port: where it listens.
        secret: what a caller has to know, hex.
        pid, host: the process, for messages.
    """

    program: str
    address: str
    port: int
    secret: str
    pid: int
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, at {self.address}:{self.port}"


def publish(root: Path, program: str, address: str, port: int, secret: bytes) -> Rendezvous:
    """Say where this process listens. It has locked the folder.

    Raises:
        OSError: the disk refuses.
        ConfigError: what is written there can be read by others.
    """
    said = Rendezvous(
        program=program, address=address, port=port, secret=secret.hex(), pid=os.getpid(), host=socket.gethostname()
    )
    before = os.umask(0o077)
    try:
        replace_file(root / _NAME, json.dumps(asdict(said)), durable=False)
    finally:
        os.umask(before)
    if find(root) != said:
        raise ConfigError(f"{root / _NAME} is not what was written to it a moment ago")
    return said


def find(root: Path) -> Rendezvous | None:
    """Read who listens; None: nobody says so.

    Raises:
        ConfigError: what is there was not written by this user, or others may have read it.
    """
    path = root / _NAME
    try:
        descriptor = open_lock(path, create=False, writable=False)
    except (ForeignFileError, PermissionError) as error:
        raise _refused(path, str(error)) from error
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _refused(path, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise _refused(path, f"others may read or write it (mode {stat.S_IMODE(status.st_mode):o})")
        try:
            return _checked(json.load(file))
        except (OSError, ValueError, TypeError, KeyError):
            return None  # no word of a monitor's; the next one writes over it


def withdraw(root: Path, said: Rendezvous) -> None:
    """Remove the file, as the one who wrote it."""
    if find(root) == said:
        with contextlib.suppress(FileNotFoundError):
            (root / _NAME).unlink()


def _checked(read: dict[str, object]) -> Rendezvous:
    found = Rendezvous(**read)  # type: ignore[arg-type]
    texts = (found.program, found.address, found.secret, found.host)
    if not all(isinstance(text, str) for text in texts) or not all(type(n) is int for n in (found.port, found.pid)):
        raise ValueError("a field is of another type")
    bytes.fromhex(found.secret)
    return found


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} says where the checkpoint monitor listens, but cannot be trusted: {why}. Delete it; on a file system "
        "without owners or modes, name another checkpoint folder"
    )
