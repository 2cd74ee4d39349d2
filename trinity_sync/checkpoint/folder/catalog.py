"""Lists and verifies the checkpoints of a folder, ours and verl's. Reads only."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint.folder import contents
from trinity_sync.checkpoint.folder.contents import (
    Manifest,
    ManifestError,
    NewerFormatError,
    UnreadableError,
    read_manifest,
)
from trinity_sync.checkpoint.folder.owner import read_mark
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import digest_file, walk
from trinity_sync.protocol.parts import FULL, HISTORY, FileEntry, Kind, missing_rank_files, rank_file, version_folder


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A step folder."""

    step: int
    path: Path
    manifest: Manifest | None
    state: contents.State = "committed"
    problems: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind | None:
        return self.manifest.kind if self.manifest is not None else None

    @property
    def attempt(self) -> int | None:
        return self.manifest.attempt if self.manifest is not None else None

    @property
    def bytes(self) -> int:
        """Size of the files in the manifest."""
        return self.manifest.bytes if self.manifest is not None else 0


def locate(path: Path) -> tuple[Path, int | None]:
    """Return the checkpoint folder of a user's path (a run, its checkpoints, or one step), and the step of a step
    folder. Raises ConfigError if the path is none of these.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run, a checkpoints or a step folder")
    path = path.resolve()
    step = contents.step_of(path.name)
    if step is not None:
        return path.parent, step
    inner = path / "checkpoints"
    if inner.is_dir():
        return inner, None
    trackers = any((path / name).exists() for name in contents.TRACKERS.values())
    if trackers or any(contents.step_of(child.name) is not None for child in path.iterdir()):
        return path, None
    raise ConfigError(f"{path} holds no checkpoints; give a run, a checkpoints or a step folder")


def scan(
    root: Path, tracker: contents.TrackerFile | None = None, known: contents.KnownManifests | None = None
) -> list[CheckpointInfo]:
    """List all step folders, oldest first. Reads manifests only; `known` as for `read_manifest`. Raises UnreadableError
    if the folder or its mark cannot be read now.
    """
    finished, run = contents.newest_finished(root, tracker), _run_of(root)
    try:
        with os.scandir(root) as entries:
            named = [(contents.step_of(entry.name), entry) for entry in entries]
            found = {
                step: Path(entry.path)
                for step, entry in named
                if step is not None and not entry.is_file(follow_symlinks=False)
            }
    except FileNotFoundError:
        return []
    except OSError as error:
        raise contents.read_error(root, error) from error
    if known is not None:
        for gone in known.keys() - set(found.values()):
            del known[gone]
    return [_look(step, path, finished, run, known) for step, path in sorted(found.items())]


def look_at(root: Path, step: int) -> CheckpointInfo:
    """Describe one step's folder as `scan` does."""
    return _look(step, contents.step_dir(root, step), contents.newest_finished(root), _run_of(root))


def _run_of(root: Path) -> str | None:
    mark = read_mark(root)
    return mark.run if mark is not None else None


def _look(
    step: int, path: Path, finished: int | None, run: str | None, known: contents.KnownManifests | None = None
) -> CheckpointInfo:
    manifest = None
    try:
        manifest = read_manifest(path, known)
        fault = None
    except ManifestError as error:
        fault = error
    try:
        if (fault is None or fault.state == "no_manifest") and _of_verl(step, path, manifest, finished):
            return CheckpointInfo(step, path, None, "verl", (f"{path} was written by verl itself: not verified",))
    except OSError as error:
        fault = contents.read_error(path, error) if manifest is None else None
    if fault is not None:
        return CheckpointInfo(step, path, None, fault.state, (str(fault),))
    if manifest is not None and None is not run != manifest.run is not None:
        problem = f"{path} is a checkpoint of another run, {manifest.run}"
        return CheckpointInfo(step, path, None, "foreign", (problem,))
    return CheckpointInfo(step, path, manifest)


def with_files_seen(info: CheckpointInfo) -> CheckpointInfo:
    """Return the same with missing files and wrong sizes as problems. `verify` checks contents."""
    if info.manifest is None:
        return info
    found = []
    for entry in info.manifest.files:
        try:
            size = _status(info, entry).st_size
        except FileNotFoundError:
            found.append(f"{entry.path} is missing")
            continue
        except OSError as error:
            found.append(f"{entry.path} cannot be read now: {error.strerror or error}")
            continue
        if size != entry.bytes:
            found.append(f"{entry.path} has {size} bytes instead of {entry.bytes}")
    return replace(info, problems=(*info.problems, *found))


def _status(info: CheckpointInfo, entry: FileEntry) -> os.stat_result:
    return os.stat(f"{info.path}/{entry.path}")  # noqa: PTH116 - a third of the time of a Path, for very many files


def _of_verl(step: int, path: Path, manifest: Manifest | None, finished: int | None) -> bool:
    """Return whether verl itself saved here, over nothing or over weights alone. verl's tracker names a step once it is
    whole, so a later step is not whole; without a tracker any step may be.
    """
    if finished is not None and step > finished:
        return False
    if manifest is None:
        return wrote(path)
    return manifest.kind != FULL and wrote_over(path, manifest.paths)


def newest_attempt(root: Path) -> int | None:
    """Return the last attempt with a commit here, abandoned or not; None: there is none."""
    attempts = [info.attempt for info in scan(root)]
    attempts += [contents.abandoned_attempt(path.name) for path in root.glob(f"{contents.ABANDONED_PREFIX}*")]
    return max((attempt for attempt in attempts if attempt is not None), default=None)


def places(root: Path) -> list[Path]:
    """List the folders with step folders: the checkpoint folder, and those for weights next to it."""
    return [root, *sorted((root / contents.VERSIONS).glob("*"))]


def history(root: Path) -> list[tuple[int, int]]:
    """List the versions of a run's history, (attempt, step), ascending. Raises UnreadableError."""
    deltas = root / contents.DELTAS
    try:
        found = [(contents.key_of(path.name), path) for path in deltas.iterdir()] if deltas.is_dir() else []
        return sorted(version for version, path in found if version is not None and (path / HISTORY).is_file())
    except OSError as error:
        raise contents.read_error(deltas, error) from error


def history_bytes(root: Path) -> int:
    """Return the size of a run's history, bytes."""
    return sum(bytes_in(version_folder(root / contents.DELTAS, version)) for version in history(root))


def bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files, including those being written, without files that cannot be read now."""
    found = 0
    for parent, _, names in os.walk(folder):  # of folders that vanish meanwhile it says nothing
        for name in names:
            with suppress(OSError):
                found += Path(parent, name).stat().st_size
    return found


def shared_bytes(info: CheckpointInfo) -> int:
    """Return the size of a checkpoint's files that the history of its run has as well, so that deleting the checkpoint
    does not free them, bytes. Files that cannot be read now do not count.
    """
    found = 0
    files = info.manifest.files if info.manifest is not None and (info.path.parent / contents.DELTAS).is_dir() else ()
    for entry in files:
        with suppress(OSError):
            if entry.path.startswith(contents.WEIGHTS) and _status(info, entry).st_nlink > 1:
                found += entry.bytes
    return found


def committed_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if the folder is no committed checkpoint, or cannot be read now."""
    try:
        return read_manifest(folder)
    except ManifestError:
        return None


def files_of(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files in a folder except the manifest, listed or not. Raises OSError as
    `walk`.
    """
    for parent, names in walk(folder):
        for name in names:
            path = (parent / name).relative_to(folder).as_posix()
            if path != contents.MANIFEST and not (path.startswith(f".{contents.MANIFEST}.") and path.endswith(".tmp")):
                yield path


def check_ours(infos: Iterable[CheckpointInfo], others: Collection[str]) -> None:
    """Check that step folders may be moved away. Raises RunError if one is in one of the states `others`."""
    for info in infos:
        if info.state in others:
            raise RunError(
                f"{info.problems[0]}; it is left where it is, and stands in the way: move it to another folder, or "
                "save to another one"
            )


# Verification: the files of all ranks, their sizes and digests.


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`."""

    path: Path
    files: int  # number of files that were checked
    bytes: int  # of these
    # ``committed``: all files are unchanged. ``damaged`` if one is not, whether or not others can be read.
    state: contents.State
    problems: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.state == "committed"


def verify(path: Path, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check all files of a step folder: sizes, digests, the manifest's own digest, and that no rank's file is missing.
    `progress`: called with (bytes checked, bytes in all) every few MB and after each file.
    """
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return VerifyReport(path, 0, 0, error.state, (str(error),), ())
    faults: list[ManifestError] = []
    checked = 0
    for entry in manifest.files:
        within = None if progress is None else partial(_report_within, progress, checked, entry.bytes, manifest.bytes)
        fault = _fault(path, entry, within)
        if fault is not None:
            faults.append(fault)
        checked += entry.bytes
        if progress is not None:
            progress(checked, manifest.bytes)
    with suppress(OSError):  # an unreadable file is a fault already
        needed = missing_files(path, [entry.path for entry in manifest.files])
        faults += [ManifestError(f"{path / name} belongs to the checkpoint, but was not committed") for name in needed]
    faults.sort(key=lambda fault: fault.state == "unreadable")
    listed = {entry.path for entry in manifest.files}
    unlisted: tuple[str, ...] = ()
    with suppress(OSError):  # other programs' files may be unreadable
        unlisted = tuple(sorted(set(files_of(path)) - listed))
    state = faults[0].state if faults else "committed"
    return VerifyReport(path, len(manifest.files), manifest.bytes, state, tuple(map(str, faults)), unlisted)


def newest_good(
    root: Path,
    *,
    on_skip: Callable[[str], None] | None = None,
    skip_unreadable: bool = False,
    of_verl: bool = False,
    roles: Collection[str] = (),
) -> CheckpointInfo | None:
    """Find the newest full checkpoint that verifies. Damaged ones and other folders are skipped. Raises
    UnreadableError, NewerFormatError. `roles`: places, such as ``actor``, that a checkpoint of verl's has to have.
    """
    for info in reversed(scan(root)):
        state, problems = info.state, info.problems
        if info.manifest is not None:
            if info.kind != FULL:
                continue
            if info.manifest.files:
                report = verify(info.path)
                state, problems = report.state, report.problems
            else:
                state, problems = "damaged", (f"{info.path} lists no files",)
        elif of_verl and state == "verl":
            absent = missing(info.path, roles)
            state, problems = ("committed", ()) if absent is None else (state, (f"{info.path / absent} is missing",))
        if state == "committed":
            return info
        if state == "newer":
            raise NewerFormatError(problems[0])
        if state == "unreadable" and not skip_unreadable:
            raise UnreadableError(problems[0])
        if on_skip is not None:
            on_skip(f"the checkpoint of step {info.step} is skipped: {problems[0]}")
    return None


def _report_within(progress: Callable[[int, int], None], before: int, most: int, total: int, read: int) -> None:
    if read < most:
        progress(before + read, total)


def _fault(folder: Path, entry: FileEntry, progress: Callable[[int], None] | None = None) -> ManifestError | None:
    try:
        problem = difference(folder, entry, progress=progress)
    except OSError as error:
        return contents.read_error(folder / entry.path, error)
    return None if problem is None else ManifestError(f"{folder}/{problem}")


def difference(
    folder: Path, entry: FileEntry, *, durable: bool = False, progress: Callable[[int], None] | None = None
) -> str | None:
    """Return how a file in the folder differs from its entry, beginning with its name there, since a copy from a mirror
    may be the one that differs; None: it does not. `durable`: fsync it. Raises OSError.
    """
    try:
        size, digest = digest_file(folder / entry.path, durable=durable, progress=progress)
    except FileNotFoundError:
        return f"{entry.path} is missing"
    if size != entry.bytes:
        return f"{entry.path} has {size} bytes instead of {entry.bytes}"
    if digest != entry.xxh3_128:
        return f"{entry.path} was changed: its digest is {digest} instead of {entry.xxh3_128}"
    return None


# Checkpoints that verl itself wrote, without a manifest or over committed weights: recognised by file names.


_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")
_PARTS = ("model", "optim", "extra_state")
_STATE = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_MEGATRON = "ckpt_contents.json"
_METADATA = ".metadata"
_DISTRIBUTED = (f"/{_METADATA}", ".distcp")
_CHUNKS = rb"__\d+_\d+\.distcp"


def wrote(folder: Path) -> bool:
    """Return whether verl wrote a folder without a manifest, by the names of its files. A folder with a file of this
    program's trainer is ours: its engines use the same names.
    """
    if (folder / contents.TRAINER_STATE).exists():
        return False
    return any(_ranks(place) or (place / _MEGATRON).is_file() for place in _places(folder))


def wrote_over(folder: Path, weights: Collection[str]) -> bool:
    """Return whether verl has saved a full checkpoint into a folder with committed weights (relative paths)."""
    found = (path for place in _places(folder) for path in place.iterdir())
    return any(
        (path.name == _MEGATRON or _STATE.fullmatch(path.name)) and path.relative_to(folder).as_posix() not in weights
        for path in found
    )


def missing(folder: Path, roles: Collection[str] = ()) -> str | None:
    """Return the first missing file or role of a full checkpoint of verl's, relative to the folder; None: it is
    complete.
    """
    for role in roles:
        if not _ranks(folder / role) and not (folder / role / _MEGATRON).is_file():
            return role
    files = [path.relative_to(folder).as_posix() for place in _places(folder) for path in place.glob("*.pt")]
    return next(iter(missing_rank_files(files)), None)


def missing_files(folder: Path, files: Collection[str]) -> list[str]:
    """Return missing files that these files (relative paths) depend on: other ranks' by name, and those that torch's
    ``.metadata`` names. Raises OSError if a ``.metadata`` cannot be read.
    """
    missing = missing_rank_files(files)
    for place in sorted({path.rpartition("/")[0] for path in files if path.endswith(_DISTRIBUTED)}):
        named = {f"{place}/{_METADATA}"}
        if named.issubset(files):  # a pickle, which is not loaded: it has the file names as plain text
            found = re.findall(_CHUNKS, (folder / place / _METADATA).read_bytes())
            named = {f"{place}/{name.decode()}" for name in found}
        missing += sorted(named.difference(files))
    return missing


def has_written(folder: Path, file: str | None) -> bool:
    """Return whether a file that verl's trainer writes with `torch.save` is complete: a partial one lacks the archive's
    end. None: no file is expected.
    """
    return file is None or zipfile.is_zipfile(folder / file)


def recognise(folder: Path) -> tuple[str, int]:
    """Return engine and number of ranks of a complete checkpoint of verl's FSDP engine in ``actor``. Raises RunError
    for any other folder.
    """
    actor = folder / "actor"
    ranks = _ranks(actor)
    if not ranks:
        raise RunError(f"{folder} has neither {contents.MANIFEST} nor verl's FSDP shards below actor/")
    wanted = [rank_file(name, ranks, rank) for name in _PARTS for rank in range(ranks)]
    absent = [name for name in wanted if not (actor / name).exists()]
    if absent:
        raise RunError(f"{folder} is not whole: actor/{absent[0]} is missing")
    try:
        version = int(json.loads((actor / "fsdp_config.json").read_text())["FSDP_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: actor/fsdp_config.json cannot be read: {error}") from error
    return ("fsdp" if version == 1 else f"fsdp{version}"), ranks


def _places(folder: Path) -> list[Path]:
    """List the folders where verl's engines may have saved: a role's folder (``actor``), or the step's (SFT)."""
    return [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]


def _ranks(place: Path) -> int:
    """Return the number of ranks of the shards; 0: there are none."""
    found = (_SHARD.fullmatch(path.name) for path in sorted(place.glob("model_*.pt")))
    return next((int(match[1]) for match in found if match), 0)
