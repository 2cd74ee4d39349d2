"""Which run a checkpoint folder or a mirror belongs to: its mark says so.

Nothing in a place without the mark of this run is deleted, overwritten, or read as a checkpoint of this run. A mark
that cannot be read now is not the mark of this run. Places of earlier releases have no mark: a run that is resumed puts
its own there if its record lists every checkpoint in the place.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from trinity_sync.checkpoint.folder.contents import (
    STAGING,
    STEP_PREFIX,
    TRACKERS,
    TRASH_PREFIX,
    VERSIONS,
    Manifest,
    ManifestError,
    UnreadableError,
    read_manifest,
)
from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import make_folder, replace_file
from trinity_sync.host.locks import open_lock, try_lock

MARK = ".run.json"
#: What a run moves, overwrites or deletes in its checkpoint folder.
_MANAGED = ("*global_step_*", *TRACKERS.values(), f"{STAGING}/*", f"{VERSIONS}/*", f"{TRASH_PREFIX}*")

Recorded: TypeAlias = Collection[tuple[object, object, object, object]]
"""Commits in a run's record: step, attempt, version digest, bytes."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run that a place belongs to.

    Attributes:
        run: the run id.
        folder: the run's folder, absolute; the checkpoint folder of a program that has none.
        host: name of the driver's machine.
        session: unique to one start of the run.
    """

    run: str
    folder: str
    host: str
    session: str

    @classmethod
    def new(cls, run: str, folder: Path) -> Owner:
        """Describe a run that starts now on this machine."""
        return cls(run=run, folder=str(folder.absolute()), host=socket.gethostname(), session=secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str, name: str | Path) -> Owner:
        """Read the text of a mark in a file of this name; UnreadableError where it is not one."""
        try:
            body = dict(json.loads(text))
            return cls(**{field: str(body[field]) for field in ("run", "folder", "host", "session")})
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"{name} is not the mark of a run ({error!r}); if it is garbage, delete it") from None

    def to_text(self) -> str:
        """Return the text of the mark."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return f"run {self.run} in {self.folder} on {self.host}"

    def is_of(self, folder: str) -> bool:
        """Return whether this is the mark of a run in this folder, by whatever path."""
        try:
            return self.folder == folder or Path(self.folder).samefile(folder)
        except OSError:
            return False

    def may_run(self, own: Owner) -> bool:
        """Return whether the run of this mark may be running, for another run, which has locked its own folder."""
        if self.host != own.host:
            return True
        return not self.is_of(own.folder) and _may_be_locked(Path(self.folder, ".lock"))

    def may_be_of_another_copy(self, own: Owner) -> bool:
        """Return whether the run of this id that has put this mark may still be in another folder: it is there, or
        cannot be looked for from here, or not now.
        """
        if self.is_of(own.folder):
            return False
        if self.host != own.host:
            return True
        try:
            record = json.loads(Path(self.folder, "run.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        except OSError:
            return True
        return isinstance(record, dict) and record.get("id") == self.run

    def unlisted(self, manifests: Iterable[Manifest], recorded: Recorded) -> Manifest | None:
        """Return the first manifest that neither names this run nor stands in its record; None: there is none."""

        def is_listed(one: Manifest) -> bool:
            return one.run == self.run or (
                one.run is None and (one.step, one.attempt, one.digest, one.bytes) in recorded
            )

        return next((one for one in manifests if not is_listed(one)), None)


def read_mark(root: Path) -> Owner | None:
    """Read the mark of a checkpoint folder; None: it has none. UnreadableError where it cannot be read now."""
    path = root / MARK
    try:
        owner = Owner.parse(path.read_text(encoding="utf-8"), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read now: {error}") from None
    return replace(owner, folder=os.path.normpath(Path(root.absolute(), owner.folder)))


def write_mark(root: Path, owner: Owner) -> None:
    """Put a run's mark on its checkpoint folder, durable. The caller has locked the folder and called `check`.

    Raises:
        ConfigError: the disk refuses.
    """
    if _inside(root, owner.folder):  # moves and is copied with the run's folder
        owner = replace(owner, folder=os.path.relpath(owner.folder, root.absolute()))
    try:
        make_folder(root)
        replace_file(root / MARK, owner.to_text())
    except OSError as error:
        raise ConfigError(f"checkpoint.dir={root} cannot be written: {error.strerror or error}") from error


def adopt(root: Path) -> str:
    """Return the run id of a checkpoint folder; one without a mark gets a mark. For programs without a run folder.

    Raises:
        UnreadableError: the mark, or a checkpoint of a folder without one, cannot be read now.
    """
    mark = read_mark(root)
    if mark is None:
        runs = {manifest.run for manifest in manifests(root) if manifest.run is not None}
        mark = Owner.new(runs.pop() if len(runs) == 1 else uuid.uuid4().hex, root)
        write_mark(root, mark)
    return mark.run


def check(root: Path, owner: Owner, *, recorded: Recorded | None, named: bool = False) -> None:
    """Check that a run may use a checkpoint folder. Writes nothing.

    Args:
        owner: the run, which has locked its folder.
        recorded: commits in the record of a run that is resumed; None: it is a new one.
        named: the user has just named the folder for a run that is resumed.

    Raises:
        ConfigError: it belongs to another run, or that cannot be read now, or a new run would touch what is there.
    """
    try:
        problem = _problem(root, owner, recorded, named)
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"checkpoint.dir={root}: whose folder it is cannot be read now: {error}") from error
    if problem:
        raise ConfigError(f"checkpoint.dir={root} {problem}")


def refusal(mark: Owner) -> str:
    """Say why a place with the mark of another run is refused."""
    return (
        f"belongs to another run: {mark}; name another place, or delete {MARK} there if that run is over and has saved "
        "nothing there"
    )


def manifests(root: Path, *, skip_unreadable: bool = False) -> Iterator[Manifest]:
    """Yield the valid manifests in a checkpoint folder, also those of abandoned steps.

    Args:
        skip_unreadable: pass over what cannot be read now; else it raises UnreadableError.
    """
    for path in (path for path in _listed(root) if STEP_PREFIX in path.name):
        try:
            yield read_manifest(path)
        except ManifestError as error:
            if isinstance(error, UnreadableError) and not skip_unreadable:
                raise


def _problem(root: Path, owner: Owner, recorded: Recorded | None, named: bool) -> str | None:
    mark, inside = read_mark(root), _inside(root, owner.folder)
    take = f"give checkpoint.dir={root} to take it over"
    if recorded is None and (found := _managed(root)):
        go_on = "name another folder, or go on with that run: trinity-sync resume RUN_DIR"
        return f"holds checkpoints of another run already ({found}); {go_on}"
    if mark is None:
        there = [one for one in manifests(root, skip_unreadable=inside) if one.run is not None or not (named or inside)]
        if (other := owner.unlisted(there, recorded or ())) is None:
            return None
        whose, advice = ("", take) if other.run is None else (f" of run {other.run}", "name another folder")
        return f"holds step {other.step}{whose}, which {owner.folder} has no record of; {advice}"
    if mark.run != owner.run:
        # A start takes the lock of the place next, which a run without a folder of its own has.
        ours = mark.is_of(str(root)) or (inside and mark.is_of(owner.folder))
        return refusal(mark) if (mark.may_run(owner) and not ours) or _managed(root) else None
    if not named and mark.may_be_of_another_copy(owner):
        return f"belongs to {mark}, and {owner.folder} may be a copy of it; {take}"
    return None


def _may_be_locked(lock: Path) -> bool:
    """Return whether a process may have this lock, also where that cannot be seen now."""
    try:
        with os.fdopen(open_lock(lock, create=False, writable=False), "rb") as file:
            return not try_lock(file.fileno(), shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _managed(root: Path) -> str | None:
    for folder in (root, root / STAGING, root / VERSIONS):
        _listed(folder)  # or it raises: `glob` takes a folder that cannot be listed for an empty one
    return next((path.relative_to(root).as_posix() for name in _MANAGED for path in root.glob(name)), None)


def _listed(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(f"{root} cannot be read now: {error.strerror or error}") from error


def _inside(root: Path, folder: str) -> bool:
    """Return whether a checkpoint folder is a run's folder or below it, by its real path."""
    return root.resolve().is_relative_to(Path(folder).resolve())
