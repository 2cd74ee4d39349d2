"""The gap codes of deltas: the places of changes and their steps, as streams of bytes for each class of elements.

A class is a range of exponents of the *old* elements, which both sides have: small weights change far more often than
large ones, so gaps counted within a class are short and alike. With one class this is the code ``gap8z``, with 16 it is
``class_gap``. `weights.native` and numpy give the same bytes. docs/delta.md describes the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trinity_sync.weights import native
from trinity_sync.weights.native import CLASSES, Form, Stream, Streams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger]
    Places = NDArray[np.int64]

_BLOCK = 1 << 18
"""Elements that numpy takes at a time: the temporaries are a few times as large."""
_SAMPLE = 1 << 16
_ESCAPE = 255
"""A gap byte without a change: so many elements are skipped."""


@dataclass(frozen=True)
class BitForm:
    """The exponent of a floating dtype: its lowest bit and its mask. A mask of 0: integers, which have one class."""

    shift: int
    mask: int

    def of(self, top: int, classes: int) -> Form:
        return Form(self.shift, self.mask, top, self.mask > 0, classes)


FORMS = {
    "F64": BitForm(52, 0x7FF),
    "F32": BitForm(23, 0xFF),
    "BF16": BitForm(7, 0xFF),
    "F16": BitForm(10, 0x1F),
    "F8_E4M3": BitForm(3, 0xF),
    "F8_E5M2": BitForm(2, 0x1F),
}
"""By safetensors name. Any other dtype is read as integers."""
INTEGERS = BitForm(0, 0)


def top_exponent(old: Elements, form: BitForm) -> int:
    """Return the exponent of the first class: 99.9 % of a sample of the elements have no larger one."""
    sample = old[:: max(1, old.size // _SAMPLE)]
    counts = np.bincount((sample >> sample.dtype.type(form.shift)).astype(np.int64) & form.mask)
    return int(np.flatnonzero(counts.cumsum() >= 0.999 * counts.sum())[0])


def encode(old: Elements, new: Elements, form: Form) -> list[Streams]:
    """Return the streams of each class for two arrays of one unsigned dtype and size."""
    compiled = native.library()
    if compiled is not None and compiled.takes(old.itemsize):
        return compiled.encode(old, new, form)
    sinks = [_ClassWriter() for _ in range(form.classes)]
    for start in range(0, old.size, _BLOCK):
        _encode_block(old[start : start + _BLOCK], new[start : start + _BLOCK], form, sinks)
    return [sink.streams() for sink in sinks]


def decode(old: Elements, out: Elements | None, form: Form, streams: Sequence[Streams]) -> bool:
    """Write `old` with the changes to `out`, which may be `old`; None: only check. Returns whether the streams were
    complete and led to no place outside the array; else `out` is of no use.
    """
    if any(len(gaps) and gaps[-1] == _ESCAPE for gaps, _, _ in streams):
        return False  # nothing follows the last change
    compiled = native.library()
    if compiled is not None and compiled.takes(old.itemsize):
        return compiled.decode(old, out, form, streams)
    sources = [_ClassReader(*of_class, old.dtype) for of_class in streams]
    for start in range(0, old.size, _BLOCK):
        block = old[start : start + _BLOCK]
        target = None if out is None else out[start : start + _BLOCK]
        places = _classes(block, form)
        if target is not None and target.ctypes.data != block.ctypes.data:
            target[:] = block
        for source, members in zip(sources, places, strict=True):
            if not source.change(block, target, members, form):
                return False
    return all(source.ended() for source in sources)


def ordered(bits: Elements, form: Form) -> Elements:
    """Return integers of the same width in the order of the values: of negative floats all bits but the sign are
    flipped. This is its own inverse, so every bit pattern has exactly one.
    """
    if not form.floating:
        return bits
    kind, width = bits.dtype.type, 8 * bits.itemsize
    return bits ^ (bits >> kind(width - 1)) * kind((1 << width - 1) - 1)


def _classes(block: Elements, form: Form) -> Iterator[NDArray[np.bool_] | None]:
    """Yield which elements of a block are of each class. None: all of them."""
    if form.classes == 1:
        yield None
        return
    exponents = (block >> block.dtype.type(form.shift)).astype(np.int16) & np.int16(form.mask)
    classes = np.clip(form.top - exponents, 0, CLASSES - 1).astype(np.uint8)
    for number in range(CLASSES):
        yield classes == number


class _ClassWriter:
    """The streams of one class, as they grow."""

    def __init__(self) -> None:
        self._gaps, self._steps, self._values = bytearray(), bytearray(), bytearray()
        self._skipped = 0  # elements since the last change

    def add(self, ranks: Places, total: int, steps: NDArray[np.int8], values: Elements) -> None:
        """Add the changes of a block: their ranks among the `total` elements of the class."""
        if not ranks.size:
            self._skipped += total
        else:
            gaps = np.diff(ranks, prepend=-1 - self._skipped) - 1
            escapes = gaps // _ESCAPE
            ends = np.cumsum(escapes + 1) - 1
            coded = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
            coded[ends] = gaps % _ESCAPE
            self._gaps += coded.data
            self._steps += steps.data.cast("B")
            self._values += values.tobytes()
            self._skipped = total - 1 - int(ranks[-1])

    def streams(self) -> Streams:
        return bytes(self._gaps), bytes(self._steps), bytes(self._values)


def _encode_block(old: Elements, new: Elements, form: Form, sinks: Sequence[_ClassWriter]) -> None:
    places = np.flatnonzero(old != new)
    after = new[places]
    differences = (ordered(after, form) - ordered(old[places], form)).view(f"i{old.itemsize}")
    far = (differences < -128) | (differences > 127)
    steps = np.where(far, 0, differences).astype(np.int8)
    for sink, members in zip(sinks, _classes(old, form), strict=True):
        if members is None:
            sink.add(places, old.size, steps, after[far])
        elif total := int(np.count_nonzero(members)):
            mine = members[places]
            sink.add(_ranks(members, places[mine]), total, steps[mine], after[mine & far])


def _ranks(members: NDArray[np.bool_], places: Places) -> Places:
    """Return how many members lie before each of the places."""
    if not places.size:
        return places
    bits = np.zeros(-(-members.size // 64) * 8, np.uint8)
    packed = np.packbits(members, bitorder="little")
    bits[: packed.size] = packed
    words = bits.view("<u8")
    before = np.concatenate(([0], np.cumsum(np.bitwise_count(words), dtype=np.int64)))
    masks = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    found: Places = before[places >> 6] + np.bitwise_count(words[places >> 6] & masks)
    return found


class _ClassReader:
    """The streams of one class, as they are read."""

    def __init__(self, gaps: Stream, steps: Stream, values: Stream, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._gaps, self._steps = np.frombuffer(gaps, np.uint8), np.frombuffer(steps, np.int8)
        self._values = np.frombuffer(values, dtype)
        self._gap = self._step = self._value = 0
        self._start = 0  # the place behind the gap bytes that were read, from the next block; never above 0
        self._window = 64

    def change(self, old: Elements, out: Elements | None, members: NDArray[np.bool_] | None, form: Form) -> bool:
        """Make the changes of a block; False where a stream is too short."""
        if self._gap == self._gaps.size:
            return True
        ranks = self._ranks(old.size if members is None else int(np.count_nonzero(members)))
        steps = self._steps[self._step : self._step + ranks.size]
        far = np.flatnonzero(steps == 0)
        values = self._values[self._value : self._value + far.size]
        self._step += ranks.size
        self._value += far.size
        if steps.size < ranks.size or values.size < far.size:
            return False
        if out is not None and ranks.size:
            places = ranks if members is None else np.flatnonzero(members)[ranks]
            changed = ordered(ordered(old[places], form) + steps.astype(old.dtype), form)
            changed[far] = values
            out[places] = changed
        return True

    def _ranks(self, total: int) -> Places:
        """Return the ranks of the changes among the next `total` elements of the class."""
        while True:
            read = self._gaps[self._gap : self._gap + self._window]
            ends = self._start + np.cumsum(read.astype(np.int64) + (read < _ESCAPE))
            if ends[-1] > total or read.size < self._window:
                break
            self._window *= 2
        used = int(np.searchsorted(ends, total, side="right"))
        ranks: Places = ends[:used][read[:used] < _ESCAPE] - 1
        self._start = (int(ends[used - 1]) if used else self._start) - total
        self._gap += used
        self._window = max(64, used + used // 4)
        return ranks

    def ended(self) -> bool:
        return (self._gap, self._step, self._value) == (self._gaps.size, self._steps.size, self._values.size)
