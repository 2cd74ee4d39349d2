"""A file of a checkpoint, as it is known from who wrote it to the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from trinity_sync.protocol.parts import FileTuple

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: relative to the checkpoint folder, with ``/``.
        bytes: its size.
        xxh3_128: hex digest of its contents.
    """

    path: str
    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts or self.path == MANIFEST:
            raise ValueError(
                f"{self.path!r} cannot be the path of a checkpoint's file: it has to lie inside its folder"
            )

    def as_tuple(self) -> FileTuple:
        """Return the entry as the protocol carries it."""
        return (self.path, self.bytes, self.xxh3_128)
