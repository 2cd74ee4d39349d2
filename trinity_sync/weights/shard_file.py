"""One part of a version on disk: a safetensors file whose data section is the segment, byte for byte.

The node agent writes it from a slot. Readers that verify or export a checkpoint, and vLLM's workers, map it
(`open_shard_file`); the mapped bytes go to `digest_rows` and `bucket_digests` as a segment would. A process that must
survive a damaged file system, such as an explorer, reads it (`ShardFile`). Any safetensors reader opens the file and
finds each shard's local elements as a 1-D tensor under the tensor's name. safetensors allows no gaps, so the alignment
bytes between shards appear as ``__padding__.N`` (U8, zero). The metadata key ``trinity_layout`` holds the layout as
JSON.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from xxhash import xxh3_128

from trinity_sync.errors import RunError
from trinity_sync.host.durable import PIECE_BYTES, digest_file, write_all
from trinity_sync.host.threads import piece
from trinity_sync.weights.layout import ALIGNMENT, LayoutError, PartLayout, Segment

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer
    from numpy.typing import NDArray


LAYOUT_KEY = "trinity_layout"
_LENGTH_BYTES = 8  # a safetensors file opens with the header's length, little-endian
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors readers


class ShardFileError(RunError):
    """A file is not a shard file, or is truncated."""


def write_shard_file(
    path: str | Path, layout: PartLayout, buffer: Segment, metadata: Mapping[str, str], fsync: bool
) -> tuple[int, str]:
    """Write a part's segment with its layout; return the file's length in bytes and its xxh3_128 hex.

    The file at `path` is replaced; on an error none is left.

    Raises LayoutError if the buffer is too small. `metadata`: further texts for its metadata. `fsync`: the bytes are on
    disk when this returns (the caller syncs the folder).
    """
    data = layout.view(buffer)
    header = _header(layout, metadata)
    with DigestedFile(Path(path), durable=fsync) as file:
        file.write(header)
        file.write(data)
        return file.finish()


class ShardFile:
    """A shard file that is read piece by piece, with its `layout`.

    If the file can no longer be read (it was truncated, deleted from another client of a network file system, is on a
    bad disk), a read raises an error; a mapped file would end the process with a signal.

    Raises ShardFileError if the file is missing or cannot be read, is not a shard file, or differs in length from its
    header.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with _read_errors(path), ExitStack() as opened:
            self._file = opened.enter_context(Path(path).open("rb"))
            self.layout, self._start, _ = _read_header(path, self._file)
            opened.pop_all()

    def read(self, start: int, into: WriteableBuffer) -> None:
        """Fill a writable buffer with the segment's bytes from `start` on, or raise a `ShardFileError`."""
        left, at = memoryview(into).cast("B"), self._start + start
        with _read_errors(self.path):
            while left:
                count = os.preadv(self._file.fileno(), [left], at)
                if not count:
                    raise ShardFileError(f"{self.path} is torn: it has no byte {at} any more")
                left, at = left[count:], at + count

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_shard_file(path: str | Path, *, writable: bool = False) -> tuple[PartLayout, memoryview]:
    """Map a shard file, and return its layout and a view of the data section, ``layout.nbytes`` long.

    The mapping lives as long as the view. Raises the errors of `ShardFile`.
    """
    with _read_errors(path), Path(path).open("r+b" if writable else "rb") as file:
        layout, start, size = _read_header(path, file)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return layout, memoryview(mapping)[start:]


def _read_header(path: str | Path, file: BinaryIO) -> tuple[PartLayout, int, int]:
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
def _read_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ShardFileError(f"{path} is missing") from None
    except OSError as error:
        raise ShardFileError(f"{path} cannot be read now: {error.strerror}") from error


def _header(layout: PartLayout, metadata: Mapping[str, str]) -> bytes:
    """Return length and header, padded with blanks so that the data section is aligned."""
    if LAYOUT_KEY in metadata:
        raise ValueError(f"metadata must not hold the key {LAYOUT_KEY!r}, under which the layout is stored")
    layout_text = json.dumps(layout.to_json(), sort_keys=True, separators=(",", ":"))
    entries: dict[str, object] = {"__metadata__": {**metadata, LAYOUT_KEY: layout_text}}
    for shard, offset in layout.entries:
        span = [offset, offset + shard.nbytes]
        entries[shard.name] = {"dtype": shard.dtype, "shape": [shard.numel_local], "data_offsets": span}
    for number, (start, stop) in enumerate(layout.gaps):
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


_SMALL_BYTES = 64 << 10
"""Less is copied into the buffer in the same thread: asking another one would take longer."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class DigestedFile:
    """A file that is digested while it is written from beginning to end; has `write` and `tell` of a binary stream.

    Usage::

        with DigestedFile(path, durable=True) as file:
            file.write(data)
            size, digest = file.finish()

    On an error no file is left at `path`, which is replaced; its folder exists. `durable`: the bytes are on disk when
    `finish` returns (the caller syncs the folder). All methods raise OSError.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._hasher = xxh3_128()
        self._size = 0
        self._filled = 0
        self._buffer = mmap.mmap(-1, PIECE_BYTES)  # page-aligned, as direct writes need it
        self._place = np.frombuffer(self._buffer, np.uint8)
        self._descriptor = self._open(_DIRECT if durable else 0)

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with ExitStack() as failed:
            failed.callback(self._remove)
            os.close(self._descriptor)  # a network file system may report a full disk only here
            if kind is None:
                failed.pop_all()

    def write(self, data: ReadableBuffer) -> int:
        """Append all data through the buffer, and return the number of bytes."""
        source = np.frombuffer(memoryview(data), np.uint8)
        start = 0
        while start < len(source):
            taken = source[start : start + PIECE_BYTES - self._filled]
            if len(taken) < _SMALL_BYTES and self._filled + len(taken) < PIECE_BYTES:
                self._take(taken)
            else:
                piece(partial(self._take, taken))
            start += len(taken)
        self._size += len(source)
        return len(source)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...

    def finish(self) -> tuple[int, str]:
        """Write the rest; return (length of the file in bytes, xxh3_128 hex of all of it)."""
        self._leave_direct()  # the end of a file is rarely the end of a block
        piece(self._put)
        if self._durable:
            os.fsync(self._descriptor)
        return self._size, str(self._hasher.hexdigest())

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()

    def _open(self, extra: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(self._path, flags | extra, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL or not extra:
                raise
            return os.open(self._path, flags, 0o666)  # a file system without direct writes

    def _take(self, data: NDArray[np.uint8]) -> None:
        end = self._filled + len(data)
        self._place[self._filled : end] = data
        self._filled = end
        if end == PIECE_BYTES:
            self._put()

    def _put(self) -> None:
        data = memoryview(self._buffer)[: self._filled]
        self._hasher.update(data)
        try:
            write_all(self._descriptor, data)
        except OSError as error:
            # A direct write that was refused has written nothing, or whole blocks.
            if error.errno != errno.EINVAL or not self._leave_direct():
                raise
            written = os.lseek(self._descriptor, 0, os.SEEK_CUR) % PIECE_BYTES
            write_all(self._descriptor, data[written:])
        self._filled = 0

    def _leave_direct(self) -> bool:
        """Write through the page cache from now on, and return whether this changed anything."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)


Extent = tuple[int, int, int]
"""(offset in the file, offset in the segment, length), in bytes."""

_CHUNK_BYTES = 1 << 20


class ImageError(RunError):
    """The extents do not fit the file or the segment."""


def write_image(path: Path, extents: Sequence[Extent], segment: Segment, *, durable: bool) -> tuple[int, str]:
    """Fill the holes of a file of its final length with bytes of a segment; return its length in bytes and its xxh3_128
    hex.

    The node agent calls it, so it needs no torch.

    Raises ImageError if an extent reaches beyond the file or the segment, or into the extent before. `extents`:
    ascending in the file, without overlap. `durable`: the bytes are on disk when this returns.
    """
    if not extents:
        return digest_file(path, durable=durable)
    source = memoryview(segment).cast("B")
    whole = path.with_name(f"{path.name}.whole")
    with path.open("rb") as skeleton, DigestedFile(whole, durable=durable) as file:
        size = os.fstat(skeleton.fileno()).st_size
        end = 0
        for offset, at, length in extents:
            if offset < end or offset + length > size or at + length > len(source):
                raise ImageError(
                    f"{path}: {length} bytes at {offset} of {size}, from {at} of {len(source)}, do not fit"
                )
            _copy(skeleton, end, offset, file)
            file.write(source[at : at + length])
            end = offset + length
        _copy(skeleton, end, size, file)
        found = file.finish()
    whole.replace(path)
    return found


def _copy(source: BinaryIO, start: int, stop: int, target: DigestedFile) -> None:
    source.seek(start)
    while start < stop:
        data = source.read(min(_CHUNK_BYTES, stop - start))
        if not data:
            raise ImageError(f"the file became shorter than {stop} bytes while it was read")
        target.write(data)
        start += len(data)
