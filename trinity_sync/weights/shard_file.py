"""One part of a version on disk: a safetensors file whose data section is the segment, byte for byte.

Written by the node agent from a slot. Who verifies or exports a checkpoint maps it, and so do vLLM's workers
(`open_shard_file`): the mapped bytes go to `digest_rows` and `bucket_digests` as a segment would. Who has to outlive
what becomes of the file, such as an explorer's own process, reads it (`ShardFile`). Any safetensors reader opens the
file too and finds each shard's local elements as a 1-D tensor under the tensor's name. As safetensors allows no gaps,
the alignment bytes between shards appear as ``__padding__.N`` (U8, zero). The metadata key ``trinity_layout`` holds
the layout as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trinity_sync.errors import RunError
from trinity_sync.weights.digested_file import DigestedFile
from trinity_sync.weights.layout import ALIGNMENT, LayoutError, PartLayout, Segment

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LAYOUT_KEY = "trinity_layout"
_LENGTH_BYTES = 8  # a safetensors file opens with the header's length, little-endian
_MAX_HEADER_BYTES = 100_000_000  # more than this no safetensors reader accepts


class ShardFileError(RunError):
    """A file is not a shard file, or is torn."""


def write_shard_file(
    path: str | Path, layout: PartLayout, buffer: Segment, metadata: Mapping[str, str], fsync: bool
) -> tuple[int, str]:
    """Write a part's segment with its layout. On an error nothing is left at `path`.

    Args:
        path: file to write; replaced if it is there. Its folder exists.
        layout: what lies where in the segment.
        buffer: the segment, at least ``layout.nbytes``.
        metadata: further texts for the file's metadata.
        fsync: whether the bytes are on disk when this returns (the folder's entry is the caller's matter).

    Returns:
        (length of the file in bytes, xxh3_128 hex of the whole file).

    Raises:
        ValueError: `metadata` holds the key of the layout.
        LayoutError: the buffer is too small.
        OSError: the file cannot be written.
    """
    data = layout.view(buffer)
    header = _header(layout, metadata)
    with DigestedFile(Path(path), durable=fsync) as file:
        file.write(header)
        file.write(data)
        return file.finish()


class ShardFile:
    """A shard file that is read piece by piece. What cannot be read any more (the file was cut, deleted from another
    client of a network file system, is on a bad disk) is an error; where it is mapped, a signal ends the process.

    Attributes:
        path: where the file is.
        layout: what lies where in the part's segment.

    Raises:
        ShardFileError: the file is missing or cannot be read, is not a shard file, or is shorter or longer than its
            header says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with _told(path), ExitStack() as opened:
            self._file = opened.enter_context(Path(path).open("rb"))
            self.layout, self._start, _ = _read_header(path, self._file)
            opened.pop_all()

    def read(self, start: int, into: WriteableBuffer) -> None:
        """Fill a writable buffer with the bytes of the segment from `start` on.

        Raises:
            ShardFileError: they are not there, or cannot be read.
        """
        left, at = memoryview(into).cast("B"), self._start + start
        with _told(self.path):
            while left:
                count = os.preadv(self._file.fileno(), [left], at)
                if not count:
                    raise ShardFileError(f"{self.path} is torn: it has no byte {at} any more")
                left, at = left[count:], at + count

    def close(self) -> None:
        """Let it go."""
        self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_shard_file(path: str | Path) -> tuple[PartLayout, memoryview]:
    """Map a shard file.

    Returns:
        (layout, read-only view of the data section, ``layout.nbytes`` long). The mapping lives as long as the view.

    Raises:
        ShardFileError: as of `ShardFile`.
    """
    with _told(path), Path(path).open("rb") as file:
        layout, start, size = _read_header(path, file)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return layout, memoryview(mapping)[start:]


def _read_header(path: str | Path, file: BinaryIO) -> tuple[PartLayout, int, int]:
    """The layout, where the data begin, and the file's length."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ShardFileError(f"{path} is torn or not a safetensors file: its header is not all there")
    layout = _parse(path, file.read(length))
    start = _LENGTH_BYTES + length
    if size != start + layout.nbytes:
        raise ShardFileError(f"{path} is torn: it has {size} bytes, its header says {start + layout.nbytes}")
    return layout, start, size


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """What the system says of the file, in our words."""
    try:
        yield
    except FileNotFoundError:
        raise ShardFileError(f"{path} is missing") from None
    except OSError as error:
        raise ShardFileError(f"{path} cannot be read now: {error.strerror}") from error


def _header(layout: PartLayout, metadata: Mapping[str, str]) -> bytes:
    """Length and header, padded with blanks so that the data section is aligned as the segment is."""
    if LAYOUT_KEY in metadata:
        raise ValueError(f"metadata must not hold the key {LAYOUT_KEY!r}, under which the layout is stored")
    layout_text = json.dumps(layout.to_json(), sort_keys=True, separators=(",", ":"))
    entries: dict[str, object] = {"__metadata__": {**metadata, LAYOUT_KEY: layout_text}}
    for shard, offset in layout.entries:
        span = [offset, offset + shard.nbytes]
        entries[shard.name] = {"dtype": shard.dtype, "shape": [shard.numel_local], "data_offsets": span}
    for number, (start, stop) in enumerate(layout.gaps()):
        entries[f"__padding__.{number}"] = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _parse(path: str | Path, header: bytes) -> PartLayout:
    try:
        return PartLayout.from_json(json.loads(json.loads(header)["__metadata__"][LAYOUT_KEY]))
    except (KeyError, TypeError, ValueError, LayoutError) as error:
        raise ShardFileError(
            f"{path} is not a shard file: its metadata holds no valid {LAYOUT_KEY} ({error})"
        ) from error
