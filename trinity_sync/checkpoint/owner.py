"""Which run a checkpoint folder or a mirror belongs to: its mark says so.

A run puts the mark there before it writes anything else. Nothing in a place without the mark of this run is deleted,
overwritten, or read as a checkpoint of this run. A mark that cannot be read now is no mark of this run.

Checkpoint folders of earlier releases have no mark. A run that is resumed puts its own on a folder that is inside its
own folder, or whose checkpoints its own record shows to be its own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import uuid
from collections.abc import Collection, Iterator
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
from trinity_sync.checkpoint.lock import other_run
from trinity_sync.checkpoint.tracker_files import TRACKERS
from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import make_folder, replace_file

MARK = ".run.json"
_RUN_JSON = "run.json"
#: What this program moves, overwrites or deletes in a checkpoint folder.
_MANAGED = ("*global_step_*", *TRACKERS.values(), f"{STAGING}/*", f"{VERSIONS}/*", f"{TRASH_PREFIX}*")

Recorded: TypeAlias = Collection[tuple[object, object, object, object]]
"""Commits in a run's record: step, attempt, version digest, bytes."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run that a place belongs to.

    Attributes:
        run: the run id.
        folder: the run's folder, absolute. The checkpoint folder, for a program without a run folder.
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
        """Read the text of a mark.

        Args:
            name: the file's name, for errors.

        Raises:
            UnreadableError: it is not a mark.
        """
        try:
            body = dict(json.loads(text))
            return cls(**{field: str(body[field]) for field in ("run", "folder", "host", "session")})
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(
                f"{name} is not the mark of a run ({error!r}); move it away if it is garbage"
            ) from None

    def to_text(self) -> str:
        """Return the text of the mark."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return f"run {self.run} in {self.folder} on {self.host}"

    def is_copied_to(self, folder: str) -> bool:
        """Return whether a run's folder is a copy: the folder of this mark is another one, and still holds the run.

        Raises:
            OSError: the folder of the mark cannot be read now.
        """
        try:
            if Path(self.folder).samefile(folder):
                return False
            record = json.loads(Path(self.folder, _RUN_JSON).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        return isinstance(record, dict) and record.get("id") == self.run


def read_mark(root: Path) -> Owner | None:
    """Read the mark of a checkpoint folder; None: it has none.

    Raises:
        UnreadableError: it cannot be read now, or is not a mark.
    """
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
        OSError: the disk refuses.
    """
    make_folder(root)
    if _inside(root, owner.folder):  # moves and is copied with the run's folder
        owner = replace(owner, folder=os.path.relpath(owner.folder, root.absolute()))
    replace_file(root / MARK, owner.to_text())


def adopt(root: Path) -> str:
    """Return the run id of a checkpoint folder; a folder without a mark gets one. For programs without a run folder.

    Raises:
        UnreadableError: the mark cannot be read now.
        OSError: the disk refuses.
    """
    mark = read_mark(root)
    if mark is None:
        runs = {manifest.run for manifest in manifests(root) if manifest.run is not None}
        mark = Owner.new(runs.pop() if len(runs) == 1 else uuid.uuid4().hex, root)
        write_mark(root, mark)
    return mark.run


def check(root: Path, owner: Owner, *, recorded: Recorded = (), named: bool = False) -> None:
    """Check that a checkpoint folder belongs to a run, or to no run. Writes nothing.

    Args:
        recorded: commits in the run's own record.
        named: the user has just named the folder for this run.

    Raises:
        ConfigError: it belongs to another run, or its mark cannot be read now.
    """
    try:
        problem = _problem(root, owner, recorded, named)
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"checkpoint.dir={root}: whose folder it is cannot be read now: {error}") from error
    if problem:
        raise ConfigError(f"checkpoint.dir={root} {problem}")


def check_free(root: Path) -> None:
    """Check that a checkpoint folder may be that of a new run. Writes nothing.

    Raises:
        ConfigError: there is something in it that a run would move, overwrite or delete.
    """
    if found := managed(root):
        raise ConfigError(
            f"checkpoint.dir={root} holds checkpoints of another run already ({found}); name another folder, or go on "
            "with that run: trinity-sync resume RUN_DIR"
        )


def managed(root: Path) -> str | None:
    """Name one of the files in a folder that a run in it would move, overwrite or delete; None: there is none."""
    return next((path.relative_to(root).as_posix() for name in _MANAGED for path in root.glob(name)), None)


def _problem(root: Path, owner: Owner, recorded: Recorded, named: bool) -> str | None:
    mark = read_mark(root)
    if mark is None:
        return _unmarked_problem(root, owner, recorded, named)
    if mark.run != owner.run:
        return f"belongs to another run: {mark}; name another folder" if managed(root) else None
    if not named and mark.is_copied_to(owner.folder):
        return (
            f"belongs to the run in {mark.folder}, and {owner.folder} is a copy of that run; name another folder, or "
            f"give checkpoint.dir={root} to take it over"
        )
    return None


def _unmarked_problem(root: Path, owner: Owner, recorded: Recorded, named: bool) -> str | None:
    found = list(manifests(root))
    other = next((manifest for manifest in found if manifest.run not in (None, owner.run)), None)
    if other is not None:
        return f"holds the checkpoint of step {other.step} of another run, {other.run}; name another folder"
    if named or not found or _inside(root, owner.folder) or any(one.run == owner.run for one in found):
        return None
    writer = other_run(root, Path(owner.folder))
    shown = {(one.step, one.attempt, one.digest, one.bytes) for one in found}
    known = {commit[:2] for commit in recorded}
    denied = any(one[:2] in known for one in shown.difference(recorded))
    if writer is None and not denied and not shown.isdisjoint(recorded):
        return None
    whose = f"the run in {writer}" if writer is not None else "an unknown run"
    return (
        f"holds checkpoints of {whose}: the record of {owner.folder} does not list them; give checkpoint.dir={root} if "
        "they are this run's"
    )


def manifests(root: Path) -> Iterator[Manifest]:
    """Yield the valid manifests in a checkpoint folder, also those of abandoned steps."""
    for path in root.glob("*global_step_*"):
        with suppress(ManifestError):
            yield read_manifest(path)


def _inside(root: Path, folder: str) -> bool:
    """Return whether a checkpoint folder is a run's folder or below it, by its real path."""
    return root.resolve().is_relative_to(Path(folder).resolve())
