"""`sync=checkpoint`: the agents write the slot as shard files, the monitor commits them, explorers read the files. No
merge step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path

from trinity_sync.actors.calls import results
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import Sealed
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import PartInfo, shard_file
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import (
    Bucket,
    Delivery,
    ExplorerSide,
    FindDestination,
    LeaseFolder,
    MappedPart,
    StateDictStore,
    SyncMode,
    TrainerSide,
    deliver_each,
)
from trinity_sync.weights.layout import Cut, PartLayout
from trinity_sync.weights.shard_file import ShardFile, open_shard_file


class CheckpointMode(SyncMode):
    """Versions travel through the checkpoint folder.

    Args:
        durable: fsync versions that are written for sync only (`sync.durable`).
    """

    def __init__(self, *, durable: bool, **settings: object) -> None:
        self._durable = durable

    def publisher(self, side: TrainerSide) -> CheckpointPublisher:
        if side.store is None:
            raise RunError("the sync mode is checkpoint, but there is no checkpoint folder to write versions to")
        return CheckpointPublisher(side, side.store, self._durable)

    def transport(self, side: ExplorerSide) -> CheckpointTransport:
        return CheckpointTransport(side.lease_folder)

    def maps(self, side: ExplorerSide) -> FileMaps:
        return FileMaps()


class CheckpointPublisher:
    """The driver's half: has the agents write a version, and commits it.

    Args:
        side: see `TrainerSide`.
        store: takes weights-only saves.
        durable: fsync versions that are written for sync only (`sync.durable`).
    """

    def __init__(self, side: TrainerSide, store: StateDictStore, durable: bool) -> None:
        self._side = side
        self._store = store
        self._durable = durable

    def publish(self, sealed: Sealed) -> None:
        version = sealed.version
        nodes = sorted({info.node for info in sealed.parts.values()})
        folder = self._store.begin(version, nodes)
        try:
            metadata = {"attempt": str(version.attempt), "step": str(version.step)}
            calls = [
                self._side.agents[node].write(sealed.slot, str(folder), metadata, fsync=self._durable) for node in nodes
            ]
            for node, files in zip(
                nodes, results(calls, self._side.timeout_s, f"write version {version}"), strict=True
            ):
                self._store.part_written(version, node, files)
            location = self._store.commit(version, sealed.digest)
        except Exception as error:
            self._store.fail(version, str(error))
            raise
        synchronizer = self._side.synchronizer
        synchronizer.commit(version, str(location)).result(synchronizer.timeout_s)

    def deliver(self, explorers: Mapping[str, ExplorerClient], version: Version) -> Delivery:
        return deliver_each(self._side, explorers, version)


class CheckpointTransport:
    """Reads the shard files of a committed version: to where the bytes belong or, what has to be cast or checked before
    it is used, into memory of one bucket. Nothing is mapped, see `ShardFile`.

    Args:
        lease_folder: see `LeaseFolder`; passed in by who knows checkpoints. None: nobody deletes folders.
    """

    def __init__(self, lease_folder: LeaseFolder | None = None) -> None:
        self._lease_folder = lease_folder
        self._buffer = bytearray()

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        folder = _folder(lease)
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
            _check_layout(file.path, file.layout, info)
            opened.pop_all()
        return file

    def _read(
        self, file: ShardFile, info: PartInfo, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        layout = file.layout
        cut: Cut = "tensor" if info.buckets is None else "bucket"
        for number, (start, stop) in enumerate(layout.pieces(cut)):
            # What has to be checked before it is used is not read to where it is used.
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


class FileMaps:
    """Maps shard files (a `PartMaps`). A file that is cut while it is mapped ends the process by a signal."""

    def map(self, lease: Lease) -> list[MappedPart]:
        """The parts; the caller keeps their folder."""
        folder, found = _folder(lease), []
        for _, info in sorted(lease.parts.items()):
            path = folder / shard_file(info.part)
            layout, data = open_shard_file(path)
            _check_layout(path, layout, info)
            found.append(MappedPart(layout, data, info.buckets))
        return found


def _folder(lease: Lease) -> Path:
    if lease.location is None:
        raise RunError(f"version {lease.version} has no folder, though the sync mode is checkpoint")
    return Path(lease.location)


def _check_layout(path: str | Path, layout: PartLayout, info: PartInfo) -> None:
    if layout.digest != info.layout:
        raise RunError(f"{path} is laid out as {layout.digest}, the version was staged as {info.layout}")


def _nothing() -> None:
    """Without a hold nothing has to be prolonged."""
