"""Checkpoints on disk: list, verify, commit, tidy up after a crash. Called by the monitor and the command line.

The commit of a folder, in this order, so that a crash at any point leaves what was there before or all of the new:

1. the files that the parts reported are checked (there, of that size); those they did not report are digested;
2. of an earlier commit of the step (its weights) the files are hard-linked in;
3. all files and folders are fsynced, the manifest is written last and fsynced;
4. one rename makes the folder visible; where the step is visible already the two folders change places in one call.

Trackers move after that, and only then is anything old deleted. Files written straight into the step folder (verl's own
way) are committed there: then the manifest, replaced in one step, is the commit.

What may take the place of a checkpoint, whoever made it: one that extends it (`Manifest.extends`), always; another one
where nobody holds it; weights alone never that of a full one. Weights that find their place taken are committed beside
it (`layout.versions_dir`), for the readers of their run.

Files that no manifest lists belong to others (verl writes ``data.pt`` into the step folder when it comes to it). They
stay with the step: a full commit takes in those that are there with its attempt's, and what was written since is linked
into the new folder before the old one goes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint import holds, verls
from trinity_sync.checkpoint.layout import (
    ABANDONED_PREFIX,
    MANIFEST,
    REPLACED_PREFIX,
    STAGING,
    TRASH_PREFIX,
    VERSIONS,
    Manifest,
    ManifestError,
    NewerFormatError,
    State,
    UnreadableError,
    abandoned_attempt,
    abandoned_dir,
    digest_file,
    journal_path,
    read_error,
    read_manifest,
    staging_dir,
    step_dir,
    step_of,
    versions_dir,
    write_manifest,
)
from trinity_sync.checkpoint.removal import (
    forget_deletion,
    forget_deletions,
    remove_checkpoint,
    take_back,
    undo_unfinished,
)
from trinity_sync.checkpoint.trackers import (
    COMMITTED,
    TRACKERS,
    Tracker,
    newest_finished,
    write_committed,
    write_tracker,
)
from trinity_sync.durable import sync_folder
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.protocol.files import FileEntry
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind, covers

#: Files up to this size are copied, not linked, while parts of the step are still being written: a writer that writes
#: a small common file (a config) again must not change the committed one under its readers.
_COPY_BELOW = 1 << 20

_WEIGHTS_SUFFIX = ".weights"

#: What `os.link` says where a file cannot be linked: not every shared file system has hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS)

#: What a commit does not take the place of, whoever holds it or not.
_NOT_OURS = ("newer", "verl", "unreadable")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A step folder.

    Args:
        manifest: None where the folder is not a committed checkpoint.
        state: what it is. Contents are not looked at: see `verify`.
        problems: why it is no committed checkpoint; empty for one.
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


def locate(path: Path) -> tuple[Path, int | None]:
    """(checkpoint folder, step or None) of a path that a user gives: a run, a checkpoints or a step folder.

    Raises:
        ConfigError: it is none of these.
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
    """All step folders, oldest first. Reads manifests only.

    Args:
        tracker: of full checkpoints, by who has to decide on what it said before the folders were looked at.

    Raises:
        UnreadableError: the folder cannot be listed now.
    """
    finished = newest_finished(root, tracker)
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
    return [_look(step, path, finished) for step, path in sorted(found.items())]


def _look_at(root: Path, step: int) -> CheckpointInfo:
    return _look(step, step_dir(root, step), newest_finished(root))


def _look(step: int, path: Path, finished: int | None) -> CheckpointInfo:
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
    return CheckpointInfo(step, path, manifest)


def _of_verl(step: int, path: Path, manifest: Manifest | None, finished: int | None) -> bool:
    """Whether a folder is a checkpoint that verl itself wrote, where nothing or its weights alone had been committed.
    verl names a step in its tracker once it is whole, so a later one is not; where nobody says, any may be.
    """
    if finished is not None and step > finished:
        return False
    if manifest is None:
        return verls.wrote(path)
    return manifest.kind != FULL and verls.wrote_over(path, manifest.paths)


def verify(path: Path, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check sizes and digests of all files of a step folder, and the manifest's digest of itself.

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
    faults.sort(key=lambda fault: fault.state == "unreadable")
    listed = {entry.path for entry in manifest.files}
    unlisted = tuple(sorted(set(_files(path)) - listed))
    state = faults[0].state if faults else "committed"
    return VerifyReport(path, len(manifest.files), manifest.bytes, state, tuple(map(str, faults)), unlisted)


def newest_good(
    root: Path,
    *,
    kind: Kind = FULL,
    on_skip: Callable[[str], None] | None = None,
    skip_unreadable: bool = False,
    of_verl: bool = False,
    roles: Collection[str] = (),
) -> CheckpointInfo | None:
    """The newest checkpoint that verifies, to resume from (``full``) or to load weights from (``state_dict``: either).

    A damaged one is passed over, and so is a folder that is no checkpoint.

    Args:
        on_skip: called with a sentence for each newer one that was passed over.
        skip_unreadable: pass over what cannot be read now, too.
        of_verl: take one that verl itself wrote, which cannot be verified, where it has the files of all ranks.
        roles: those that one of verl's has to hold, too.

    Raises:
        UnreadableError: a newer one cannot be read now.
        NewerFormatError: a newer one was written by a later version of this program.
    """
    for info in reversed(scan(root)):
        state, problems = info.state, info.problems
        if info.manifest is not None:
            if kind == FULL and info.kind != FULL:
                continue
            if info.manifest.files:
                report = verify(info.path)
                state, problems = report.state, report.problems
            else:
                state, problems = "damaged", (f"{info.path} lists no files",)
        elif of_verl and state == "verl":
            absent = verls.missing(info.path, roles)
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


def prepare_staging(root: Path, step: int, attempt: int) -> Path:
    """Create the folder into which the parts of a step are written, and return it."""
    folder = staging_dir(root, step, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def commit_folder(
    root: Path,
    draft: Manifest,
    *,
    partial: bool = False,
    durable: bool = True,
    beside: bool = False,
    clock: Callable[[], float] = time.time,
) -> Manifest:
    """Make a step visible; see the module's text for the order of things. May be called again after a crash.

    Args:
        draft: the manifest to write; its `files` are those that the parts reported.
        partial: other parts of the step are still being written. Only the reported files are committed, from a
            folder of links, and the staging folder stays for the rest.
        durable: fsync. Without it a commit survives the death of every process, but not a power cut.
        beside: the step's place is taken; commit these weights in `layout.versions_dir`.
        clock: Unix seconds, by which leases end.

    Returns:
        The manifest that was written, with all files.

    Raises:
        RunError: a reported file is missing or has another size; or what is visible must not be replaced by this.
        OSError: the disk refused; nothing became visible.
    """
    place = versions_dir(root, draft.attempt) if beside else root
    target = step_dir(place, draft.step)
    staging = staging_dir(root, draft.step, draft.attempt)
    if not beside:
        forget_deletion(root, draft.step, draft.attempt)
    if not any(_files(staging)):
        if beside:
            raise RunError(
                f"weights of step {draft.step} were not written to {staging}, and they must not take the place of the "
                f"checkpoint in {step_dir(root, draft.step)}"
            )
        return _commit_in_place(target, draft, partial, durable, clock)
    place.mkdir(parents=True, exist_ok=True)
    if target.exists():
        _check_ours([_look_at(place, draft.step)], _NOT_OURS)
    source = _link_reported(staging, draft) if partial else staging
    adopted = _adopt(root, target, source, draft, partial)
    manifest = replace(draft, files=_collect(source, draft.files, adopted, everything=not partial))
    _check_replaces(place, target, manifest, clock)
    if durable:
        _sync_tree(source)
    write_manifest(source, manifest, durable=durable)
    _publish(place, source, target, manifest, clock)
    return manifest


def taken(root: Path, step: int, attempt: int) -> bool:
    """Whether what is staged of a step finds in its place what nothing of this program takes the place of."""
    target = step_dir(root, step)
    return target.exists() and any(_files(staging_dir(root, step, attempt))) and _look_at(root, step).state in _NOT_OURS


def adopt_folder(root: Path, source: Path, step: int) -> None:
    """Make a folder that came from elsewhere, with its manifest, the checkpoint of a step; durable.

    What is there under that step is renamed to ``abandoned-*`` first.

    Args:
        source: on the same file system. Its files have been fsynced.
    """
    for parent, _, _ in os.walk(source, topdown=False):
        sync_folder(Path(parent))
    target = step_dir(root, step)
    if target.exists():
        info = _look_at(root, step)
        _check_ours([info], ("newer",))
        target.rename(abandoned_dir(root, step, info.attempt))
    source.rename(target)
    sync_folder(root)


def clean_staging(root: Path, step: int, attempt: int, *, clock: Callable[[], float] = time.time) -> None:
    """Remove what is staged of a step; not what a commit that failed has left there in place of its own."""
    folder = staging_dir(root, step, attempt)
    for path in (folder, folder.with_name(folder.name + _WEIGHTS_SUFFIX)):
        if path.is_dir():
            _finish_exchange(root, path, clock)
        if path.is_dir():
            discard(root, path)
    journal_path(root, step, attempt).unlink(missing_ok=True)


def recover(
    root: Path,
    *,
    keep: Collection[tuple[int, int]] = (),
    attempt: int | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Put the folder in order after a crash: finish deletions and replacements, drop what was staged.

    Args:
        keep: (step, attempt) whose staging folders are still in use.
        attempt: whose versions beside the step folders are still in use; None: nobody's.
        clock: Unix seconds, by which leases end.
    """
    if not root.is_dir():
        return
    undo_unfinished(root, now=clock())
    for place in _places(root):
        for path in place.glob(f"{REPLACED_PREFIX}*"):
            _finish_replacing(place, path, clock)
    kept = {staging_dir(root, step, attempt).name for step, attempt in keep}
    for path in (root / STAGING).iterdir() if (root / STAGING).is_dir() else ():
        if path.is_dir():
            _finish_exchange(root, path, clock)
        if path.is_dir() and path.name not in kept:
            discard(root, path)
        elif path.is_file() and path.stem not in kept:
            path.unlink(missing_ok=True)
    clear_versions(root, attempt=attempt, now=clock())
    for name in (*TRACKERS.values(), COMMITTED):
        for path in root.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)
    purge(root)


def _places(root: Path) -> list[Path]:
    """Folders with step folders in them: the checkpoint folder, and those of the weights beside it."""
    return [root, *sorted((root / VERSIONS).glob("*"))]


def clear_versions(
    root: Path, *, attempt: int | None = None, keep: Callable[[int], bool] = lambda step: True, now: float
) -> None:
    """Remove the weights that were committed beside the step folders; what somebody reads stays until the next time.

    Args:
        attempt: that is running. Its place stays, also an empty one: a commit may be about to move into it.
        keep: told a step, whether to leave that attempt's weights of it alone.
        now: Unix seconds.
    """
    running = versions_dir(root, attempt) if attempt is not None else None
    for place in sorted((root / VERSIONS).iterdir()) if (root / VERSIONS).is_dir() else ():
        for info in scan(place):
            if info.manifest is None:
                discard(place, info.path)
            elif place != running or not keep(info.step):
                remove_checkpoint(place, info.manifest, now=now)
        purge(place)
        if place != running and not scan(place):
            discard(root, place)
    with suppress(OSError):  # not empty, or not there
        (root / VERSIONS).rmdir()


def finish_replacements(root: Path) -> None:
    """Bring back what a crash left out of its place: while a fuller one was to take it, or it was about to be deleted.
    Nothing goes by that. The caller holds the folder.
    """
    undo_unfinished(root, now=time.time())
    for path in root.glob(f"{REPLACED_PREFIX}*"):
        target = root / path.name.removeprefix(REPLACED_PREFIX)
        if not target.exists():
            path.rename(target)


def check_start(root: Path, step: int, *, of_verl: bool = False) -> None:
    """That a resume may go on after a step: of later ones it sets aside what is this program's own, and nothing else.

    Args:
        of_verl: verl itself may have written here. Else what looks as if it had is ours, without its manifest.

    Raises:
        RunError: a later one was written by a newer version of it, or by verl.
    """
    _check_ours([info for info in scan(root) if info.step > step], ("newer", "verl") if of_verl else ("newer",))


def newest_attempt(root: Path) -> int | None:
    """The last attempt that committed anything here, abandoned since or not; None: there was none."""
    attempts = [info.attempt for info in scan(root)]
    attempts += [abandoned_attempt(path.name) for path in root.glob(f"{ABANDONED_PREFIX}*")]
    return max((attempt for attempt in attempts if attempt is not None), default=None)


def set_start(root: Path, step: int, attempt: int, *, of_verl: bool = False) -> list[Path]:
    """Prepare a resume: `attempt` goes on after `step`. Later folders become ``abandoned-*``, trackers are set back.

    Args:
        step: the step that the resume starts from; 0: from the initial weights.
        attempt: the new attempt; what is staged of others is removed.
        of_verl: as for `check_start`.

    Returns:
        The new paths of the abandoned folders.

    Raises:
        RunError: as `check_start`; nothing has been touched then.
    """
    check_start(root, step, of_verl=of_verl)
    recover(root, clock=time.time)
    forget_deletions(root, attempt)
    infos = scan(root)
    # What the resume starts from may be verl's own.
    full = [info.step for info in infos if info.kind == FULL or (info.step == step and info.state == "verl")]
    # Trackers first: a crash in between leaves them naming something that is there.
    if root.is_dir():
        write_committed(root, max((of for of in full if of <= step), default=0))
    for kind, steps in ((STATE_DICT, [info.step for info in infos if info.manifest is not None] + full), (FULL, full)):
        write_tracker(root, kind, max((of for of in steps if of <= step), default=None))
    abandoned = []
    for info in infos:
        if info.step > step:
            before = info.attempt if info.attempt is not None or attempt == 0 else attempt - 1
            path = abandoned_dir(root, info.step, before)
            info.path.rename(path)
            abandoned.append(path)
    if abandoned:
        sync_folder(root)
    return abandoned


def _check_ours(infos: Collection[CheckpointInfo], others: Collection[str]) -> None:
    for info in infos:
        if info.state in others:
            raise RunError(
                f"{info.problems[0]}; it is left where it is, and stands in the way: move it to another folder, or "
                "save to another one"
            )


def discard(root: Path, path: Path) -> None:
    """Delete a folder: first out of sight with one rename, then piece by piece."""
    _delete(_put_out_of_sight(root, path))


def _put_out_of_sight(root: Path, path: Path) -> Path:
    trash = root / f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}"
    path.rename(trash)
    return trash


def _delete(trash: Path | None) -> None:
    if trash is not None:
        shutil.rmtree(trash, ignore_errors=True)


def purge(root: Path) -> list[str]:
    """Remove what earlier deletions left; a folder that resists does not stop the others. Returns what went wrong."""
    problems: list[str] = []
    trash = list(root.glob(f"{TRASH_PREFIX}*"))
    if trash:
        sync_folder(root)  # else a power cut could bring back the name of a checkpoint without its files
    for path in trash:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} could not be removed: {error}")
    return problems


def _commit_in_place(
    target: Path, draft: Manifest, partial: bool, durable: bool, clock: Callable[[], float]
) -> Manifest:
    target.mkdir(parents=True, exist_ok=True)
    try:
        manifest = replace(draft, files=_collect(target, draft.files, {}, everything=not partial))
    except RunError:
        with suppress(OSError):  # not empty
            target.rmdir()
        raise
    if (target / MANIFEST).exists():
        read_manifest(target)  # one that cannot be read is not written over
    _check_replaces(target.parent, target, manifest, clock)
    if durable:
        _sync_tree(target)
        sync_folder(target.parent)
    with _replacing(target.parent, target, manifest, clock) as replaced:
        try:
            write_manifest(target, manifest, durable=durable)
            _check_unheld(target.parent, target, replaced, manifest, clock)
        except Exception as error:
            take_back(error, lambda: _take_manifest_back(target, replaced, durable))
            raise
    return manifest


def _take_manifest_back(target: Path, replaced: Manifest | None, durable: bool) -> None:
    """Let the manifest be the one again that a commit in place has replaced; None: there was none."""
    if replaced is None:
        (target / MANIFEST).unlink(missing_ok=True)
        if durable:
            sync_folder(target)
    elif _committed(target) != replaced:
        write_manifest(target, replaced, durable=durable)


def _link_reported(staging: Path, draft: Manifest) -> Path:
    """A folder of links to the reported files, beside the staging folder."""
    folder = staging.with_name(staging.name + _WEIGHTS_SUFFIX)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for entry in draft.files:
        source = staging / entry.path
        if source.exists():
            _link(source, folder / entry.path, copy=entry.bytes < _COPY_BELOW)
    return folder


def _adopt(root: Path, target: Path, source: Path, draft: Manifest, partial: bool) -> dict[str, FileEntry]:
    """Link into `source` what an earlier commit of the step holds and the new one does not bring.

    Returns the entries of the files that an earlier commit of this attempt had digested; it may lie beside. A folder
    without a manifest was written by parts that use verl's own paths. What others write into one with a manifest is
    left to `_let_go`: they may not have done yet.
    """
    earlier: dict[str, FileEntry] = {}
    wanted = {entry.path for entry in draft.files}
    base = target
    ours = not (target / MANIFEST).exists()
    for folder in (target, step_dir(versions_dir(root, draft.attempt), draft.step)):
        found = _committed(folder)
        if found is not None and found.attempt == draft.attempt:
            earlier, base, ours = {entry.path: entry for entry in found.files}, folder, False
            break
    if ours and not partial:
        wanted |= set(_files(base))
    adopted = {}
    for path in earlier.keys() | wanted:
        if not (source / path).exists() and (base / path).is_file():
            _link(base / path, source / path, copy=False)
            if path in earlier:
                adopted[path] = earlier[path]
    return adopted


def _committed(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except ManifestError:
        return None


def _link(source: Path, target: Path, *, copy: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            os.link(source, target)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    shutil.copyfile(source, target)


def _collect(
    folder: Path, reported: Collection[FileEntry], adopted: Mapping[str, FileEntry], *, everything: bool
) -> tuple[FileEntry, ...]:
    """Entries of all files that go into the commit."""
    entries = dict(adopted) | {entry.path: entry for entry in reported}
    for entry in entries.values():
        path = folder / entry.path
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "is not there" if size is None else f"has {size} bytes"
            raise RunError(f"{entry.path} was reported with {entry.bytes} bytes, but {found} in {folder}")
    for name in _files(folder) if everything else ():
        if name not in entries:
            entries[name] = FileEntry(name, *digest_file(folder / name))
    return tuple(sorted(entries.values()))


def _check_replaces(place: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Whether a commit may take the place of what is visible at `target`.

    Raises:
        RunError: not of this, or not now.
    """
    visible = _committed(target)
    if visible is None or manifest.extends(visible):
        return
    if not covers(manifest.kind, visible.kind):
        raise _refused(target, visible, manifest, "which weights alone do not replace")
    if names := holds.holders(place, visible, now=clock()):
        raise _refused(target, visible, manifest, f"held by {', '.join(names)}")


@contextmanager
def _replacing(place: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> Iterator[Manifest | None]:
    """What a commit takes the place of; None: nothing that was a checkpoint. Within the block nobody comes to hold
    that, nor the new one, which may have to go again. Where that cannot be ensured, only what takes nothing from
    anybody goes on.

    Raises:
        RunError: as `_check_replaces`.
        UnreadableError: nobody knows what is there.
        OSError: readers cannot be kept from what goes.
    """
    visible = _replaced(target)
    takes = visible is not None and not manifest.extends(visible)
    now = clock()
    with ExitStack() as claims:
        for claimed in {of.attempt: of for of in (visible, manifest) if of is not None}.values():
            try:
                claims.enter_context(holds.claim(place, claimed, now=now))
            except OSError:
                if takes:
                    raise
        _check_replaces(place, target, manifest, clock)
        yield visible


def _check_unheld(
    place: Path, target: Path, replaced: Manifest | None, manifest: Manifest, clock: Callable[[], float]
) -> None:
    """That nobody holds what a commit has taken the place of: our claim may have run out, because this program was
    stopped for a while.

    Raises:
        RunError: somebody does.
    """
    if replaced is not None and (names := _holders_of(place, replaced, manifest, clock)):
        raise _refused(target, replaced, manifest, f"held by {', '.join(names)} since just now")


def _refused(target: Path, visible: Manifest, manifest: Manifest, reason: str) -> RunError:
    return RunError(
        f"step {manifest.step} cannot be committed as {manifest.kind} by attempt {manifest.attempt}: {target} is a "
        f"{visible.kind} checkpoint of attempt {visible.attempt}, {reason}"
    )


def _publish(place: Path, source: Path, target: Path, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Make `source` visible as `target`. What is there goes, unless somebody holds it."""
    if (target / MANIFEST).exists() and _committed(target) is None:
        # It cannot be read, or not now: nobody knows what it is worth.
        target.rename(abandoned_dir(place, manifest.step, None))
    with _replacing(place, target, manifest, clock):
        aside = _change_places(place, source, target)
        trash = None
        try:
            if aside is None:
                sync_folder(place)
            else:
                _check_unheld(place, target, _replaced(aside), manifest, clock)
                trash = _let_go(place, aside, manifest)
        except Exception as error:
            take_back(error, partial(_put_back, source, target, aside, manifest))
            raise
    _delete(trash)


def _change_places(place: Path, source: Path, target: Path) -> Path | None:
    """Make `source` visible as `target`; returns where that is now which was there; None: nothing was."""
    if not target.exists():
        source.rename(target)
        return None
    if _exchange(source, target):
        return source
    aside = place / f"{REPLACED_PREFIX}{target.name}"
    target.rename(aside)
    try:
        source.rename(target)
    except Exception as error:
        take_back(error, partial(aside.rename, target))
        raise
    return aside


def _replaced(aside: Path) -> Manifest | None:
    """What a commit has taken the place of; None: nothing that was a checkpoint.

    Raises:
        UnreadableError: it cannot be read now, so nobody knows who holds it.
    """
    try:
        return read_manifest(aside)
    except UnreadableError:
        raise
    except ManifestError:
        return None


def _let_go(place: Path, aside: Path, successor: Manifest) -> Path | None:
    """Part with what a commit has taken the place of; returns what of it is to be deleted, out of sight now. Files of
    others stay with the step; a full checkpoint that has files which the new one lacks, and what cannot be read: these
    are set aside as ``abandoned-*``.
    """
    # Before the old one goes, else a power cut could bring back its name without its files. A commit does this within
    # its claim, though it may be slow: while it can fail the new one may have to go again, so nobody is to hold that
    # yet. Should it last longer than the claim, readers get the new one, and lose it only if the disk then fails, too.
    sync_folder(place)
    replaced = _committed(aside)
    if replaced is None and (aside / MANIFEST).exists():
        aside.rename(abandoned_dir(place, successor.step, None))
        return None
    target = step_dir(place, successor.step)
    listed = replaced.paths if replaced is not None else set()
    _bring_others(aside, listed, target)
    if replaced is not None and replaced.kind == FULL and not listed <= successor.paths:
        aside.rename(abandoned_dir(place, successor.step, replaced.attempt))
        return None
    return _put_out_of_sight(place, aside)


def _bring_others(source: Path, listed: Collection[str], target: Path) -> None:
    """Let what others wrote into `source`, which its manifest does not list, be in `target`. Where it cannot be linked
    it moves: a copy would take its time, and miss what they write after it.
    """
    for path in set(_files(source)).difference(listed):
        if (source / path).is_file() and not (target / path).exists():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / path, target / path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                (source / path).rename(target / path)


def _holders_of(place: Path, replaced: Manifest, manifest: Manifest, clock: Callable[[], float]) -> list[str]:
    """Who holds a checkpoint whose place another one has taken, and loses by it."""
    extended = manifest.extends(replaced)
    return [] if extended else holds.holders(place, replaced, now=clock(), successor=manifest)


def _put_back(source: Path, target: Path, aside: Path | None, manifest: Manifest) -> None:
    """The inverse of `_change_places`. What others wrote stays with the step."""
    if aside == source:
        _exchange(source, target)
    else:
        target.rename(source)
        if aside is not None:
            aside.rename(target)
    _bring_others(source, manifest.paths, target)
    sync_folder(target.parent)


def _finish_replacing(root: Path, aside: Path, clock: Callable[[], float]) -> None:
    """End a replacement by two renames, or take it back: where the second had not happened, or somebody holds what was
    to go.
    """
    target = root / aside.name.removeprefix(REPLACED_PREFIX)
    replaced, manifest = _committed(aside), _committed(target)
    if replaced is not None and manifest is not None and _holders_of(root, replaced, manifest, clock):
        _bring_others(target, manifest.paths, aside)
        discard(root, target)
    if not target.exists():
        aside.rename(target)
    elif manifest is not None:
        _delete(_let_go(root, aside, manifest))
    else:  # nobody knows what it is worth
        step = step_of(target.name)
        assert step is not None, aside
        aside.rename(abandoned_dir(root, step, None))


def _finish_exchange(root: Path, staging: Path, clock: Callable[[], float]) -> None:
    """Do what a crash right after an exchange has left undone: take it back where somebody holds what was to go, else
    part with that. What cannot be read now may be that, too, and is set aside.
    """
    try:
        staged = read_manifest(staging)
    except UnreadableError:
        step = staging.name.partition("-")[0]
        if step.isdecimal():
            staging.rename(abandoned_dir(root, int(step), None))
        return
    except ManifestError:
        return
    for place in _places(root):
        target = step_dir(place, staged.step)
        visible = _committed(target)
        if visible is None:
            continue
        own = staging_dir(root, visible.step, visible.attempt).name
        if staging.name not in (own, own + _WEIGHTS_SUFFIX):
            continue
        if (staged.attempt, staged.created) >= (visible.attempt, visible.created):
            continue
        if _holders_of(place, staged, visible, clock):
            _exchange(staging, target)
            _bring_others(staging, visible.paths, target)
        else:
            _delete(_let_go(place, staging, visible))
        return


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change places in one step; False where the file system cannot (some network ones)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = (Path(parent) / name).relative_to(folder).as_posix()
            if path != MANIFEST and not (path.startswith(f".{MANIFEST}.") and path.endswith(".tmp")):
                yield path


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
