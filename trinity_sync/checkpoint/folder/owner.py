"""The mark of a checkpoint folder or a mirror: the run to which it belongs.

Nothing in a place without this run's mark is deleted, overwritten, or read as a checkpoint of this run; an unreadable
mark is not this run's. Places of earlier releases have no mark: a resumed run marks them if its record lists every
checkpoint there.
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

from trinity_sync.checkpoint.folder import contents
from trinity_sync.checkpoint.folder.contents import Manifest, ManifestError, UnreadableError, read_manifest
from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import make_folder, replace_file
from trinity_sync.host.locks import open_lock, try_lock

MARK = ".run.json"
# Files that a run moves, overwrites or deletes in its checkpoint folder.
_MANAGED = (
    *("*global_step_*", *contents.TRACKERS.values(), f"{contents.TRASH_PREFIX}*"),
    *(f"{folder}/*" for folder in (contents.STAGING, contents.VERSIONS, contents.DELTAS)),
)

Recorded: TypeAlias = Collection[tuple[object, object, object, object]]
"""Commits in a run's record: step, attempt, version digest, bytes."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run of a place."""

    run: str
    folder: str  # the run's folder, absolute; without one, the checkpoint folder
    host: str  # name of the driver's machine
    session: str  # unique to one start of the run

    @classmethod
    def new(cls, run: str, folder: Path) -> Owner:
        """Describe a run that starts now on this machine."""
        return cls(run=run, folder=str(folder.absolute()), host=socket.gethostname(), session=secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str, name: str | Path) -> Owner:
        """Parse a mark; `name` is the file's. Raises UnreadableError if it is not a mark."""
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
        """Return whether this is the mark of a run in this folder, by any path."""
        try:
            return self.folder == folder or Path(self.folder).samefile(folder)
        except OSError:
            return False

    def may_run(self, own: Owner) -> bool:
        """Return whether the marked run may be running; asked by another run, which has locked its own folder."""
        if self.host != own.host:
            return True
        return not self.is_of(own.folder) and _may_be_locked(Path(self.folder, ".lock"))

    def may_be_of_another_copy(self, own: Owner) -> bool:
        """Return whether the marked run's folder may still exist elsewhere: it is there, or cannot be checked from here
        or now.
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
        """Return the first manifest that neither names this run nor is in its record; None: there is none."""

        def is_listed(one: Manifest) -> bool:
            return one.run == self.run or (
                one.run is None and (one.step, one.attempt, one.digest, one.bytes) in recorded
            )

        return next((one for one in manifests if not is_listed(one)), None)


def read_mark(root: Path) -> Owner | None:
    """Read the mark of a checkpoint folder; None: there is none. Raises UnreadableError."""
    path = root / MARK
    try:
        owner = Owner.parse(path.read_text(encoding="utf-8"), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read now: {error}") from None
    return replace(owner, folder=os.path.normpath(Path(root.absolute(), owner.folder)))


def write_mark(root: Path, owner: Owner) -> None:
    """Write a run's mark into its checkpoint folder, durably. The caller has locked the folder and called `check`.
    Raises ConfigError if the disk refuses.
    """
    if _inside(root, owner.folder):  # it moves with the run's folder
        owner = replace(owner, folder=os.path.relpath(owner.folder, root.absolute()))
    try:
        make_folder(root)
        replace_file(root / MARK, owner.to_text())
    except OSError as error:
        raise ConfigError(f"checkpoint.dir={root} cannot be written: {error.strerror or error}") from error


def adopt(root: Path) -> str:
    """Return the run id of a checkpoint folder; a folder without a mark gets one. For programs without a run folder.
    Raises UnreadableError if the mark, or a checkpoint without one, cannot be read now.
    """
    mark = read_mark(root)
    if mark is None:
        runs = {manifest.run for manifest in manifests(root) if manifest.run is not None}
        mark = Owner.new(runs.pop() if len(runs) == 1 else uuid.uuid4().hex, root)
        write_mark(root, mark)
    return mark.run


def check(root: Path, owner: Owner, *, recorded: Recorded | None, named: bool = False) -> None:
    """Check that a run may use a checkpoint folder. Writes nothing. Raises ConfigError."""
    try:
        problem = _problem(root, owner, recorded, named)
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"checkpoint.dir={root}: the owner of the folder cannot be read now: {error}") from error
    if problem:
        raise ConfigError(f"checkpoint.dir={root} {problem}")


def refusal(mark: Owner) -> str:
    """Return the reason why a place with another run's mark is refused."""
    return (
        f"belongs to another run: {mark}; name another place, or delete {MARK} there if that run is over and has saved "
        "nothing there"
    )


def manifests(root: Path, *, skip_unreadable: bool = False) -> Iterator[Manifest]:
    """Yield the valid manifests in a checkpoint folder, including abandoned steps."""
    for path in (path for path in _listed(root) if contents.STEP_PREFIX in path.name):
        try:
            yield read_manifest(path)
        except ManifestError as error:
            if isinstance(error, UnreadableError) and not skip_unreadable:
                raise


def _problem(root: Path, owner: Owner, recorded: Recorded | None, named: bool) -> str | None:
    mark, inside = read_mark(root), _inside(root, owner.folder)
    take = f"give checkpoint.dir={root} to take it over"
    if recorded is None and (found := _managed(root)):
        go_on = "name another folder, or resume that run: trinity-sync resume RUN_DIR"
        return f"holds checkpoints of another run already ({found}); {go_on}"
    if mark is None:
        present = manifests(root, skip_unreadable=inside)
        foreign = [one for one in present if one.run is not None or not (named or inside)]
        if (other := owner.unlisted(foreign, recorded or ())) is None:
            return None
        whose, advice = ("", take) if other.run is None else (f" of run {other.run}", "name another folder")
        return f"holds step {other.step}{whose}, and {owner.folder} has no record of it; {advice}"
    if mark.run != owner.run:
        # A run without a folder of its own locks the place itself next.
        ours = mark.is_of(str(root)) or (inside and mark.is_of(owner.folder))
        return refusal(mark) if (mark.may_run(owner) and not ours) or _managed(root) else None
    if not named and mark.may_be_of_another_copy(owner):
        return f"belongs to {mark}, and {owner.folder} may be a copy of it; {take}"
    return None


def _may_be_locked(lock: Path) -> bool:
    """Return whether another process may have this lock; True if that cannot be checked."""
    try:
        with os.fdopen(open_lock(lock, create=False, writable=False), "rb") as file:
            return not try_lock(file.fileno(), shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _managed(root: Path) -> str | None:
    for folder in (root, *(root / name for name in (contents.STAGING, contents.VERSIONS, contents.DELTAS))):
        _listed(folder)  # raises: `glob` takes an unreadable folder for an empty one
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
