"""Lossless deltas between two versions of one shard: `encode` on the side that has both, `apply` on the other.

A shard is a flat array of unsigned integers that hold the bits of its elements, so every bit pattern survives: NaN, -0,
denormals. A delta names the digests of its base and of its result and has a checksum, so a wrong base or a damaged
delta is found before anything is written. Each delta stands alone; `apply_chain` applies several. docs/delta.md has the
format, byte by byte.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.weights import delta_gaps, shards
from trinity_sync.weights.native import CLASSES, Form

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyarrow import Codec

    from trinity_sync.weights.delta_gaps import Elements

    Array = NDArray[Any]

Part = bytes | memoryview
"""A piece of a delta; some are views of the new array, which must not change until they are sent."""

_FORMAT = 1
_UNCHANGED, _FULL, _SPARSE, _GAPS = range(4)
CODECS = {"full": _FULL, "planes": _FULL, "sparse": _SPARSE, "gap8z": _GAPS, "class_gap": _GAPS}
"""By name, with their numbers in the format; a shard without a change is one byte whatever the codec."""
_CLASSES = {"gap8z": 1, "class_gap": CLASSES}
_DTYPES = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "F16", "BF16", "I32", "F32", "I64", "F64")
"""Safetensors names; the place of a name is its number in the format."""
_HEADER = struct.Struct("<B3sBBHQQ16s16sQ")
_MAGIC = b"TSD"
_LENGTH = struct.Struct("<I")
_BLOCK = 1 << 20
"""Elements of a block of a full shard."""
_MOST = 0.68
"""Share of the bytes of a shard from which on its byte planes are as short as a delta."""
_LEAST_PACKED = 256
"""Fewer bytes are not compressed: each stream costs 16 microseconds."""


class DeltaError(RunError):
    """A delta is damaged, or not of this shard or format. Nothing was written, unless the message says so."""


class WrongBaseError(DeltaError):
    """The delta leads from other weights than those at hand."""


class _Header(NamedTuple):
    kind: int  # format << 4 | codec
    magic: bytes
    dtype: int
    classes: int
    top: int
    elements: int
    changes: int
    base: bytes
    result: bytes
    checksum: int


def digest(array: Array) -> bytes:
    """Return the digest by which deltas name weights: xxh3_128 of the bytes of a contiguous array."""
    return bytes(xxh3_128_digest(array.reshape(-1).view(np.uint8).data))


def result_of(start: Part) -> bytes | None:
    """Return the digest of the array that a sound delta makes, from its first part; None: nothing changes."""
    return _Header(*_HEADER.unpack(start[: _HEADER.size])).result if len(start) >= _HEADER.size else None


def encode(
    old: Array,
    new: Array,
    dtype: str,
    codec: str = "class_gap",
    *,
    base_digest: bytes | None = None,
    result_digest: bytes | None = None,
) -> list[Part]:
    """Return the delta from `old` to `new` as parts, to be sent one after another.

    Where the codec would give about as many bytes as `planes`, or more, the delta is of that codec. Memory: the delta
    and a few MiB; for gap codes also the streams, 2 bytes for a change and its bits where the step is large.

    Args:
        old, new: contiguous arrays of one shape, whose items have the width of `dtype`; read-only ones, too.
        dtype: safetensors name.
        codec: a name of `CODECS`.
        base_digest, result_digest: the digests of the arrays, where the caller has them; saves a pass over each.
    """
    if codec not in CODECS:
        raise ValueError(f"{codec!r} is not a codec; the codecs are {', '.join(CODECS)}")
    before, after = _flat(old, dtype), _flat(new, dtype)
    if old.shape != new.shape:
        raise ValueError(f"the arrays have the shapes {old.shape} and {new.shape}; a delta is between equal ones")
    changes, classes, top, body = -1, 0, 0, list[Part]()
    if CODECS[codec] == _SPARSE:
        changes, body = _sparse(before, after)
    elif CODECS[codec] == _GAPS:
        form = delta_gaps.FORMS.get(dtype, delta_gaps.INTEGERS)
        classes = _CLASSES[codec] if form.mask else 1
        top = delta_gaps.top_exponent(before, form) if classes > 1 and before.size else 0
        changes, body = _gaps(before, after, form.of(top, classes))
    if changes == 0 or (changes < 0 and np.array_equal(before, after)):
        return [bytes([_FORMAT << 4 | _UNCHANGED])]
    number = CODECS[codec]
    if changes < 0 or sum(map(len, body)) >= _MOST * before.nbytes:
        number, changes, classes, top = _FULL, before.size, 0, 0
        body = list(_full(after, planes=codec != "full"))
    header = _Header(
        _FORMAT << 4 | number,
        _MAGIC,
        _DTYPES.index(dtype),
        classes,
        top,
        before.size,
        changes,
        base_digest or digest(before),
        result_digest or digest(after),
        0,
    )
    return [_HEADER.pack(*header._replace(checksum=_checksum(_HEADER.pack(*header), body))), *body]


def apply(
    old: Array,
    delta: Part | bytearray,
    dtype: str,
    out: Array | None = None,
    *,
    base_digest: bytes | None = None,
    kept: bool = True,
    checked: bool = True,
) -> Array:
    """Return the array that a delta makes of `old`, of the same shape.

    Everything is checked before the first byte is written: base, checksum, lengths, and in place also that the streams
    decode completely. The digest of the result is checked last; `out` is valid only when this returns.

    Raises DeltaError, for other weights than the delta's base WrongBaseError.

    Args:
        old, dtype: as for `encode`.
        delta: the joined parts.
        out: contiguous, as large as `old`; may be `old` itself. None: a new array.
        base_digest: the digest of `old`, where the caller has it; saves a pass.
        kept: False: after an error `old` is worth nothing, so in place the streams are decoded once. Saves a pass.
        checked: False: the digest of the result is not compared, as more deltas follow. Saves a pass.
    """
    before = _flat(old, dtype)
    result = np.empty_like(old) if out is None else out
    after = _flat(result, dtype)
    in_place = after.ctypes.data == before.ctypes.data
    if result.shape != old.shape or (not in_place and np.may_share_memory(before, after)):
        raise ValueError("out must have the shape of the base, and be the base itself or share no memory with it")
    if not after.flags.writeable:
        raise ValueError("out is read-only")
    data = memoryview(delta).cast("B")
    if len(data) == 1 and data[0] == _FORMAT << 4 | _UNCHANGED:
        after[:] = before
        return result
    header, body = _read_header(data, dtype, before.size)
    if (base_digest or digest(before)) != header.base:
        raise WrongBaseError("a delta of other weights: the digest of its base is not that of the weights at hand")
    codec = header.kind & 15
    if codec == _SPARSE:
        places, values = _read_sparse(body, header, after.dtype)
        if not in_place:
            after[:] = before
        after[places] = values
    elif codec == _GAPS:
        bits = delta_gaps.FORMS.get(dtype, delta_gaps.INTEGERS)
        if header.top > bits.mask:
            raise _damaged(f"{header.top} is not an exponent of {dtype}")
        form, streams = bits.of(header.top, header.classes), _read_gaps(body, header, after.itemsize)
        targets = (None, after) if in_place and kept else (after,)
        if not all(delta_gaps.decode(before, target, form, streams) for target in targets):
            raise _damaged("its streams are not those of the shard")
    else:
        if in_place and kept:
            for _ in _read_full(body, header, after.dtype):
                pass
        for start, block in _read_full(body, header, after.dtype):
            after[start : start + block.size] = block
    if checked and digest(after) != header.result:
        raise DeltaError("the result of a delta has another digest than its sender's; out is not valid")
    return result


def apply_chain(array: Array, deltas: Sequence[Part | bytearray], dtype: str, *, kept: bool) -> None:
    """Apply deltas in place, each to the result of the one before. The digest of the array is compared before the first
    and after the last one. Raises as `apply`. `kept`: an error of the first one leaves the array as it was.
    """
    known = None
    for number, one in enumerate(deltas, 1):
        apply(array, one, dtype, array, base_digest=known, kept=kept and known is None, checked=number == len(deltas))
        known = result_of(bytes(one[: _HEADER.size])) or known


def _flat(array: Array, dtype: str) -> Elements:
    width = shards.itemsize(dtype)
    if array.itemsize != width or not array.flags.c_contiguous:
        raise ValueError(f"a delta of {dtype} needs contiguous arrays of {width} bytes an item")
    return array.reshape(-1).view(f"<u{width}")


def _checksum(header: bytes, body: Sequence[Part]) -> int:
    hasher = xxh3_64(header[: _HEADER.size - 8])
    for part in body:
        hasher.update(part)
    return int(hasher.intdigest())


def _damaged(what: str) -> DeltaError:
    return DeltaError(f"a damaged delta: {what}; take the full version")


def _read_header(data: memoryview, dtype: str, elements: int) -> tuple[_Header, memoryview]:
    """Check all that the delta says of itself; return its header and its body."""
    if len(data) and data[0] >> 4 != _FORMAT:
        raise DeltaError(f"a delta of format {data[0] >> 4}; this program reads format {_FORMAT}")
    if len(data) < _HEADER.size:
        raise _damaged(f"it ends after {len(data)} bytes")
    header, body = _Header(*_HEADER.unpack(data[: _HEADER.size])), data[_HEADER.size :]
    if header.checksum != _checksum(bytes(data[: _HEADER.size]), [body]):
        raise _damaged("its checksum does not fit its bytes")
    if header.magic != _MAGIC or header.kind & 15 not in CODECS.values():
        raise DeltaError(f"a delta of codec {header.kind & 15}, which this program does not know")
    if (header.dtype, header.elements) != (_DTYPES.index(dtype), elements):
        named = _DTYPES[header.dtype] if header.dtype < len(_DTYPES) else f"dtype {header.dtype}"
        raise WrongBaseError(f"a delta of {header.elements} {named} for a shard of {elements} {dtype}")
    if not 0 < header.changes <= elements or header.classes not in (0, 1, CLASSES):
        raise _damaged(f"it has {header.changes} changes and {header.classes} classes")
    return header, body


# Full shards: blocks, each as it is or as byte planes with zstd.


@functools.cache
def _zstd() -> Codec:
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)


def _packed(raw: Part) -> Part:
    """Return the bytes compressed if that is shorter."""
    if len(raw) < _LEAST_PACKED:
        return raw
    packed: bytes = _zstd().compress(raw, asbytes=True)
    return packed if len(packed) < len(raw) else raw


def _unpacked(stored: memoryview, length: int) -> Part:
    """Return the bytes that `_packed` had. The caller has checked `length` against what a shard can have."""
    if len(stored) == length:
        return stored
    try:
        raw: bytes = _zstd().decompress(stored, decompressed_size=length, asbytes=True)
    except (OSError, ValueError) as error:
        raise _damaged(f"a stream cannot be decompressed ({error})") from error
    if len(raw) != length:
        raise _damaged(f"a stream has {len(raw)} bytes instead of {length}")
    return raw


def _full(new: Elements, planes: bool) -> Iterator[Part]:
    for start in range(0, new.size, _BLOCK):
        block = new[start : start + _BLOCK].view(np.uint8)
        stored: Part = block.data
        if planes:
            packed = _packed(np.ascontiguousarray(block.reshape(-1, new.itemsize).T).reshape(-1).data)
            stored = packed if len(packed) < block.size else stored
        yield _LENGTH.pack(len(stored))
        yield stored


def _read_full(
    body: memoryview, header: _Header, dtype: np.dtype[np.unsignedinteger]
) -> Iterator[tuple[int, Elements]]:
    at = 0
    for start in range(0, header.elements, _BLOCK):
        size = min(_BLOCK, header.elements - start)
        stored = body[at + 4 : at + 4 + int.from_bytes(body[at : at + 4], "little")]
        at += 4 + len(stored)
        raw = np.frombuffer(_unpacked(stored, size * dtype.itemsize), np.uint8)
        if len(stored) < raw.size:
            raw = np.ascontiguousarray(raw.reshape(dtype.itemsize, size).T).reshape(-1)
        yield start, raw.view(dtype)
    if at != len(body):
        raise _damaged("bytes follow its last block")


# Sparse shards: the index and the value of each change.


def _index_type(elements: int) -> str:
    return "<u2" if elements <= 1 << 16 else "<u4" if elements <= 1 << 32 else "<u8"


def _sparse(old: Elements, new: Elements) -> tuple[int, list[Part]]:
    places, values = bytearray(), bytearray()
    for start in range(0, old.size, _BLOCK):
        found = start + np.flatnonzero(old[start : start + _BLOCK] != new[start : start + _BLOCK])
        places += found.astype(_index_type(old.size)).tobytes()
        values += new[found].tobytes()
        if len(places) + len(values) >= _MOST * old.nbytes:
            break  # it becomes planes
    return len(values) // old.itemsize, [memoryview(places), memoryview(values)]


def _read_sparse(body: memoryview, header: _Header, dtype: np.dtype[np.unsignedinteger]) -> tuple[Array, Elements]:
    kind = np.dtype(_index_type(header.elements))
    split = header.changes * kind.itemsize
    if len(body) != split + header.changes * dtype.itemsize:
        raise _damaged(f"{len(body)} bytes are not those of {header.changes} changes")
    places = np.frombuffer(body[:split], kind)
    if int(places.max()) >= header.elements:
        raise _damaged("an index leads outside the shard")
    return places, np.frombuffer(body[split:], dtype)


# Gap codes: a table of lengths, then gaps, steps and values of each class.


def _gaps(old: Elements, new: Elements, form: Form) -> tuple[int, list[Part]]:
    streams = delta_gaps.encode(old, new, form)
    table = bytearray()
    body: list[Part] = []
    for gaps, steps, values in streams:
        packed = [_packed(stream) for stream in (gaps, steps, values)]
        lengths = (len(gaps), len(packed[0]), len(packed[1]), len(values) // new.itemsize, len(packed[2]))
        for number in (len(steps), *(lengths if steps else ())):
            table += _varint(number)
        body += packed
    return sum(len(steps) for _, steps, _ in streams), [bytes(table), *body]


def _read_gaps(body: memoryview, header: _Header, width: int) -> list[delta_gaps.Streams]:
    """Return the streams of each class. No length is believed that the shard cannot have."""
    numbers = _varints(body)
    table = []
    for _ in range(header.classes):
        changes = next(numbers)[0]
        rest = [next(numbers)[0] for _ in range(5 if changes else 0)] or [0] * 5
        table.append((changes, *rest))
        if rest[0] > changes + header.elements // 255 + 1 or rest[3] > changes:
            raise _damaged("a stream is longer than the shard allows")
    if not table or sum(row[0] for row in table) != header.changes:
        raise _damaged("its classes do not have its changes")
    at = next(numbers)[1]
    streams = []
    for changes, gap_bytes, *stored, values, stored_values in table:
        found = []
        for length, kept in zip((gap_bytes, changes, values * width), (*stored, stored_values), strict=True):
            found.append(_unpacked(body[at : at + kept], length))
            at += kept
        streams.append((found[0], found[1], found[2]))
    if at != len(body):
        raise _damaged("its length is not that of its streams")
    return streams


def _varint(number: int) -> bytes:
    """Return a number as LEB128: 7 bits a byte, the lowest first, the top bit set on all but the last."""
    groups = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def _varints(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield each number with the place where it starts."""
    at = 0
    while True:
        number, start = 0, at
        for shift in range(0, 64, 7):
            byte = data[at] if at < len(data) else 0
            number |= (byte & 127) << shift
            at += 1
            if byte < 128:
                break
        yield number, start


# The bytes of a delta beforehand.


def expected_bytes(codec: str, elements: int, width: int, changes: int) -> float:
    """Estimate the bytes of a delta from its changes, such as the last version had, within about a fifth."""
    size = elements * width
    if codec == "full" or not elements:
        return size
    if codec == "planes":
        return size * 0.75
    if codec == "sparse":
        return min(size, changes * (np.dtype(_index_type(elements)).itemsize + width))
    share = min(max(changes, 0.5) / elements, 0.999)
    positions = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share / 8
    each = positions + 0.3 * (1 + share)
    return min(size, changes * each * (0.75 if codec == "class_gap" else 1.0) + 2 * _HEADER.size)
