"""The compiled library of row digests and gap codes: plain C (native.c), loaded with ctypes, which frees the
interpreter's lock during a call. `hatch_build.py` builds it with the package.

Without it (no compiler, another machine, ``TRINITY_SYNC_PURE=1``) numpy and xxhash give the same bytes. `library`
returns None then, and `state` says why.
"""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

FILE = Path(__file__).with_name("native.so")
CLASSES = 16
_INSTEAD = "numpy and xxhash do its work: "
_WIDEST = 512
_ROOM = 1 << 15
"""Bytes or values of a stream that an encoder writes before they are taken from it: such buffers stay in the cache."""


_size = ctypes.c_uint64


class Form(ctypes.Structure):
    """How the bits of an element are read. The exponent is ``bits >> shift & mask``; a class is how far it lies below
    `top`.
    """

    _fields_ = [(name, ctypes.c_int32) for name in ("shift", "mask", "top", "floating", "classes")]

    def __init__(self, shift: int, mask: int, top: int, floating: bool, classes: int) -> None:
        super().__init__(shift, mask, top, int(floating), classes)


class _OutputStreams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gaps", "steps", "values")),
        *((name, ctypes.c_uint64) for name in ("gap_bytes", "changes", "value_count", "room")),
        ("skipped", ctypes.c_int64),
    ]


class _InputStreams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gap", "gaps_end", "step", "steps_end", "value", "values_end")),
        ("ahead", ctypes.c_uint64),
    ]


Stream = bytes | memoryview
Streams = tuple[Stream, Stream, Stream]
"""The gaps, steps and values of one class; docs/delta.md."""


class NativeLibrary:
    """The functions of the library. Arrays are contiguous, of the machine's byte order, and may lie at any address."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises OSError or AttributeError: not loadable, of other sources, or wrong here."""
        found = ctypes.CDLL(str(path))
        found.ts_sources.restype = ctypes.c_uint32
        sources = b"".join(source.read_bytes() for source in sorted(FILE.parent.glob("*.[ch]")))
        if found.ts_sources() != zlib.crc32(sources):
            raise OSError(f"{path.name} is of other sources")
        self._row_digests = found.ts_row_digests
        self._row_digests.restype = None
        self._row_digests.argtypes = [ctypes.c_void_p, _size, _size, ctypes.c_uint32, ctypes.c_void_p]
        self._encoders: dict[int, Callable[..., int]] = {}
        self._decoders: dict[int, Callable[..., int]] = {}
        for width in (1, 2, 4):
            encode, decode = getattr(found, f"ts_encode{8 * width}"), getattr(found, f"ts_decode{8 * width}")
            encode.restype = _size
            for function in (encode, decode):
                function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, _size, ctypes.c_void_p, ctypes.c_void_p]
            self._encoders[width], self._decoders[width] = encode, decode
        for length in (3, 8, 16, 128, 240, 1100):  # nothing else finds a wrong digest; wrong deltas are found by theirs
            matrix = np.arange(2 * length).astype(np.uint8).reshape(2, length)
            if self.row_digests(matrix) != b"".join(xxh3_128_digest(row.data) for row in matrix):
                raise OSError(f"{path.name} digests wrongly on this machine")

    def row_digests(self, matrix: NDArray[np.uint8], vectors: int = _WIDEST) -> bytes:
        """Return the concatenated digests of the rows of a uint8 matrix. `vectors`: the most bits of a vector; for
        tests.
        """
        rows, length = matrix.shape
        matrix = np.ascontiguousarray(matrix)
        found = np.empty(rows * 16, np.uint8)
        self._row_digests(_at(matrix), rows, length, vectors, _at(found))
        return found.tobytes()

    def takes(self, width: int) -> bool:
        """Whether elements of this width in bytes can be coded."""
        return width in self._encoders

    def encode(self, old: NDArray[np.unsignedinteger], new: NDArray[np.unsignedinteger], form: Form) -> list[Streams]:
        """Return the streams of each class."""
        width, done = old.itemsize, 0
        gaps, steps = (np.empty((form.classes, _ROOM), np.uint8) for _ in range(2))
        values = np.empty((form.classes, _ROOM * width), np.uint8)
        parts = [(bytearray(), bytearray(), bytearray()) for _ in range(form.classes)]
        sinks = (_OutputStreams * form.classes)()
        for number, sink in enumerate(sinks):
            sink.gaps, sink.steps, sink.values = (_at(buffer[number]) for buffer in (gaps, steps, values))
            sink.room = _ROOM
        while done < old.size:
            here = (_at(array) + done * width for array in (old, new))
            done += self._encoders[width](*here, old.size - done, ctypes.byref(form), sinks)
            for number, (sink, kept) in enumerate(zip(sinks, parts, strict=True)):
                kept[0].extend(gaps[number, : sink.gap_bytes].data)
                kept[1].extend(steps[number, : sink.changes].data)
                kept[2].extend(values[number, : sink.value_count * width].data)
                sink.gap_bytes = sink.changes = sink.value_count = 0
        for gap, _, _ in parts:
            del gap[len(gap.rstrip(b"\xff")) :]
        return [(memoryview(gap), memoryview(step), memoryview(value)) for gap, step, value in parts]

    def decode(
        self,
        old: NDArray[np.unsignedinteger],
        out: NDArray[np.unsignedinteger] | None,
        form: Form,
        streams: Sequence[Streams],
    ) -> bool:
        """Write `old` with the changes of the streams to `out`, which may be `old`; None: only check the streams.
        Returns whether they were complete.
        """
        held = [tuple(np.frombuffer(stream, np.uint8) for stream in of_class) for of_class in streams]
        ends = [[bound for one in of_class for bound in (_at(one), _at(one) + one.size)] for of_class in held]
        sources = (_InputStreams * form.classes)(*(_InputStreams(*bounds) for bounds in ends))
        target = None if out is None else _at(out)
        return not self._decoders[old.itemsize](_at(old), target, old.size, ctypes.byref(form), sources)


def _at(array: NDArray[np.unsignedinteger]) -> int:
    return int(array.ctypes.data)


def library() -> NativeLibrary | None:
    """Return the library; None: numpy and xxhash do the work."""
    return _loaded()[0]


def state() -> str:
    """Return in a few words what does the work; for ``trinity-sync doctor``."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[NativeLibrary | None, str]:
    if os.environ.get("TRINITY_SYNC_PURE"):
        return None, f"{_INSTEAD}TRINITY_SYNC_PURE is set"
    if not FILE.exists():
        return None, f"{_INSTEAD}it is not built; install a C compiler and then the package again"
    try:
        return NativeLibrary(FILE), "row digests and deltas in C"
    except (OSError, AttributeError) as error:
        return None, f"{_INSTEAD}it cannot be loaded ({error}); install the package again"
