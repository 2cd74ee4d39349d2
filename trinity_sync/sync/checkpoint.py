"""`sync=checkpoint`: the agents write the slot as shard files, the monitor commits them, explorers read the files. No
merge step.

verl's weight sync has no slot, agent or monitor: its sender writes buckets into a `VersionFolder`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.actors.agent_client import WrittenDelta
from trinity_sync.actors.calls import results
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.errors import RunError, grown
from trinity_sync.host.durable import make_folder, replace_file, sync_folder
from trinity_sync.host.locks import open_lock, try_lock, wait_for_lock
from trinity_sync.protocol.parts import HISTORY, INDEX, PartInfo, delta_file, shard_file, version_folder
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import (
    Bucket,
    BucketReceiver,
    BucketSender,
    BucketTransfer,
    Delivery,
    ExplorerSide,
    FindDestination,
    LeaseFolder,
    PartMaps,
    Published,
    StateDictStore,
    SyncMode,
    TrainerSide,
    commit,
    deliver_each,
    nodes_of,
)
from trinity_sync.sync.deltas import DeltaCopies, DeltaTransport, FolderDeltas, VersionDeltas
from trinity_sync.sync.links import BucketNotice, End, Heartbeat, Spoke
from trinity_sync.sync.maps import CopyMaps, FileMaps, check_layout, folder_of
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.layout import Cut, PartLayout, Segment
from trinity_sync.weights.part_delta import FROM_BASE_EVERY, KEPT_SPANS, Point, VersionIndex
from trinity_sync.weights.shard_file import ShardFile, write_shard_file

if TYPE_CHECKING:
    import torch

    from trinity_sync.config.schema import DeltaConfig


class CheckpointMode(SyncMode):
    """Versions travel through the checkpoint folder.

    Args:
        durable: fsync versions that are written for sync only (`sync.durable`).
        encoding: ``full``; ``delta``: the files of most versions are deltas; ``auto``: while an explorer is on a node
            that has not all parts (`sync.encoding`).
        delta: how deltas are made; not for ``full``.
    """

    def __init__(
        self, *, durable: bool, encoding: str = "full", delta: DeltaConfig | None = None, **settings: object
    ) -> None:
        self._durable = durable
        self._delta = None if encoding == "full" else delta
        self._always = encoding == "delta"

    def publisher(self, side: TrainerSide) -> CheckpointPublisher:
        if side.store is None:
            raise RunError("the sync mode is checkpoint, but there is no checkpoint folder to write versions to")
        if self._delta is None or side.deltas is None:
            return CheckpointPublisher(side, side.store, self._durable)
        return DeltaPublisher(side, side.store, self._durable, side.deltas, self._delta, always=self._always)

    def transport(self, side: ExplorerSide) -> CheckpointTransport | DeltaTransport:
        return CheckpointTransport(side.lease_folder) if self._delta is None else self._deltas(side)

    def _deltas(self, side: ExplorerSide) -> DeltaTransport:
        return DeltaTransport(side, FolderDeltas(side, CheckpointTransport(side.lease_folder), CheckpointTransport()))

    def maps(self, side: ExplorerSide) -> PartMaps:
        return FileMaps() if self._delta is None else CopyMaps(side.layouts)

    def copies(self, side: ExplorerSide) -> DeltaCopies | None:
        return None if self._delta is None else DeltaCopies(side, self._deltas(side))


class CheckpointPublisher:
    """The driver's half: has the agents write a version, and commits it."""

    def __init__(self, side: TrainerSide, store: StateDictStore, durable: bool) -> None:
        self._side = side
        self._store = store
        self._durable = durable

    def publish(self, sealed: SealedVersion) -> Published | None:
        folder = self._write(sealed)
        commit(self._side, sealed.version, str(folder))
        if self._side.versions is not None:
            self._side.versions.add(sealed.version, sealed.digest, folder, ())
        return None

    def _write(self, sealed: SealedVersion) -> Path:
        """Write and commit the files of a whole version; return their folder."""
        version = sealed.version
        nodes = nodes_of(sealed.parts)
        folder = self._store.begin(version, nodes)
        try:
            metadata = {"attempt": str(version.attempt), "step": str(version.step)}
            calls = [
                self._side.agents[node].write(sealed.slot, str(folder), metadata, fsync=self._durable) for node in nodes
            ]
            limit_s = grown(self._side.timeout_s, sealed.nbytes)  # the folder takes those of all nodes
            for node, files in zip(nodes, results(calls, limit_s, f"write version {version}"), strict=True):
                self._store.part_written(version, node, files)
            return self._store.commit(version, sealed.digest)
        except Exception as error:
            self._store.fail(version, str(error))
            raise

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        return deliver_each(self._side, explorers, version)


class DeltaPublisher(CheckpointPublisher):
    """The driver's half with deltas. The first version, and then one of every `full_every`, is written in full as well;
    with a history (`TrainerSide.base_every`) also the bases.

    Args:
        root: folder of the deltas, in that of the checkpoints.
        always: as of `VersionDeltas`; else versions to which no deltas pay are published as without deltas.
    """

    def __init__(
        self,
        side: TrainerSide,
        store: StateDictStore,
        durable: bool,
        root: Path,
        keys: DeltaConfig,
        *,
        always: bool = True,
    ) -> None:
        super().__init__(side, store, durable)
        self._root = root
        self._full_every = keys.full_every
        self._deltas = VersionDeltas(side, keys.codec, always=always)
        self._count = 0
        self._folders: list[list[Path]] = []  # of the versions since the last full one but one, and since the last
        self._recent: list[Version] = []  # the newest is the last
        self._base: tuple[Version, Path] | None = None  # the newest one of the history, and its folder

    def publish(self, sealed: SealedVersion) -> Published:
        if not self._deltas.pays(sealed):
            return self._publish_whole(sealed, self._write(sealed))
        base_every = self._side.base_every
        is_base = base_every is not None and self._count % base_every == 0
        begins = is_base or self._count % self._full_every == 0
        full = self._write(sealed) if begins else None
        folder = version_folder(self._root, sealed.version)
        make_folder(folder)
        written = self._deltas.encode(sealed, folder, pays=True, durable=self._durable)
        large = written and not self._deltas.kept and not self._deltas.lead_to(sealed, written)
        if written is None or large:
            shutil.rmtree(folder, ignore_errors=True)
            return self._publish_whole(sealed, full or self._write(sealed))
        by_start: dict[Version, list[WrittenDelta]] = {}
        for one in written:
            by_start.setdefault(one.start, []).append(one)
        whole = {start: found for start, found in by_start.items() if len(found) == len(sealed.parts)}
        deltas: list[tuple[Point, int]] = [(start, sum(one.nbytes for one in found)) for start, found in whole.items()]
        named = None if full is None else os.path.relpath(full.resolve(), self._root.parent.resolve())
        more = 0 if base_every is None else self._remember(sealed, folder, full if is_base else None, deltas)
        VersionIndex(named, deltas).write(folder / INDEX, durable=self._durable)
        report = self._deltas.report(sealed, written, more, with_full=full is not None)
        self._deltas.commit(sealed, str(folder))
        if self._side.versions is not None:
            files = [folder / delta_file(one.part, start) for start, found in whole.items() for one in found]
            self._side.versions.add(sealed.version, sealed.digest, full, files)
        self._count += 1
        self._recent = [*self._recent, sealed.version][-max(KEPT_SPANS) :]
        if begins:
            self._folders.append([])
            for old in self._folders.pop(0) if len(self._folders) > 2 else ():  # no reader needs them
                _retire(old)
        self._folders[-1].append(folder)
        return report

    def _publish_whole(self, sealed: SealedVersion, folder: Path) -> Published:
        self._deltas.encode(sealed, pays=False)
        report = self._deltas.report(sealed, (), with_full=True)
        self._deltas.commit(sealed, str(folder))
        self._count = 0  # the next version with deltas is also written in full
        while len(self._folders) > 1:  # a reader may still have the newest ones
            for old in self._folders.pop(0):
                _retire(old)
        return report

    def _remember(self, sealed: SealedVersion, folder: Path, full: Path | None, deltas: list[tuple[Point, int]]) -> int:
        """Add a version to the run's history; return the bytes of what was made for it alone. `full`: the folder of its
        weights, which become a base.
        """
        starts = [self._recent[-length] for length in KEPT_SPANS if length <= len(self._recent)]
        from_base = self._base if full is None and self._count % FROM_BASE_EVERY == 0 else None
        starts += [] if from_base is None else [from_base[0]]
        kept, base, more = [one for one in deltas if one[0] in starts], None, None
        if full is not None:
            base = folder / f"global_step_{sealed.version.step}"
            self._store.keep(full, base)
            self._base = sealed.version, base
            base = base.relative_to(self._root.parent)
        elif from_base is not None and from_base[0] not in dict(kept):
            more = self._deltas.encode_from(*from_base, sealed, folder, durable=self._durable)
            kept += [] if more is None else [(from_base[0], more)]
            if more is None:  # its file may hang: no version waits for it again
                self._base = None
        found = VersionIndex(None if base is None else str(base), kept, sealed.digest)
        found.write(folder / HISTORY, durable=self._durable)
        return more or 0


def _retire(folder: Path) -> None:
    """Delete the files of a version that only readers in the run need. The files of the history stay."""
    if not (folder / HISTORY).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.glob("full-*"):  # of an explorer that was killed, see `FolderDeltas.whole`
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError, DeltaError):
        kept = tuple(delta_file("", start) for start, _ in VersionIndex.read(folder / HISTORY).deltas)
        (folder / INDEX).unlink(missing_ok=True)
        for path in folder.glob("*.delta"):
            if not path.name.endswith(kept):
                path.unlink()


class CheckpointTransport:
    """Reads the shard files of a committed version: into the destinations or, where a piece has to be cast or checked
    before its use, into a buffer of one bucket. It maps no file, see `ShardFile`.
    """

    def __init__(self, lease_folder: LeaseFolder | None = None) -> None:
        self._lease_folder = lease_folder
        self._buffer = bytearray()

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        folder = folder_of(lease)
        with (
            self._lease_folder(folder, lease.version) if self._lease_folder else nullcontext(_nothing) as go_on,
            ExitStack() as opened,
        ):
            files = [(info, opened.enter_context(self._open(folder, info))) for _, info in sorted(lease.parts.items())]
            for info, file in files:
                for bucket in self._read(file, info, find_destination):
                    go_on()
                    yield bucket

    def _open(self, folder: Path, info: PartInfo) -> ShardFile:
        with ExitStack() as opened:
            file = opened.enter_context(ShardFile(folder / shard_file(info.part)))
            check_layout(file.path, file.layout, info)
            opened.pop_all()
        return file

    def _read(
        self, file: ShardFile, info: PartInfo, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        layout = file.layout
        cut: Cut = "tensor" if info.buckets is None else "bucket"
        for number, (start, stop) in enumerate(layout.pieces(cut)):
            # A piece that has to be checked before its use is not read into its destination.
            place = find_destination(layout, number, cut) if info.buckets is None else None
            if place is not None and not place.is_cuda:
                file.read(start, place.numpy().data)
                yield Bucket(layout, number, None, None, cut)
                continue
            if len(self._buffer) < stop - start:
                self._buffer = bytearray(max(layout.bucket_bytes, stop - start))
            data = memoryview(self._buffer)[: stop - start]
            file.read(start, data)
            yield Bucket(layout, number, data, None if info.buckets is None else info.buckets[number], cut)


def _nothing() -> None:
    """Renew nothing, where the folder needs no lease."""


# ---- programs without slots: buckets are files of a folder that all nodes share, and are committed together


class FolderTransfer(BucketTransfer):
    """Versions below a folder. The newest stays there for other readers, until all receivers have read the next one.

    Args:
        timeout_s: timeout of the wait for other processes that list the folder, seconds.
    """

    def __init__(self, root: Path, timeout_s: float) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._newest: VersionFolder | None = None

    def sender(self, host: str) -> FolderSender:
        return FolderSender(begin_version(self._root, self._timeout_s), self._keep)

    def receiver(self, spoke: Spoke, meeting: str | None, index: int, receivers: int) -> FolderReceiver:
        return FolderReceiver(lease_version(Path(str(meeting))))

    def _keep(self, version: VersionFolder) -> None:
        before, self._newest = self._newest, version
        if before is not None:
            before.release(remove=True)
        remove_unleased(self._root, self._timeout_s)


class FolderSender(BucketSender):
    """Writes each bucket to a file; the receivers hear of the files after the commit."""

    def __init__(self, version: VersionFolder, keep: Callable[[VersionFolder], None]) -> None:
        self.meeting = str(version.path)
        self._version = version
        self._keep = keep
        self._room = bytearray()
        self._written: list[tuple[PartLayout, bytes]] = []

    def room(self, nbytes: int) -> torch.Tensor:
        from trinity_sync.weights.tensors import byte_tensor

        if len(self._room) < nbytes:
            self._room = bytearray(nbytes)
        return byte_tensor(memoryview(self._room))

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        self._version.write_bucket(number, layout, data.numpy().data)
        self._written.append((layout, digest))
        self._hub.tell(Heartbeat())

    def end(self, end: End) -> None:
        files = self._version.commit(end.step, tensors=end.tensors, digest=end.digest)
        for number, ((layout, digest), path) in enumerate(zip(self._written, files, strict=True)):
            self._hub.tell(BucketNotice(number, layout, digest, str(path)))
        super().end(end)

    def close(self, *, failed: bool) -> None:
        if failed:
            self._version.release(remove=True)
        else:
            self._keep(self._version)


class FolderReceiver(BucketReceiver):
    """Reads the files of a version, on which it has a lease."""

    def __init__(self, version: VersionFolder) -> None:
        self._version = version

    def take(self, bucket: BucketNotice, into: torch.Tensor) -> None:
        read_bucket(Path(str(bucket.source)), bucket.layout, into.numpy().data)

    def close(self, *, failed: bool) -> None:
        self._version.release(remove=failed)


# ---- the folder of such versions
#
#     <dir>/.lock                        locked while a folder is made or the folders are listed
#     <dir>/.sending-<token>/            a version that is being written, or deleted
#     <dir>/version_20-<token>/          the committed version of step 20
#         lease                          flocked, shared, by every process that needs the folder
#         version.json                   step, tensors, digest, files
#         bucket-00000.safetensors       each bucket
#
# A process that releases a version deletes it unless another process has its lease. A killed process has no lease, so
# the last of the others deletes the folder; where there are no others, the next sender does. A folder with another
# name, or a committed one without a lease, belongs to another process and stays.

_DRAFT = ".sending-"
_COMMITTED = "version"
_OURS = re.compile(r"(?:\.sending|version(?:_\d+)?)-[0-9a-f]{16}")
_LEASE = "lease"
_LOCK = ".lock"


class VersionFolder:
    """A version's folder under a lease, which keeps it from being deleted.

    Args:
        root: the folder of all versions.
        token: the end of the folder's name.
        lease: descriptor of its locked lease.
    """

    def __init__(self, root: Path, token: str, lease: int) -> None:
        self._root = root
        self._token = token
        self._lease: int | None = lease
        self._files: list[dict[str, str | int]] = []

    @property
    def path(self) -> Path:
        """Where the folder is now; RunError: it is gone."""
        for found in self._root.glob(f"*-{self._token}"):
            return found
        raise RunError(f"the version {self._token} in {self._root} was deleted by another program")

    def write_bucket(self, number: int, layout: PartLayout, data: Segment) -> None:
        """Write a bucket to its file, durably; RunError: it cannot be written."""
        name = f"bucket-{number:05d}.safetensors"
        try:
            size, digest = write_shard_file(self.path / name, layout, data, {}, fsync=True)
        except OSError as error:
            raise RunError(f"bucket {number} cannot be written to {self.path}: {error.strerror}") from error
        self._files.append({"path": name, "bytes": size, "xxh3_128": digest})

    def commit(self, step: int | None, *, tensors: int = 0, digest: str | None = None) -> list[Path]:
        """Give the folder its name, once all in it is durable; return the files of its buckets."""
        draft = self.path
        body = {"format": 1, "step": step, "tensors": tensors, "digest": digest, "files": self._files}
        number = "" if step is None else f"_{step}"
        target = self._root / f"{_COMMITTED}{number}-{self._token}"
        try:
            replace_file(draft / "version.json", json.dumps(body, indent=1) + "\n")
            sync_folder(draft)
            draft.rename(target)
            sync_folder(self._root)
        except OSError as error:
            raise RunError(f"the version in {draft} cannot be committed: {error.strerror}") from error
        return [target / str(file["path"]) for file in self._files]

    def release(self, *, remove: bool) -> None:
        """End the lease; `remove` the folder unless another process has a lease. May be called again."""
        if self._lease is None:
            return
        os.close(self._lease)
        self._lease = None
        if remove:
            for folder in self._root.glob(f"*-{self._token}"):
                _remove_unless_leased(folder)


def begin_version(root: Path, timeout_s: float) -> VersionFolder:
    """Make the folder of a version; delete drafts that no process has.

    Args:
        timeout_s: timeout of the wait for other processes that list it, seconds.
    """
    token = secrets.token_hex(8)
    try:
        make_folder(root)
        with _locked(root, timeout_s):
            for draft in _versions(root, f"{_DRAFT}*"):
                _remove_unless_leased(draft)
            folder = root / f"{_DRAFT}{token}"
            folder.mkdir(mode=0o700)
            lease = _take_lease(folder, create=True)
    except OSError as error:
        raise RunError(f"no version can be written to {root}: {error.strerror} ({error.filename})") from error
    return VersionFolder(root, token, lease)


def lease_version(folder: Path) -> VersionFolder:
    """Take a lease on a version's folder, named as it was at its beginning; RunError: it is not seen here."""
    token = folder.name.rsplit("-", 1)[1]
    try:
        return VersionFolder(folder.parent, token, _take_lease(folder, create=False))
    except OSError as error:
        raise RunError(
            f"{folder}, which the sender has made, cannot be read here ({error.strerror}): engine_kwargs' dir has to "
            "be a folder that all nodes share"
        ) from error


def read_bucket(path: Path, layout: PartLayout, into: memoryview) -> None:
    """Copy a bucket's bytes out of its file; RunError: the file is gone, torn, or has another layout.

    Copied, not mapped: the bytes that are checked are those that are used, even if the file changes.
    """
    with ShardFile(path) as file:
        if file.layout != layout:
            raise RunError(f"{path} is laid out in another way than its sender said")
        if layout.nbytes:
            file.read(0, into)


def remove_unleased(root: Path, timeout_s: float) -> None:
    """Delete all versions and drafts without a lease; WaitTimeout: another process keeps `root` locked."""
    with _locked(root, timeout_s):
        for folder in _versions(root, "*"):
            _remove_unless_leased(folder)


def _versions(root: Path, pattern: str) -> list[Path]:
    return [found for found in root.glob(pattern) if _OURS.fullmatch(found.name) and not found.is_symlink()]


def _take_lease(folder: Path, *, create: bool) -> int:
    descriptor = open_lock(folder / _LEASE, create=create)
    try:
        wait_for_lock(descriptor, folder / _LEASE, 0, shared=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(root: Path, timeout_s: float) -> Iterator[None]:
    descriptor = open_lock(root / _LOCK)
    try:
        wait_for_lock(descriptor, root / _LOCK, timeout_s)
        yield
    finally:
        os.close(descriptor)


def _remove_unless_leased(folder: Path) -> None:
    try:
        lease = open_lock(folder / _LEASE, create=False)
    except FileNotFoundError:
        if not folder.name.startswith(_DRAFT):
            return
        lease = None  # it is being removed, or its sender was killed before it had made one
    try:
        if lease is not None and not try_lock(lease):
            return
        aside = folder.with_name(f"{_DRAFT}{folder.name.rsplit('-', 1)[1]}")  # half of a version has no version's name
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        if lease is not None:
            os.close(lease)
