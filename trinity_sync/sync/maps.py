"""The parts of leased versions, mapped in any process of a node: slots, files, and an explorer's copies.

vLLM's workers get these objects from their explorer, pickled, so this module and what it imports need no Ray.
"""

from __future__ import annotations

from pathlib import Path

from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import PartInfo, shard_file
from trinity_sync.protocol.versions import Lease
from trinity_sync.sync.base import LayoutCache, MappedPart
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import open_shard_file
from trinity_sync.weights.slots import MappedSegments


class SlotMaps:
    """Maps slots of this node, each once; a page only when it is touched (a `PartMaps`)."""

    def __init__(self, layouts: LayoutCache) -> None:
        self._layouts = layouts
        self._segments = MappedSegments(populate=False)

    def map(self, lease: Lease) -> list[MappedPart]:
        return [
            MappedPart(self._layouts.get(info), self._segments.get(info.path, info.nbytes), info.buckets)
            for _, info in sorted(lease.parts.items())
        ]


class FileMaps:
    """Maps shard files (a `PartMaps`). If a mapped file is truncated, a signal ends the process."""

    def map(self, lease: Lease) -> list[MappedPart]:
        """Return the parts; the caller has leased their folder."""
        folder, found = folder_of(lease), []
        for _, info in sorted(lease.parts.items()):
            path = folder / shard_file(info.part)
            layout, data = open_shard_file(path)
            check_layout(path, layout, info)
            found.append(MappedPart(layout, data, info.buckets))
        return found


class CopyMaps(SlotMaps):
    """Maps an explorer's copies, to which deltas were applied, and the files of versions without deltas."""

    def map(self, lease: Lease) -> list[MappedPart]:
        return super().map(lease) if lease.location is None else FileMaps().map(lease)


def folder_of(lease: Lease) -> Path:
    """Return the folder of a leased version; RunError: it has none."""
    if lease.location is None:
        raise RunError(f"version {lease.version} has no folder, though the sync mode is checkpoint")
    return Path(lease.location)


def check_layout(path: str | Path, layout: PartLayout, info: PartInfo) -> None:
    """Raise RunError where a file has another layout than the version was staged with."""
    if layout.digest != info.layout:
        raise RunError(f"{path} has layout {layout.digest}, the version was staged with {info.layout}")
