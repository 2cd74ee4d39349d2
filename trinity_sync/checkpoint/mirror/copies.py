"""A mirror: a second place for committed full checkpoints, laid out as the checkpoint folder is::

    .run.json                                                   the mark of the run, see `owner`
    latest_checkpointed_iteration.txt
    global_step_20/manifest.json, global_step_20/actor/...      a checkpoint
    global_step_30/.uploading.json, global_step_30/actor/...    being copied; not a checkpoint
    global_step_40/manifest.abandoned.json, ...                 later than the step of a resume; not a checkpoint

The manifest is written after all files, and the tracker last, so a broken copy is not a checkpoint. ``.uploading.json``
lists the files that have arrived, with the manifest's own digest: a retry sends the rest, and a copy of another attempt
starts over. Sizes would not be enough, as clients that write blocks concurrently may leave a torn file of full length.

A place belongs to the one run whose mark it has. A folder in it belongs to the run that its manifest names, or without
one its note of an upload; other folders are left alone. (Files of earlier releases name no run; `claim` has compared
their manifests with the run's record.)

The calls block. One writer at a time.
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
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.checkpoint.folder import catalog, commits, contents, deletion, leases
from trinity_sync.checkpoint.folder.deletion import facts_of
from trinity_sync.checkpoint.folder.owner import MARK, Owner, Recorded, refusal
from trinity_sync.errors import RunError
from trinity_sync.host.durable import make_folder, replace_file, sync_folder
from trinity_sync.host.urls import local_folder
from trinity_sync.protocol.parts import FULL, FileEntry
from trinity_sync.protocol.retention import Policy, decide

if TYPE_CHECKING:
    from trinity_sync.weights.part_delta import Point

UPLOADING = ".uploading.json"
ABANDONED = "manifest.abandoned.json"

#: Of a run that is about to put its mark there.
_CLAIM = ".claim-"

#: Files on their way at a time, each over a connection of its own.
_STREAMS = 4
_TICK_S = 1.0


class DamagedError(RunError):
    """A checkpoint differs from its manifest, here or at the mirror; a retry would not help. `arrived`: a file that
    came from the mirror with other bytes.
    """

    def __init__(self, message: str, arrived: FileEntry | None = None) -> None:
        super().__init__(message)
        self.arrived = arrived


class ForeignError(RunError):
    """The place, or a folder in it, belongs to another run; a retry would not help."""


class Mirror:
    """The checkpoints at a place.

    Args:
        open_storage: opens a connection; called once per thread.
        say: called with a sentence for each copy that is skipped or fetched.
        progress: called with (bytes here, bytes in all) about once a second during a download.
        key: the setting that names the place, for errors.
    """

    def __init__(
        self,
        open_storage: Callable[[], Storage],
        owner: Owner,
        say: Callable[[str], object] = lambda text: None,
        progress: Callable[[int, int], object] = lambda done, total: None,
        key: str = "checkpoint.mirror",
    ) -> None:
        self._key = key
        self._open, self._owner = open_storage, owner
        self._storage = open_storage()
        self._say = say
        self._progress = progress

    def say(self, text: str) -> None:
        """Tell the user a sentence."""
        self._say(text)

    # ---- whose it is

    def claim(self, known: Recorded = (), *, again: bool = False, named: bool = False) -> None:
        """Put the run's mark on the place; of runs that try it at the same time, at most one succeeds. Arguments and
        errors as for `check`; RunError also if a written file cannot be read back.
        """
        claim = f"{_CLAIM}{self._owner.session}"
        self.check(known, again=again, named=named)
        # Object stores have no rename that fails where the name is taken. So a run announces itself before it looks for
        # others: of two, the later one sees the claim of the other, or its mark.
        self._storage.write(claim, self._owner.to_text())
        try:
            if self._owner_in(claim) != self._owner:
                raise RunError("a file written there cannot be read back")
            for name in self._storage.names():
                if name.startswith(_CLAIM) and name != claim:
                    self._take_back(name)
            self.check(known, again=again, named=named)
            self._storage.write(MARK, self._owner.to_text())
        finally:
            self._storage.delete(claim)

    def unmark(self) -> None:
        """Delete the mark of this start of the run."""
        if self._owner_in(MARK) == self._owner:
            self._storage.delete(MARK)

    def _take_back(self, name: str) -> None:
        """Delete the claim of a start that was killed."""
        claimant = self._owner_in(name)
        if claimant is not None and claimant.run != self._owner.run and claimant.may_run(self._owner):
            raise ForeignError(f"{claimant} is about to take it; start again, or delete {name} if that run is over")
        self._storage.delete(name)

    def check(self, known: Recorded = (), *, again: bool = False, named: bool = False) -> None:
        """Check that the run may put its mark on the place. Writes nothing. Raises ForeignError, UnreadableError."""
        mark, steps, owner = self._mark(), self.steps(), self._owner
        if mark is None:
            if (steps and not known) or (not steps and self._storage.read(contents.TRACKERS[FULL]) is not None):
                raise ForeignError("it holds checkpoints of another run already; name a place of this run's own")
            for step in steps:
                manifest = self._sound(step)
                if not self._unfinished(step) if manifest is None else owner.unlisted([manifest], known):
                    raise ForeignError(
                        f"it holds {_folder(step)}, and {owner.folder} has no record of it; name another place"
                    )
            if again and not steps:
                raise self._unmarked()
        elif mark.run != owner.run:
            if steps or mark.may_run(owner):
                raise ForeignError(f"it {refusal(mark)}")
        elif not named and mark.may_be_of_another_copy(owner):
            raise ForeignError(
                f"it belongs to {mark}, and {owner.folder} may be a copy of it; give {self._key}=... once more "
                "to take it over"
            )

    def _unmarked(self) -> RunError:
        return RunError(
            f"the mark of this run, {MARK}, is not there any more; is the place mounted? If it is, name it to a "
            f"resume: {self._key}=..."
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
        """Check that the place still has the mark of this start of the run, before a write."""
        mark = self._mark()
        if mark is None:
            raise self._unmarked()
        if mark.run != self._owner.run or mark.session != self._owner.session:
            raise ForeignError(f"it was taken over by {mark}")

    def _is_ours(self, manifest: contents.Manifest) -> bool:
        return manifest.run in (None, self._owner.run)

    def _unfinished(self, step: int) -> bool:
        """Return whether a folder without a valid manifest is this run's: being uploaded, being deleted, or
        abandoned.
        """
        note, abandoned = self._note(step), self._abandoned(step)
        noted = note is not None and note.get("run") in (None, self._owner.run)
        return noted or (abandoned is not None and self._is_ours(abandoned))

    # ---- looking

    def steps(self) -> list[int]:
        """List the steps of all folders at the place, complete or not, ascending."""
        return sorted(step for name in self._storage.folders() if (step := contents.step_of(name)) is not None)

    def manifest(self, step: int) -> contents.Manifest | None:
        """Read the manifest of a step; None: there is none. Raises NewerFormatError, ManifestError."""
        name = f"{_folder(step)}/{contents.MANIFEST}"
        try:
            text = self._storage.read(name)
        except UnicodeDecodeError as error:
            raise contents.ManifestError(f"{name} is not valid: {error}") from None
        return contents.parse_manifest(text, name, step) if text is not None else None

    def missing(self, root: Path, steps: Collection[int]) -> list[int]:
        """List those of the steps of the local folder that the mirror does not have, or may not have, in the same
        state, ascending.
        """
        found = []
        for step in sorted(steps):
            copy = None
            with suppress(contents.ManifestError):  # the upload says what is wrong
                copy = self.manifest(step)
            try:
                if contents.read_manifest(contents.step_dir(root, step)) != copy:
                    found.append(step)
            except contents.UnreadableError:  # now; the upload waits for it
                found.append(step)
            except contents.ManifestError:
                pass
        return found

    def versions(self) -> list[contents.Manifest]:
        """List the manifests of versions of the run whose mark the place has, the newest of the latest attempt first.
        Raises ForeignError, NewerFormatError, UnreadableError.
        """
        mark = self._mark()
        found = [] if mark is None else map(self._sound, self.steps())
        ours = [one for one in found if one is not None and mark is not None and one.run == mark.run]
        return sorted((one for one in ours if one.kind != FULL), key=point_of, reverse=True)

    # ---- sending

    def upload(self, root: Path, step: int, *, start: int | None = None) -> int:
        """Copy a committed full checkpoint, which the caller has leased. Returns the bytes sent; files that are there
        already are not sent. Raises DamagedError, ForeignError, ManifestError.
        """
        self._check_mine()
        manifest = contents.read_manifest(contents.step_dir(root, step))
        folder = _folder(step)
        copy = self._sound(step)
        present = self._storage.files(folder)
        if present and not (self._unfinished(step) if copy is None else self._is_ours(copy)):
            raise ForeignError(f"{folder} there is not a copy by this run, so it is left alone; move it away")
        if copy is not None and (copy.kind == FULL) != (manifest.kind == FULL):
            held, told = ("a checkpoint", "version") if copy.kind == FULL else ("a version", "checkpoint")
            raise ForeignError(
                f"{folder} there is {held} of this run, and not a {told}; give checkpoints and versions two places"
            )
        arrived = {entry.path for entry in manifest.files if present.get(entry.path) == entry.bytes}
        if copy == manifest and len(arrived) == len(manifest.files):
            self._name_newest(manifest, start)
            return 0
        if copy != manifest:
            arrived &= self._noted(step, manifest)
            if not arrived and present:
                self._delete(step)
        sent = self._send(contents.step_dir(root, step), manifest, arrived)
        self._check_sizes(manifest)
        self._check_mine()  # a copy takes long
        self._storage.write(f"{folder}/{contents.MANIFEST}", manifest.to_text())
        self._storage.delete(f"{folder}/{UPLOADING}")
        self._name_newest(manifest, start)
        return sum(entry.bytes for entry in sent)

    def _noted(self, step: int, manifest: contents.Manifest) -> set[str]:
        """Return the files that an earlier try has sent of the same checkpoint."""
        note = self._note(step) or {}
        files = note.get("files")
        return {*map(str, files)} if isinstance(files, list) and note.get("self") == manifest.own_digest else set()

    def _note(self, step: int) -> Mapping[str, object] | None:
        """Return the note of an unfinished upload or deletion; None: there is none."""
        text = self._storage.read(f"{_folder(step)}/{UPLOADING}")
        try:
            return None if text is None else dict(json.loads(text))
        except (ValueError, TypeError):
            return {"run": ""}  # whose it is cannot be told

    def _write_note(self, step: int, digest: str | None = None, files: Collection[str] = ()) -> None:
        noted = {"run": self._owner.run, "self": digest, "files": sorted(files)}
        self._storage.write(f"{_folder(step)}/{UPLOADING}", json.dumps(noted))

    def _abandoned(self, step: int) -> contents.Manifest | None:
        name = f"{_folder(step)}/{ABANDONED}"
        text = self._storage.read(name)
        with suppress(contents.ManifestError):
            return None if text is None else contents.parse_manifest(text, name, step)
        return None

    def _send(self, source: Path, manifest: contents.Manifest, arrived: set[str]) -> list[FileEntry]:
        folder, lock = _folder(manifest.step), threading.Lock()
        rest = [entry for entry in manifest.files if entry.path not in arrived]

        def send(storage: Storage, entry: FileEntry) -> None:
            if problem := catalog.difference(source, entry):
                raise DamagedError(f"the checkpoint of step {manifest.step} is damaged here: {problem}")
            storage.put(source / entry.path, f"{folder}/{entry.path}")
            with lock:
                arrived.add(entry.path)
                self._write_note(manifest.step, manifest.own_digest, arrived)

        self._write_note(manifest.step, manifest.own_digest, arrived)
        self._storage.delete(f"{folder}/{contents.MANIFEST}")
        self._side_by_side(send, rest)
        return rest

    def _check_sizes(self, manifest: contents.Manifest) -> None:
        present = self._storage.files(_folder(manifest.step))
        for entry in manifest.files:
            if present.get(entry.path) != entry.bytes:
                raise OSError(f"{entry.path} arrived with {present.get(entry.path, 'no')} bytes, not {entry.bytes}")

    def _name_newest(self, manifest: contents.Manifest, start: int | None) -> None:
        """Abandon later steps of earlier attempts, and set the tracker to the newest of the others."""
        after = manifest.step if start is None else min(start, manifest.step)
        newest = manifest.step
        for step in self.steps():
            if step <= after or step == manifest.step:
                continue
            with suppress(contents.ManifestError):
                copy = self.manifest(step)
                if copy is None or not self._is_ours(copy):
                    continue
                if copy.attempt < manifest.attempt:
                    self._storage.write(f"{_folder(step)}/{ABANDONED}", copy.to_text())
                    self._storage.delete(f"{_folder(step)}/{contents.MANIFEST}")
                else:
                    newest = max(newest, step)
        self._storage.write(contents.TRACKERS[FULL], str(newest))

    # ---- retention

    def prune(self, policies: Collection[Policy], root: Path, *, now: float) -> list[int]:
        """Delete the checkpoints that the policies do not keep, and torn copies of checkpoints that are not here any
        more. Raises ForeignError if the place is not this run's. Returns the deleted steps, ascending. Times are Unix
        seconds.
        """
        self._check_mine()
        pins, local = leases.pinned(root), {info.step for info in catalog.scan(root)}
        facts, deleted = [], []
        for step in self.steps():
            try:
                manifest = self._sound(step)
            except contents.NewerFormatError:
                continue
            if manifest is not None and self._is_ours(manifest):
                facts.append(facts_of(manifest, pins))
            elif manifest is None and step not in local and self._abandoned(step) is None and self._unfinished(step):
                deleted.append(step)
        deleted += [decision.step for decision in decide(facts, policies, now) if not decision.keep]
        for step in deleted:
            self._delete(step)
        return sorted(deleted)

    def prune_versions(self, root: Path) -> None:
        """Delete versions that no follower needs, and torn copies of those that are not here any more. Raises
        ForeignError if the place is not this run's.
        """
        self._check_mine()
        oldest, local = oldest_needed(self.versions()), {info.step for info in catalog.scan(root)}
        for step in self.steps():
            manifest = self._sound(step)
            if manifest is None:
                gone = step not in local and self._unfinished(step)
            else:
                gone = manifest.kind != FULL and self._is_ours(manifest) and point_of(manifest) < oldest
            if gone:
                self._delete(step)

    def _delete(self, step: int) -> None:
        folder = _folder(step)
        self._write_note(step)  # by which a later try knows what a broken one has left
        self._storage.delete(f"{folder}/{contents.MANIFEST}")
        for name in self._storage.files(folder).keys() - {UPLOADING}:
            self._storage.delete(f"{folder}/{name}")
        self._storage.delete(folder)

    # ---- fetching

    def download(self, root: Path, *, newer_than: tuple[int, int] | None = None) -> int | None:
        """Fetch the newest good full checkpoint into the local folder.

        It is written into the staging folder, every file is checked by its digest, and one rename makes it visible; an
        existing folder of that step is renamed first. Files that an interrupted try has fetched are not fetched again.
        Raises NewerFormatError if a later version of this program has saved a newer one. Returns its step; None: no
        newer one is good.
        """
        for manifest in self._candidates(newer_than):
            self._say(
                f"fetching the checkpoint of step {manifest.step} ({manifest.bytes / 1e6:.1f} MB) from the mirror"
            )
            try:
                self.fetch(root, manifest)
            except DamagedError as error:
                self._say(f"the mirror's copy of step {manifest.step} is skipped: {error}")
                continue
            return manifest.step
        return None

    def _candidates(self, newer_than: tuple[int, int] | None) -> Iterator[contents.Manifest]:
        """Yield the manifests, the newest of the latest attempt first. Raises NewerFormatError before one is skipped
        that cannot be parsed.
        """
        found: list[contents.Manifest] = []
        unknown: dict[int, contents.NewerFormatError] = {}
        for step in reversed(self.steps()):
            try:
                manifest = self.manifest(step)
            except contents.NewerFormatError as error:
                unknown[step] = error
                continue
            except contents.ManifestError as error:
                self._say(f"the mirror's copy of step {step} is skipped: {error}")
                continue
            if manifest is not None and not self._is_ours(manifest):
                self._say(f"the mirror's copy of step {step} is skipped: it is of another run, {manifest.run}")
            elif manifest is not None and manifest.kind == FULL:
                found.append(manifest)
        attempt, step = newer_than or (0, 0)
        for manifest in sorted(found, key=lambda manifest: (manifest.attempt, manifest.step), reverse=True):
            if manifest.attempt >= attempt and manifest.step > step:
                _refuse_past(unknown, manifest.step)
                yield manifest
        _refuse_past(unknown, step)

    def fetch(self, root: Path, manifest: contents.Manifest, *, keep: bool = False) -> None:
        """Fetch the files of a manifest, which may be a part of those of a step. Raises DamagedError. `keep`: the files
        that arrived stay for a retry.
        """
        folder = _folder(manifest.step)
        staging = root / contents.STAGING / staged_name(manifest)

        def fetch(storage: Storage, entry: FileEntry) -> None:
            if catalog.difference(staging, entry, durable=True) is None:
                return
            try:
                storage.get(f"{folder}/{entry.path}", staging / entry.path)
            except FileNotFoundError:
                raise DamagedError(f"{entry.path} is missing") from None
            if problem := catalog.difference(staging, entry, durable=True):
                raise DamagedError(problem, arrived=entry)

        staging.mkdir(parents=True, exist_ok=True)
        try:
            self._side_by_side(fetch, manifest.files, lambda: self._progress(catalog.bytes_in(staging), manifest.bytes))
        except DamagedError:
            if not keep:
                deletion.delete_folder(root, staging)
            raise
        contents.write_manifest(staging, manifest)
        commits.adopt_folder(root, staging, manifest.step)

    # ---- for all of these

    def _side_by_side(
        self,
        work: Callable[[Storage, FileEntry], None],
        entries: Sequence[FileEntry],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        """Do work on several files concurrently, and call `tick` about once a second. Raises the first error; files
        that have not begun are skipped.
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

    def _sound(self, step: int) -> contents.Manifest | None:
        """Read the manifest of a step; None: there is no valid one. Raises NewerFormatError."""
        try:
            return self.manifest(step)
        except contents.NewerFormatError:
            raise
        except contents.ManifestError:
            return None


def _refuse_past(unknown: Mapping[int, contents.NewerFormatError], step: int) -> None:
    """Raise the error of the newest one after a step, if there is one."""
    if unknown and max(unknown) > step:
        raise unknown[max(unknown)]


def staged_name(manifest: contents.Manifest) -> str:
    """Return the name of a step's folder while it is fetched."""
    return f"mirror-{manifest.step}-{manifest.attempt}"


def point_of(manifest: contents.Manifest) -> Point:
    """Return attempt and step."""
    return (manifest.attempt, manifest.step)


def is_base(manifest: contents.Manifest) -> bool:
    """Return whether a version's copy holds its whole weights."""
    return any(path.startswith(contents.WEIGHTS) for path in manifest.paths)


def oldest_needed(versions: Collection[contents.Manifest]) -> Point:
    """Return the last base but one, from which on versions are kept: a follower that has begun with it can go on."""
    bases = sorted(point_of(one) for one in versions if is_base(one))
    return bases[-2] if len(bases) > 1 else (0, 0)


def _folder(step: int) -> str:
    return f"{contents.STEP_PREFIX}{step}"


# Where a mirror is kept: files below a folder that fsspec reaches, behind put, get, files and delete.


class _Info(TypedDict):
    """The fields of fsspec's file info that are used."""

    name: str
    type: str
    size: int | None


class Storage:
    """Files below a folder that fsspec reaches, with a connection of its own. Not thread-safe. Writes to a local path
    are durable when the call returns.

    Names are relative to the folder, with ``/``. Errors are those of the place's client: an `OSError`, or its own error
    for a lost connection.
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
        """Copy a local file to the place, over a file of that name."""
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
        """Copy a file from the place. Raises FileNotFoundError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._path(name), str(target))

    def write(self, name: str, text: str) -> None:
        """Write a small file; atomic on a local path."""
        path = self._writable(name)
        if self._local:
            replace_file(Path(path), text)
        else:
            self._fs.pipe_file(path, text.encode())

    def read(self, name: str) -> str | None:
        """Read a small file; None: there is none. Raises UnicodeDecodeError if it is not text."""
        try:
            text: str = self._fs.cat_file(self._path(name)).decode()
        except FileNotFoundError:
            return None
        return text

    def files(self, name: str = "") -> dict[str, int]:
        """List all files below a folder: name relative to it -> bytes. Empty if there is no such folder."""
        return dict(self._walk(self._path(name), ""))

    def names(self) -> list[str]:
        """List the names of the files and folders directly in the place."""
        return sorted(name for name, _ in self._children(self._base))

    def folders(self) -> list[str]:
        """List the names of the folders directly in the place."""
        return sorted(name for name, info in self._children(self._base) if info["type"] == "directory")

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its contents, if it is there."""
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
