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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from trinity_sync.checkpoint.layout import (
    STAGING,
    TRASH_PREFIX,
    VERSIONS,
    Manifest,
    ManifestError,
    UnreadableError,
    read_manifest,
)
from trinity_sync.checkpoint.tracker_files import TRACKERS
from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import make_folder, replace_file

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

    def is_copied_to(self, folder: str) -> bool:
        """Return whether the run in a folder is a copy: this mark is of another folder, which still holds the run.

        Raises:
            OSError: the folder of the mark cannot be read now.
        """
        try:
            if Path(self.folder).samefile(folder):
                return False
            record = json.loads(Path(self.folder, "run.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
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
    """Return the run id of a checkpoint folder; one without a mark gets a mark. For programs without a run folder."""
    mark = read_mark(root)
    if mark is None:
        runs = {manifest.run for manifest in manifests(root) if manifest.run is not None}
        mark = Owner.new(runs.pop() if len(runs) == 1 else uuid.uuid4().hex, root)
        write_mark(root, mark)
    return mark.run


def check(root: Path, owner: Owner, *, recorded: Recorded = (), named: bool = False) -> None:
    """Check that a checkpoint folder may be used by a run that is resumed. Writes nothing.

    Args:
        recorded: commits in the run's own record.
        named: the user has just named the folder for this run.

    Raises:
        ConfigError: it belongs to another run, or that cannot be read now.
    """
    try:
        problem = _problem(root, owner, recorded, named)
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"checkpoint.dir={root}: whose folder it is cannot be read now: {error}") from error
    if problem:
        raise ConfigError(f"checkpoint.dir={root} {problem}")


def check_free(root: Path) -> None:
    """Check that there is nothing in a checkpoint folder that a new run would touch; else ConfigError."""
    if found := _managed(root):
        raise ConfigError(
            f"checkpoint.dir={root} holds checkpoints of another run already ({found}); name another folder, or go on "
            "with that run: trinity-sync resume RUN_DIR"
        )


def manifests(root: Path) -> Iterator[Manifest]:
    """Yield the valid manifests in a checkpoint folder, also those of abandoned steps."""
    for path in root.glob("*global_step_*"):
        with suppress(ManifestError):
            yield read_manifest(path)


def _problem(root: Path, owner: Owner, recorded: Recorded, named: bool) -> str | None:
    mark, take = read_mark(root), f"give checkpoint.dir={root} to take it over"
    if mark is None:
        free = named or _inside(root, owner.folder)
        found = [one for one in manifests(root) if one.run is not None or not free]
        if (other := owner.unlisted(found, recorded)) is None:
            return None
        whose, advice = ("", take) if other.run is None else (f" of run {other.run}", "name another folder")
        return f"holds step {other.step}{whose}, which {owner.folder} has no record of; {advice}"
    if mark.run != owner.run:
        return f"belongs to another run: {mark}; name another folder" if _managed(root) else None
    if not named and mark.is_copied_to(owner.folder):
        return f"belongs to the run in {mark.folder}, and {owner.folder} is a copy of that run; {take}"
    return None


def _managed(root: Path) -> str | None:
    return next((path.relative_to(root).as_posix() for name in _MANAGED for path in root.glob(name)), None)


def _inside(root: Path, folder: str) -> bool:
    """Return whether a checkpoint folder is a run's folder or below it, by its real path."""
    return root.resolve().is_relative_to(Path(folder).resolve())
