"""`sync=checkpoint`: the agents write the slot as shard files, the monitor commits them, explorers map the files. No
merge step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Bucket, Delivery, FindRoom, TrainerSide, deliver_each
from trinity_sync.sync.parts import PartInfo, shard_file
from trinity_sync.sync.remote import resolve
from trinity_sync.sync.synchronizer import Sealed
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shard_file import open_shard_file


class StateDictStore(Protocol):
    """The checkpoint room's side of a weights-only save, passed in."""

    def begin(self, version: Version, nodes: list[str]) -> Path:
        """A staging folder for the version; one part per node is expected."""
        ...

    def part_written(self, version: Version, node: str, files: list[tuple[str, int, str]]) -> None:
        """A node's files: (path relative to the folder, bytes, xxh3_128 hex)."""
        ...

    def commit(self, version: Version, digest: str | None) -> Path:
        """Wait until the version is committed and return its folder."""
        ...

    def fail(self, version: Version, error: str) -> None:
        """The version will not be completed; its staging folder goes."""
        ...


class CheckpointMode:
    """Versions travel through the checkpoint folder.

    Args:
        side: see `TrainerSide`.
        store: where weights-only saves go.
        durable: fsync versions that are written for sync only (`sync.durable`).
    """

    name = "checkpoint"

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
            calls = {
                f"the agent of node {node}": self._side.agents[node].write.remote(
                    sealed.slot, str(folder), metadata, self._durable
                )
                for node in nodes
            }
            written = resolve(calls, f"write version {version}", self._side.timeout_s)
            for node, files in zip(nodes, written.values(), strict=True):
                self._store.part_written(version, node, files)
            location = self._store.commit(version, sealed.digest)
        except Exception as error:
            self._store.fail(version, str(error))
            raise
        self._side.synchronizer.call("commit", version, str(location))

    def deliver(self, explorers: Mapping[str, Any], version: Version) -> Delivery:
        return deliver_each(self._side, explorers, version)


Hold = Callable[[Path, Version], AbstractContextManager[Any]]
"""Keeps the folder of a version from being deleted while the context is open; raises `RunError` where it is gone."""


class CheckpointTransport:
    """Maps the shard files of a committed version.

    Args:
        hold: see `Hold`; passed in by who knows the checkpoint room. None: nobody deletes folders.
    """

    def __init__(self, hold: Hold | None = None) -> None:
        self._hold = hold

    def buckets(self, lease: Lease, ticket: Any, find_room: FindRoom) -> Generator[Bucket, None, None]:
        if lease.location is None:
            raise RunError(f"version {lease.version} has no folder, though the sync mode is checkpoint")
        with self._hold(Path(lease.location), lease.version) if self._hold else nullcontext():
            # What is mapped stays readable, so the hold need not last as long as the load.
            opened = [(info, *self._open(Path(lease.location), info)) for _, info in sorted(lease.parts.items())]
        yield from self._read(opened)

    def _open(self, folder: Path, info: PartInfo) -> tuple[PartLayout, Segment]:
        path = folder / shard_file(info.part)
        layout, buffer = open_shard_file(path)
        if layout.digest != info.layout:
            raise RunError(f"{path} is laid out as {layout.digest}, the version was staged as {info.layout}")
        return layout, buffer

    def _read(self, opened: list[tuple[PartInfo, PartLayout, Segment]]) -> Generator[Bucket, None, None]:
        from trinity_sync.weights.apply import in_buckets

        for info, layout, buffer in opened:
            for number, data, digest in in_buckets(layout, buffer, info.buckets):
                yield Bucket(layout, number, data, digest)
