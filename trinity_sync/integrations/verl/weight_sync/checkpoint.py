"""Mode ``checkpoint``: buckets are files in a folder that all nodes share, committed together by one rename.

The newest version stays in the folder until the next one is read by all, for whoever else wants to read it: any reader
of safetensors opens the files. See `versions_folder` for who removes what.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file
from trinity_sync.integrations.verl.weight_sync import versions_folder
from trinity_sync.integrations.verl.weight_sync.base import Incoming, Mode, Offer, Outgoing
from trinity_sync.integrations.verl.weight_sync.link import BucketNotice, End, Hub, MemberPlace, Sender, Spoke, Working
from trinity_sync.integrations.verl.weight_sync.versions_folder import VersionLock
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import ShardFile, write_shard_file


class CheckpointTransfer(Mode):
    """A shared folder.

    Args:
        root: the folder.
        timeout_s: limit of the wait for others that look through the folder, seconds.
    """

    def __init__(self, root: Path, timeout_s: float) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._newest: VersionLock | None = None

    def prepare(self, host: str) -> Offer:
        """Make the folder of the version."""
        return _FolderOffer(versions_folder.begin(self._root, self._timeout_s), self)

    def incoming(self, spoke: Spoke, place: MemberPlace, sender: Sender) -> Incoming:
        return _FolderIncoming(versions_folder.hold(Path(str(sender.meeting))))

    def keep(self, held: VersionLock) -> None:
        """A version has been read by all: it stays, in place of the one before."""
        before, self._newest = self._newest, held
        if before is not None:
            before.leave(remove=True)
        versions_folder.remove_others(self._root, self._timeout_s)


class _FolderOffer(Offer):
    def __init__(self, held: VersionLock, mode: CheckpointTransfer) -> None:
        self._held = held
        self._mode = mode
        self.meeting = str(held.path)

    def outgoing(self, hub: Hub, place: MemberPlace) -> Outgoing:
        return _FolderOutgoing(hub, self._held, self._mode)

    def withdraw(self) -> None:
        self._held.leave(remove=True)


class _FolderOutgoing(Outgoing):
    def __init__(self, hub: Hub, held: VersionLock, mode: CheckpointTransfer) -> None:
        self._hub = hub
        self._held = held
        self._mode = mode
        self._room = torch.empty(0, dtype=torch.uint8)
        self._written: list[tuple[PartLayout, bytes, str, int, str]] = []

    def room(self, nbytes: int) -> torch.Tensor:
        if self._room.numel() < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        return self._room

    def put(self, number: int, layout: PartLayout, data: torch.Tensor, digest: bytes) -> None:
        name = f"bucket-{number:05d}.safetensors"
        try:
            size, of_file = write_shard_file(self._held.path / name, layout, data.numpy().data, {}, fsync=True)
        except OSError as error:
            raise RunError(f"bucket {number} cannot be written to {self._held.path}: {error.strerror}") from error
        self._written.append((layout, digest, name, size, of_file))
        self._hub.tell(Working())

    def end(self, end: End) -> None:
        body = {
            "format": 1,
            "step": end.step,
            "tensors": end.tensors,
            "digest": end.digest,
            "files": [{"path": name, "bytes": size, "xxh3_128": digest} for *_, name, size, digest in self._written],
        }
        try:
            replace_file(self._held.path / "version.json", json.dumps(body, indent=1) + "\n")
            folder = self._held.commit(end.step)
        except OSError as error:
            raise RunError(f"the version in {self._held.path} cannot be committed: {error.strerror}") from error
        for number, (layout, digest, name, *_) in enumerate(self._written):
            self._hub.tell(BucketNotice(number, layout, digest, str(folder / name)))
        self._hub.tell(end)

    def close(self, *, failed: bool) -> None:
        if failed:
            self._held.leave(remove=True)
        else:
            self._mode.keep(self._held)


class _FolderIncoming(Incoming):
    def __init__(self, held: VersionLock) -> None:
        self._held = held

    def take(self, bucket: BucketNotice) -> torch.Tensor:
        with ShardFile(str(bucket.source)) as file:
            if file.layout != bucket.layout:
                raise RunError(f"{file.path} is laid out in another way than its sender said")
            # Into memory of its own, not mapped: what is checked is what is used, whatever becomes of the file.
            data = torch.empty(bucket.layout.nbytes, dtype=torch.uint8)
            if bucket.layout.nbytes:
                file.read(0, data.numpy().data)
        return data

    def close(self, *, failed: bool) -> None:
        self._held.leave(remove=failed)
