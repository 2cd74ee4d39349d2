"""Whether checkpoints are whole and as they were committed: the files of all ranks, their sizes and digests. Reads
only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint import verl_folders
from trinity_sync.checkpoint.catalog import CheckpointInfo, files_of, scan
from trinity_sync.checkpoint.layout import (
    ManifestError,
    NewerFormatError,
    State,
    UnreadableError,
    read_error,
    read_manifest,
)
from trinity_sync.host.file_digest import digest_file
from trinity_sync.protocol.files import FileEntry
from trinity_sync.protocol.parts import FULL


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What checking all files of a checkpoint found.

    Args:
        files, bytes: how many were checked.
        state: ``committed``: every file is as it was committed. ``damaged`` where one is not, whatever else cannot be
            read now.
        problems: one sentence per fault, those of the state first; empty: it is whole.
        unlisted: files in the folder that the manifest does not know, relative paths.
    """

    path: Path
    files: int
    bytes: int
    state: State
    problems: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every file is as it was committed."""
        return self.state == "committed"


def verify(path: Path, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check sizes and digests of all files of a step folder, the manifest's digest of itself, and that it lists the
    files of all ranks.

    Args:
        progress: called with (bytes checked, bytes in all) every few MB and after each file.
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
    with suppress(OSError):  # a file that cannot be read is a fault already
        needed = verl_folders.missing_files(path, [entry.path for entry in manifest.files])
        faults += [ManifestError(f"{path / name} belongs to the checkpoint, but was not committed") for name in needed]
    faults.sort(key=lambda fault: fault.state == "unreadable")
    listed = {entry.path for entry in manifest.files}
    unlisted: tuple[str, ...] = ()
    with suppress(OSError):  # what others keep there need not be readable
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
    """Find the newest full checkpoint that verifies. Damaged ones are passed over, and folders that are no checkpoints.

    Args:
        on_skip: called with a sentence for each newer one that was passed over.
        skip_unreadable: pass over what cannot be read now, too.
        of_verl: take one that verl itself wrote, which cannot be verified, where it has the files of all ranks.
        roles: places, such as ``actor``, that one of verl's needs to have, too.

    Raises:
        UnreadableError: a newer one cannot be read now.
        NewerFormatError: a newer one was written by a later version of this program.
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
            absent = verl_folders.missing(info.path, roles)
            state, problems = ("committed", ()) if absent is None else (state, (f"{info.path / absent} is missing",))
        if state == "committed":
            return info
        if state == "newer":
            raise NewerFormatError(problems[0])
        if state == "unreadable" and not skip_unreadable:
            raise UnreadableError(problems[0])
        if on_skip is not None:
            on_skip(f"the checkpoint of step {info.step} is passed over: {problems[0]}")
    return None


def _report_within(progress: Callable[[int, int], None], before: int, most: int, total: int, read: int) -> None:
    if read < most:
        progress(before + read, total)


def _fault(folder: Path, entry: FileEntry, progress: Callable[[int], None] | None = None) -> ManifestError | None:
    path = folder / entry.path
    try:
        size, digest = digest_file(path, progress=progress)
    except FileNotFoundError:
        return ManifestError(f"{path} is missing")
    except OSError as error:
        return read_error(path, error)
    if size != entry.bytes:
        return ManifestError(f"{path} has {size} bytes instead of {entry.bytes}")
    if digest != entry.xxh3_128:
        return ManifestError(f"{path} was changed: its digest is {digest} instead of {entry.xxh3_128}")
    return None
