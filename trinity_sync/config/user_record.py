"""This user's record of a run on this host, signed with a key that other users cannot read. A resume trusts recorded
values.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trinity_sync.config.lookup import ModuleSource

FILE = "recorded.json"
"""In `.hydra/` of a run: signatures, and folders of modules; no values of settings."""
OF_SWEEP = ".recorded.json"
"""The same in a sweep's own folder: a folder with `.hydra/` is a run's."""

_KEY_BYTES = 32
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FolderRecord:
    """The record of one folder."""

    key: bytes | None = None  # of this user on this host; None: nothing is trusted
    signatures: frozenset[str] = frozenset()  # in hex
    # Folders of top-level modules, hints until their signature is checked.
    modules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> FolderRecord:
        """Read the record of a folder; an unreadable one trusts nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            path = folder / ".hydra" / FILE
            path = path if path.exists() else folder / OF_SWEEP
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                content = json.loads(path.read_bytes())
                return cls(
                    key=_user_key(make=False),
                    signatures=frozenset(map(str, content["signatures"])),
                    modules={str(name): str(place) for name, place in content["modules"].items()},
                )
        return NOTHING

    def holds(self, *what: object) -> bool:
        """Return whether this user recorded it."""
        return self.key is not None and _sign(self.key, what) in self.signatures

    def folder_of(self, module: str) -> Path | None:
        """Return the recorded folder of a top-level module, if there is one."""
        folder = self.modules.get(module)
        return Path(folder) if folder is not None and self.holds("folder", module, folder) else None


NOTHING = FolderRecord()


def record(settings: Iterable[tuple[str, object]], modules: Mapping[str, ModuleSource]) -> str | None:
    """Return a signed record of keys with their values and of their top-level modules; None: this user has no safe
    place for a key.
    """
    key = _user_key(make=True)
    if key is None:
        return None
    signed = [_sign(key, ("setting", *pair)) for pair in settings]
    for name, place in modules.items():
        signed += [_sign(key, ("module", name, place.digest)), _sign(key, ("folder", name, place.folder))]
    found = {"signatures": sorted(set(signed)), "modules": {name: place.folder for name, place in modules.items()}}
    return json.dumps(found, indent=1) + "\n"


def _sign(key: bytes, what: Iterable[object]) -> str:
    text = json.dumps([*what], sort_keys=True, default=str)
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _user_key(*, make: bool) -> bytes | None:
    """Return this user's key on this host; None: another user could read or replace it, or it cannot be made."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        above = next(place for place in (state, *state.parents) if place.exists())
        if not state.is_absolute() or above.stat().st_uid != os.geteuid():
            return None  # such as root with another user's home: the state would become root's
        path = state / "trinity-sync" / f"{socket.gethostname()}.key"
        if make:
            _make_key(path)
        place = path.parent.lstat()
        if not stat.S_ISDIR(place.st_mode) or place.st_uid != os.geteuid() or place.st_mode & 0o022:
            return None
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found, key = os.fstat(handle), os.read(handle, _KEY_BYTES + 1)
        finally:
            os.close(handle)
    except (OSError, RuntimeError):
        return None
    private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return key if private and len(key) == _KEY_BYTES else None


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, secrets.token_bytes(_KEY_BYTES))  # a run that reads the file earlier records nothing
            os.fsync(handle)
        except BaseException:  # also on Ctrl-C: an empty file would never become a key
            path.unlink()
            raise
        finally:
            os.close(handle)
