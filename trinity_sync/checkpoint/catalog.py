"""What there is in a checkpoint folder, as manifests and names tell. Nothing is written, no contents are looked at."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_sync.checkpoint import verl_folders
from trinity_sync.checkpoint.layout import (
    ABANDONED_PREFIX,
    MANIFEST,
    VERSIONS,
    Manifest,
    ManifestError,
    State,
    abandoned_attempt,
    read_error,
    read_manifest,
    step_dir,
    step_of,
)
from trinity_sync.checkpoint.owner import read_mark
from trinity_sync.checkpoint.tracker_files import TRACKERS, Tracker, newest_finished
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.listing import walk
from trinity_sync.protocol.parts import FULL, Kind


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A step folder.

    Args:
        manifest: what its manifest says; None where the folder is not a committed checkpoint.
        state: what the folder is. Contents are not looked at: see `verification`.
        problems: why it is no committed checkpoint; empty for one, but for what `with_files_seen` sees.
    """

    step: int
    path: Path
    manifest: Manifest | None
    state: State = "committed"
    problems: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind | None:
        """``full`` or ``state_dict``."""
        return self.manifest.kind if self.manifest is not None else None

    @property
    def attempt(self) -> int | None:
        """The attempt that made it."""
        return self.manifest.attempt if self.manifest is not None else None

    @property
    def bytes(self) -> int:
        """Size of the files that the manifest lists."""
        return self.manifest.bytes if self.manifest is not None else 0


def locate(path: Path) -> tuple[Path, int | None]:
    """Find the checkpoint folder that a user's path means: of a run, of its checkpoints, or of one step.

    Returns:
        The checkpoint folder, and the step where the path is a step folder, else None.

    Raises:
        ConfigError: the path is none of these.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run, a checkpoints or a step folder")
    path = path.resolve()
    step = step_of(path.name)
    if step is not None:
        return path.parent, step
    inner = path / "checkpoints"
    if inner.is_dir():
        return inner, None
    trackers = any((path / name).exists() for name in TRACKERS.values())
    if trackers or any(step_of(child.name) is not None for child in path.iterdir()):
        return path, None
    raise ConfigError(f"{path} holds no checkpoints; give a run, a checkpoints or a step folder")


def scan(root: Path, tracker: Tracker | None = None) -> list[CheckpointInfo]:
    """List all step folders, oldest first. Reads manifests only.

    Args:
        tracker: what the tracker of full checkpoints said, by who has to decide on what it said before the folders were
            looked at; None: it is read now.

    Raises:
        UnreadableError: the folder cannot be listed now, or its mark cannot be read now.
    """
    finished, run = newest_finished(root, tracker), _run_of(root)
    try:
        with os.scandir(root) as entries:
            named = [(step_of(entry.name), entry) for entry in entries]
            found = {
                step: Path(entry.path)
                for step, entry in named
                if step is not None and not entry.is_file(follow_symlinks=False)
            }
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(root, error) from error
    return [_look(step, path, finished, run) for step, path in sorted(found.items())]


def look_at(root: Path, step: int) -> CheckpointInfo:
    """Describe the folder of one step as `scan` does."""
    return _look(step, step_dir(root, step), newest_finished(root), _run_of(root))


def _run_of(root: Path) -> str | None:
    mark = read_mark(root)
    return mark.run if mark is not None else None


def _look(step: int, path: Path, finished: int | None, run: str | None) -> CheckpointInfo:
    manifest = None
    try:
        manifest = read_manifest(path)
        fault = None
    except ManifestError as error:
        fault = error
    try:
        if (fault is None or fault.state == "no_manifest") and _of_verl(step, path, manifest, finished):
            return CheckpointInfo(step, path, None, "verl", (f"{path} was written by verl itself: not verified",))
    except OSError as error:
        fault = read_error(path, error) if manifest is None else None
    if fault is not None:
        return CheckpointInfo(step, path, None, fault.state, (str(fault),))
    if manifest is not None and None is not run != manifest.run is not None:
        problem = f"{path} is a checkpoint of another run, {manifest.run}"
        return CheckpointInfo(step, path, None, "foreign", (problem,))
    return CheckpointInfo(step, path, manifest)


def with_files_seen(info: CheckpointInfo) -> CheckpointInfo:
    """The same with what is wrong with its files at a glance: one that is missing, or of another size. What they hold
    is not looked at: see `verification`.
    """
    if info.manifest is None:
        return info
    found = []
    for entry in info.manifest.files:
        try:
            size = (info.path / entry.path).stat().st_size
        except FileNotFoundError:
            found.append(f"{entry.path} is missing")
            continue
        except OSError as error:
            found.append(f"{entry.path} cannot be read now: {error.strerror or error}")
            continue
        if size != entry.bytes:
            found.append(f"{entry.path} has {size} bytes instead of {entry.bytes}")
    return replace(info, problems=(*info.problems, *found))


def _of_verl(step: int, path: Path, manifest: Manifest | None, finished: int | None) -> bool:
    """Return whether verl itself saved here, where nothing or weights alone had been committed before.

    verl names a step in its tracker once it is whole, so a later one is not; where nobody says, any may be.
    """
    if finished is not None and step > finished:
        return False
    if manifest is None:
        return verl_folders.wrote(path)
    return manifest.kind != FULL and verl_folders.wrote_over(path, manifest.paths)


def newest_attempt(root: Path) -> int | None:
    """Return the last attempt that committed anything here, abandoned since or not; None: there was none."""
    attempts = [info.attempt for info in scan(root)]
    attempts += [abandoned_attempt(path.name) for path in root.glob(f"{ABANDONED_PREFIX}*")]
    return max((attempt for attempt in attempts if attempt is not None), default=None)


def places(root: Path) -> list[Path]:
    """List the folders that have step folders in them: the checkpoint folder, and those for weights beside it."""
    return [root, *sorted((root / VERSIONS).glob("*"))]


def committed_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None where the folder is no committed one, or cannot be read now."""
    try:
        return read_manifest(folder)
    except ManifestError:
        return None


def files_of(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files in a folder but the manifest, whether it lists them or not.

    Raises:
        OSError: as of `walk`.
    """
    for parent, names in walk(folder):
        for name in names:
            path = (parent / name).relative_to(folder).as_posix()
            if path != MANIFEST and not (path.startswith(f".{MANIFEST}.") and path.endswith(".tmp")):
                yield path


def check_ours(infos: Iterable[CheckpointInfo], others: Collection[str]) -> None:
    """Check that step folders may be moved out of the way.

    Args:
        others: states of those that may not be moved.

    Raises:
        RunError: one is in such a state.
    """
    for info in infos:
        if info.state in others:
            raise RunError(
                f"{info.problems[0]}; it is left where it is, and stands in the way: move it to another folder, or "
                "save to another one"
            )
