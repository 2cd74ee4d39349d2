"""A second place for committed full checkpoints, laid out as the checkpoint folder is::

    .run.json                                                   the mark of the run, see `owner`
    latest_checkpointed_iteration.txt
    global_step_20/manifest.json, global_step_20/actor/...      a checkpoint, as here
    global_step_30/.uploading.json, global_step_30/actor/...    on its way; no checkpoint
    global_step_40/manifest.abandoned.json, ...                 later than what a resume began with; no checkpoint

Of a checkpoint the manifest is written last, and the tracker after it, so a copy that broke off is none there. What
has arrived is noted in ``.uploading.json`` together with the manifest's own digest: a copy that is tried again sends
the rest, and one of another attempt starts over. Size alone would not do: clients that write blocks side by side leave
a torn file of full length.

A place belongs to the one run whose mark it has. A folder there is that run's where its manifest says so, or where it
has none, its note of an upload; all else is left alone. (Neither names a run where an earlier release wrote it; `claim`
has compared such manifests with the run's record.)

Blocking, one writer at a time.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from glob import has_magic
from pathlib import Path
from typing import TypedDict

from trinity_sync.checkpoint.folder import catalog, commits, deletion, leases
from trinity_sync.checkpoint.folder.contents import (
    MANIFEST,
    STAGING,
    STEP_PREFIX,
    TRACKERS,
    Manifest,
    ManifestError,
    NewerFormatError,
    UnreadableError,
    parse_manifest,
    read_manifest,
    step_dir,
    step_of,
    write_manifest,
)
from trinity_sync.checkpoint.folder.deletion import facts_of
from trinity_sync.checkpoint.folder.owner import MARK, Owner, Recorded, refusal
from trinity_sync.errors import RunError
from trinity_sync.host.durable import digest_file, make_folder, replace_file, sync_folder
from trinity_sync.host.urls import local_folder
from trinity_sync.protocol.parts import FULL, FileEntry
from trinity_sync.protocol.retention import Policy, decide

UPLOADING = ".uploading.json"
ABANDONED = "manifest.abandoned.json"

#: Of a run that is about to put its mark there.
_CLAIM = ".claim-"
_UNMARKED = (
    f"the mark of this run, {MARK}, is not there any more; is the place mounted? If it is, name it to a resume: "
    "checkpoint.mirror=..."
)

#: Files on their way at a time, each over a connection of its own.
_STREAMS = 4
_TICK_S = 1.0


class DamagedError(RunError):
    """A checkpoint is not what its manifest says, here or there; trying again would not help."""


class ForeignError(RunError):
    """The place, or a folder there, belongs to another run; trying again would not help."""


class Mirror:
    """The checkpoints at a place.

    Args:
        open_storage: opens a connection to it; called once per thread that needs one.
        owner: the run that copies there.
        say: called with a sentence for each copy that is passed over or fetched.
        progress: called with (bytes here, bytes in all) about once a second while one is fetched.
    """

    def __init__(
        self,
        open_storage: Callable[[], Storage],
        owner: Owner,
        say: Callable[[str], object] = lambda text: None,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self._open, self._owner = open_storage, owner
        self._storage = open_storage()
        self._say = say
        self._progress = progress

    # ---- whose it is

    def claim(self, known: Recorded = (), *, again: bool = False, named: bool = False) -> None:
        """Put the run's mark there. Of runs that try it at the same instant, one at most succeeds. For the arguments
        and errors see `check`; RunError also where what is written there cannot be read back.
        """
        own = f"{_CLAIM}{self._owner.session}"
        self.check(known, again=again, named=named)
        # Object stores have no rename that fails where the name is taken. So a run announces itself before it looks for
        # others: of two, the later one sees the claim of the other, or its mark.
        self._storage.write(own, self._owner.to_text())
        try:
            if self._owner_in(own) != self._owner:
                raise RunError("what is written there cannot be read back")
            for name in self._storage.names():
                if name.startswith(_CLAIM) and name != own:
                    self._take_back(name)
            self.check(known, again=again, named=named)
            self._storage.write(MARK, self._owner.to_text())
        finally:
            self._storage.delete(own)

    def unmark(self) -> None:
        """Delete the mark that this start of the run put there."""
        if self._owner_in(MARK) == self._owner:
            self._storage.delete(MARK)

    def _take_back(self, name: str) -> None:
        """Delete what a start that was killed has left of its claim."""
        claimant = self._owner_in(name)
        if claimant is not None and claimant.run != self._owner.run and claimant.may_run(self._owner):
            raise ForeignError(f"{claimant} is about to take it; start again, or delete {name} if that run is over")
        self._storage.delete(name)

    def check(self, known: Recorded = (), *, again: bool = False, named: bool = False) -> None:
        """Check that the run may put its mark there. Writes nothing.

        Args:
            known: commits in the run's own record, or here.
            again: the run has used the place before: one that has neither its mark nor checkpoints is a RunError.
            named: the user has just named the place for this run.

        Raises:
            ForeignError: the place belongs to another run, or holds what this run has no record of.
            UnreadableError: its mark cannot be read.
        """
        mark, steps, own = self._mark(), self.steps(), self._owner
        if mark is None:
            if (steps and not known) or (not steps and self._storage.read(TRACKERS[FULL]) is not None):
                raise ForeignError("it holds checkpoints of another run already; name a place of this run's own")
            for step in steps:
                manifest = self._sound(step)
                if not self._unfinished(step) if manifest is None else own.unlisted([manifest], known):
                    raise ForeignError(
                        f"it holds {_folder(step)}, which {own.folder} has no record of; name another place"
                    )
            if again and not steps:
                raise RunError(_UNMARKED)
        elif mark.run != own.run:
            if steps or mark.may_run(own):
                raise ForeignError(f"it {refusal(mark)}")
        elif not named and mark.may_be_of_another_copy(own):
            raise ForeignError(
                f"it belongs to {mark}, and {own.folder} may be a copy of it; give checkpoint.mirror=... once more to "
                "take it over"
            )

    def _mark(self) -> Owner | None:
        mark = self._owner_in(MARK)
        if mark is not None and not Path(mark.folder).is_absolute():
            raise ForeignError("it is the checkpoint folder of a run; name another place")
        return mark

    def _owner_in(self, name: str) -> Owner | None:
        text = self._storage.read(name)
        return None if text is None else Owner.parse(text, name)

    def _check_mine(self) -> None:
        """Check that the place has the mark that this start of the run put there: writing goes on only then."""
        mark = self._mark()
        if mark is None:
            raise RunError(_UNMARKED)
        if mark.run != self._owner.run or mark.session != self._owner.session:
            raise ForeignError(f"it was taken over by {mark}")

    def _is_ours(self, manifest: Manifest) -> bool:
        return manifest.run in (None, self._owner.run)

    def _unfinished(self, step: int) -> bool:
        """Return whether this run has begun a folder without a valid manifest, or to delete it, or has abandoned it."""
        note, abandoned = self._note(step), self._abandoned(step)
        noted = note is not None and note.get("run") in (None, self._owner.run)
        return noted or (abandoned is not None and self._is_ours(abandoned))

    # ---- looking

    def steps(self) -> list[int]:
        """List the steps of all folders there, whole or not, ascending."""
        return sorted(step for name in self._storage.folders() if (step := step_of(name)) is not None)

    def manifest(self, step: int) -> Manifest | None:
        """Read the manifest of a step there; None where there is none.

        Raises:
            NewerFormatError: a later version of this program wrote it.
            ManifestError: it is damaged.
        """
        name = f"{_folder(step)}/{MANIFEST}"
        try:
            text = self._storage.read(name)
        except UnicodeDecodeError as error:
            raise ManifestError(f"{name} is not valid: {error}") from None
        return parse_manifest(text, name, step) if text is not None else None

    def missing(self, root: Path, steps: Collection[int]) -> list[int]:
        """List those of the given steps of the local folder that are not there as they are here, or may not be,
        ascending.
        """
        found = []
        for step in sorted(steps):
            there = None
            with suppress(ManifestError):  # the upload says what is wrong
                there = self.manifest(step)
            try:
                if read_manifest(step_dir(root, step)) != there:
                    found.append(step)
            except UnreadableError:  # now; the upload waits for it
                found.append(step)
            except ManifestError:
                pass
        return found

    # ---- sending

    def upload(self, root: Path, step: int, *, start: int | None = None) -> int:
        """Copy a committed full checkpoint. The caller has a lease on it.

        Args:
            root: the local checkpoint folder.
            step: which checkpoint.
            start: the step after which this attempt goes on: later ones of earlier attempts are abandoned. None: not
                known; those after `step` are.

        Returns:
            The bytes that were sent; files that were there already are not.

        Raises:
            DamagedError: a local file is not as the manifest says.
            ForeignError: the place, or the folder of the step there, is not this run's.
            ManifestError: there is no such checkpoint here, or one of a newer version there.
        """
        self._check_mine()
        manifest = read_manifest(step_dir(root, step))
        folder = _folder(step)
        there = self._sound(step)
        present = self._storage.files(folder)
        if present and not (self._unfinished(step) if there is None else self._is_ours(there)):
            raise ForeignError(f"{folder} there is not a copy by this run, so it is left alone; move it away")
        arrived = {entry.path for entry in manifest.files if present.get(entry.path) == entry.bytes}
        if there == manifest and len(arrived) == len(manifest.files):
            self._name_newest(manifest, start)
            return 0
        if there != manifest:
            arrived &= self._noted(step, manifest)
            if not arrived and present:
                self._delete(step)
        sent = self._send(step_dir(root, step), manifest, arrived)
        self._check_sizes(manifest)
        self._check_mine()  # a copy takes long
        self._storage.write(f"{folder}/{MANIFEST}", manifest.to_text())
        self._storage.delete(f"{folder}/{UPLOADING}")
        self._name_newest(manifest, start)
        return sum(entry.bytes for entry in sent)

    def _noted(self, step: int, manifest: Manifest) -> set[str]:
        """Return the files that an earlier try of this very checkpoint has brought there."""
        note = self._note(step) or {}
        files = note.get("files")
        return {*map(str, files)} if isinstance(files, list) and note.get("self") == manifest.own_digest else set()

    def _note(self, step: int) -> dict[str, object] | None:
        """Return what is noted of an upload that has not ended, or of a deletion; None: nothing is."""
        text = self._storage.read(f"{_folder(step)}/{UPLOADING}")
        try:
            return None if text is None else dict(json.loads(text))
        except (ValueError, TypeError):
            return {"run": ""}  # whose it is cannot be told

    def _write_note(self, step: int, digest: str | None = None, files: Collection[str] = ()) -> None:
        noted = {"run": self._owner.run, "self": digest, "files": sorted(files)}
        self._storage.write(f"{_folder(step)}/{UPLOADING}", json.dumps(noted))

    def _abandoned(self, step: int) -> Manifest | None:
        name = f"{_folder(step)}/{ABANDONED}"
        text = self._storage.read(name)
        with suppress(ManifestError):
            return None if text is None else parse_manifest(text, name, step)
        return None

    def _send(self, source: Path, manifest: Manifest, arrived: set[str]) -> list[FileEntry]:
        folder, lock = _folder(manifest.step), threading.Lock()
        rest = [entry for entry in manifest.files if entry.path not in arrived]

        def send(storage: Storage, entry: FileEntry) -> None:
            if problem := _problem(source / entry.path, entry, durable=False):
                raise DamagedError(f"the checkpoint of step {manifest.step} is damaged here: {problem}")
            storage.put(source / entry.path, f"{folder}/{entry.path}")
            with lock:
                arrived.add(entry.path)
                self._write_note(manifest.step, manifest.own_digest, arrived)

        self._write_note(manifest.step, manifest.own_digest, arrived)
        self._storage.delete(f"{folder}/{MANIFEST}")
        self._side_by_side(send, rest)
        return rest

    def _check_sizes(self, manifest: Manifest) -> None:
        present = self._storage.files(_folder(manifest.step))
        for entry in manifest.files:
            if present.get(entry.path) != entry.bytes:
                raise OSError(f"{entry.path} arrived with {present.get(entry.path, 'no')} bytes, not {entry.bytes}")

    def _name_newest(self, manifest: Manifest, start: int | None) -> None:
        """Take what this attempt left behind out of sight, and let the tracker name the newest of the rest."""
        after = manifest.step if start is None else min(start, manifest.step)
        newest = manifest.step
        for step in self.steps():
            if step <= after or step == manifest.step:
                continue
            with suppress(ManifestError):
                there = self.manifest(step)
                if there is None or not self._is_ours(there):
                    continue
                if there.attempt < manifest.attempt:
                    self._storage.write(f"{_folder(step)}/{ABANDONED}", there.to_text())
                    self._storage.delete(f"{_folder(step)}/{MANIFEST}")
                else:
                    newest = max(newest, step)
        self._storage.write(TRACKERS[FULL], str(newest))

    # ---- retention

    def prune(self, policies: Collection[Policy], root: Path, *, now: float) -> list[int]:
        """Delete what the policies give up of what is there, and torn copies of what is no longer here.

        Args:
            policies: the retention policies.
            root: the local checkpoint folder, whose pins count there too.
            now: Unix seconds.

        Returns:
            The steps that were deleted, ascending.

        Raises:
            ForeignError: the place is not this run's.
        """
        self._check_mine()
        pins, local = leases.pinned(root), {info.step for info in catalog.scan(root)}
        facts, gone = [], []
        for step in self.steps():
            try:
                manifest = self._sound(step)
            except NewerFormatError:
                continue
            if manifest is not None and self._is_ours(manifest):
                facts.append(facts_of(manifest, pins))
            elif manifest is None and step not in local and self._abandoned(step) is None and self._unfinished(step):
                gone.append(step)
        gone += [decision.step for decision in decide(facts, policies, now) if not decision.keep]
        for step in gone:
            self._delete(step)
        return sorted(gone)

    def _delete(self, step: int) -> None:
        folder = _folder(step)
        self._write_note(step)  # by which a later try knows what a broken one has left
        self._storage.delete(f"{folder}/{MANIFEST}")
        for name in self._storage.files(folder).keys() - {UPLOADING}:
            self._storage.delete(f"{folder}/{name}")
        self._storage.delete(folder)

    # ---- fetching

    def download(self, root: Path, *, newer_than: tuple[int, int] | None = None) -> int | None:
        """Bring the newest good full checkpoint into the local folder.

        It is put together in the staging folder, every file checked against its digest, and made visible with one
        rename; a folder of that step which is here already is renamed first. What was fetched by a try that broke off
        is not fetched again.

        Args:
            root: the local checkpoint folder; nobody else may use it meanwhile.
            newer_than: (attempt, step) of the best one here; None: there is none.

        Returns:
            Its step; None where nothing newer than `newer_than` is good.

        Raises:
            NewerFormatError: a later version of this program has saved a newer one there.
        """
        for manifest in self._candidates(newer_than):
            self._say(
                f"fetching the checkpoint of step {manifest.step} ({manifest.bytes / 1e6:.1f} MB) from the mirror"
            )
            try:
                self._fetch(root, manifest)
            except DamagedError as error:
                self._say(f"the mirror's copy of step {manifest.step} is passed over: {error}")
                continue
            return manifest.step
        return None

    def _candidates(self, newer_than: tuple[int, int] | None) -> Iterator[Manifest]:
        """Yield the manifests there, the newest of the latest attempt first. NewerFormatError where that is not all."""
        found: list[Manifest] = []
        unknown: dict[int, NewerFormatError] = {}
        for step in reversed(self.steps()):
            try:
                manifest = self.manifest(step)
            except NewerFormatError as error:
                unknown[step] = error
                continue
            except ManifestError as error:
                self._say(f"the mirror's copy of step {step} is passed over: {error}")
                continue
            if manifest is not None and not self._is_ours(manifest):
                self._say(f"the mirror's copy of step {step} is passed over: it is of another run, {manifest.run}")
            elif manifest is not None and manifest.kind == FULL:
                found.append(manifest)
        attempt, step = newer_than or (0, 0)
        for manifest in sorted(found, key=lambda manifest: (manifest.attempt, manifest.step), reverse=True):
            if manifest.attempt >= attempt and manifest.step > step:
                _refuse_past(unknown, manifest.step)
                yield manifest
        _refuse_past(unknown, step)

    def _fetch(self, root: Path, manifest: Manifest) -> None:
        folder = _folder(manifest.step)
        staging = root / STAGING / f"mirror-{manifest.step}-{manifest.attempt}"

        def fetch(storage: Storage, entry: FileEntry) -> None:
            target = staging / entry.path
            if _problem(target, entry, durable=True) is None:
                return
            try:
                storage.get(f"{folder}/{entry.path}", target)
            except FileNotFoundError:
                raise DamagedError(f"{entry.path} is missing") from None
            if problem := _problem(target, entry, durable=True):
                raise DamagedError(problem)

        staging.mkdir(parents=True, exist_ok=True)
        try:
            self._side_by_side(fetch, manifest.files, lambda: self._progress(_bytes_in(staging), manifest.bytes))
        except DamagedError:
            deletion.delete_folder(root, staging)
            raise
        write_manifest(staging, manifest)
        commits.adopt_folder(root, staging, manifest.step)

    # ---- for all of these

    def _side_by_side(
        self,
        work: Callable[[Storage, FileEntry], None],
        entries: Sequence[FileEntry],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        """Do something to several files at a time; the first error is raised and what has not begun is left.

        Args:
            tick: called about once a second meanwhile.
        """
        lanes = threading.local()

        def one(entry: FileEntry) -> None:
            if not hasattr(lanes, "storage"):
                lanes.storage = self._open()
            work(lanes.storage, entry)

        with ThreadPoolExecutor(min(_STREAMS, max(1, len(entries))), "mirror") as pool:
            # The largest first, so that none of them is left over for the end.
            ordered = sorted(entries, key=lambda entry: entry.bytes, reverse=True)
            futures = [pool.submit(one, entry) for entry in ordered]
            done: set[Future[None]] = set()
            while len(done) < len(futures) and not any(future.exception() for future in done):
                done, _ = wait(futures, _TICK_S, return_when=FIRST_EXCEPTION)
                tick()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in done:
                future.result()

    def _sound(self, step: int) -> Manifest | None:
        """Read the manifest of a step there; None where there is none that is valid. NewerFormatError as `manifest`."""
        try:
            return self.manifest(step)
        except NewerFormatError:
            raise
        except ManifestError:
            return None


def _refuse_past(unknown: Mapping[int, NewerFormatError], step: int) -> None:
    """Raise the error of the newest one after a step, if there is one."""
    if unknown and max(unknown) > step:
        raise unknown[max(unknown)]


def _bytes_in(folder: Path) -> int:
    """What has come of files so far, also of those that are under way."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def _folder(step: int) -> str:
    return f"{STEP_PREFIX}{step}"


def _problem(path: Path, entry: FileEntry, *, durable: bool) -> str | None:
    """Say how a file differs from its entry; None where it does not."""
    try:
        size, digest = digest_file(path, durable=durable)
    except FileNotFoundError:
        return f"{entry.path} is missing"
    if size != entry.bytes:
        return f"{entry.path} has {size} bytes instead of {entry.bytes}"
    if digest != entry.xxh3_128:
        return f"{entry.path} was changed: its digest is {digest} instead of {entry.xxh3_128}"
    return None


# Where a mirror is kept: files below a folder that fsspec reaches, behind put, get, files and delete.


class _Info(TypedDict):
    """What is used of what fsspec tells of a file or folder."""

    name: str
    type: str
    size: int | None


class Storage:
    """A folder at a place, with a connection of its own. Not for several threads at a time. Writes to a path on this
    machine are durable when the call returns.

    Names are relative to the folder, with ``/``. Everything raises what the place's client raises: an `OSError`, or an
    error of its own where the connection is lost.

    Args:
        place: a path, or a URL that fsspec knows; it need not exist yet.
        options: options of the fsspec class of the place.
    """

    def __init__(self, place: str, options: Mapping[str, object] | None = None) -> None:
        from fsspec.asyn import sync_wrapper
        from fsspec.core import url_to_fs

        # fsspec hands out one instance per place, whose connection may be a dead one of an earlier try.
        self._fs, base = url_to_fs(place, skip_instance_cache=True, **(options or {}))
        self._base = base.rstrip("/")
        self._local = local_folder(place) is not None
        # That of sshfs is the base class's, which does nothing.
        rmdir = getattr(self._fs, "_rmdir", None)
        self._rmdir = self._fs.rmdir if rmdir is None else sync_wrapper(rmdir, obj=self._fs)
        self._folders: set[str] = set()

    def put(self, source: Path, name: str) -> None:
        """Copy a file there; a file of that name is replaced."""
        path = self._writable(name)
        self._fs.put_file(str(source), path)
        if self._local:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(Path(path).parent)

    def get(self, name: str, target: Path) -> None:
        """Copy a file from there.

        Raises:
            FileNotFoundError: there is none.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._path(name), str(target))

    def write(self, name: str, text: str) -> None:
        """Write a small file; on a path of this machine all of it or nothing."""
        path = self._writable(name)
        if self._local:
            replace_file(Path(path), text)
        else:
            self._fs.pipe_file(path, text.encode())

    def read(self, name: str) -> str | None:
        """Read a small file; None where there is none.

        Raises:
            UnicodeDecodeError: it holds no text.
        """
        try:
            text: str = self._fs.cat_file(self._path(name)).decode()
        except FileNotFoundError:
            return None
        return text

    def files(self, name: str = "") -> dict[str, int]:
        """List all files below a folder: name relative to it -> bytes. Empty where there is no such folder."""
        return dict(self._walk(self._path(name), ""))

    def names(self) -> list[str]:
        """List the names of all files and folders that lie here directly."""
        return sorted(name for name, _ in self._children(self._base))

    def folders(self) -> list[str]:
        """List the names of the folders that lie here directly."""
        return sorted(name for name, info in self._children(self._base) if info["type"] == "directory")

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing where there is none."""
        try:
            self._fs.invalidate_cache()
            path = self._path(name)
            # Of most clients `rm` takes `*`, `?` and `[` for a pattern, which the paths of other runs may match.
            if self._local or not has_magic(path):
                self._fs.rm(path, recursive=True)
            else:
                self._remove(path, self._fs.info(path)["type"])
            if self._local:
                sync_folder(Path(path).parent)
        except FileNotFoundError:
            pass
        self._folders.clear()

    def _remove(self, path: str, kind: str) -> None:
        if kind != "directory":
            self._fs.rm_file(path)
            return
        for name, info in list(self._children(path)):
            self._remove(f"{path}/{name}", info["type"])
        with suppress(FileNotFoundError, FileExistsError):  # as object stores say, which have no folders
            self._rmdir(path)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _writable(self, name: str) -> str:
        path = self._path(name)
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            if self._local:
                make_folder(Path(folder))
            else:
                self._fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, int]]:
        # fsspec's own find() takes a folder that cannot be listed for an empty one.
        for name, info in self._children(folder):
            if info["type"] == "directory":
                yield from self._walk(f"{folder}/{name}", f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", int(info["size"] or 0)

    def _children(self, folder: str) -> Iterator[tuple[str, _Info]]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(folder or "/", detail=True)
        except FileNotFoundError:
            return
        for info in entries:
            path = info["name"].rstrip("/")
            name = path.rpartition("/")[2]
            # Object stores list a folder's own placeholder among its contents.
            if name and path.strip("/") != folder.strip("/"):
                yield name, info
