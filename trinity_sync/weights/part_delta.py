"""The delta of a part between two versions: `PartEncoder` on the side where both lie beside each other, `PartDelta` at
a reader; and which deltas lead to a version (`VersionIndex`, `find_route`).

A part is cut into pieces of one dtype (`PartLayout.by_shard`), each with a delta of its own. A reader that missed
versions takes merged deltas: the encoder makes one for each span of `SPANS` versions as well. docs/delta.md has the
format.
"""

from __future__ import annotations

import heapq
import itertools
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128

from trinity_sync.host.durable import replace_file
from trinity_sync.weights import delta, native
from trinity_sync.weights.delta import DeltaError, Part, WrongBaseError
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shards import itemsize, layer_of

if TYPE_CHECKING:
    from trinity_sync.weights.delta_gaps import Elements, Places

Point = tuple[int, int]
"""A version: (attempt, step)."""

Step = tuple[Point, Point]
"""Two versions, from and to which a delta leads."""

SPANS = (4, 16)
"""Lengths in versions of the merged deltas. A reader that is k versions behind needs 12 + k / 16 deltas or fewer."""

_HEAD = struct.Struct("<4s16s16s4Q")
"""Magic, digest of what follows the digest, digest of the layout, the versions from and to."""
_MAGIC = b"TSP1"
_DIGESTED = 20
_TABLE = np.dtype([("length", "<u8"), ("result", "V16")])
_MOST_LOGGED = 1 / 8
"""Share of a part's bytes from which on a span is given up: its log costs too much memory."""


class EncodedDelta(NamedTuple):
    """The delta of a part from one version to the encoder's newest."""

    start: Point
    parts: list[Part]  # to be written one after another, before the newest segment changes
    changed: Mapping[str, int]  # elements by `layer_group`; of a span those that changed at some version in it


class _PieceDelta(NamedTuple):
    parts: list[Part]
    result: bytes
    changed: int


class _Span:
    """The elements that changed since `start`, by piece: their places, ascending, and their bits at `start`. Once the
    log has more than `most` bytes, it is not complete.
    """

    def __init__(self, start: Point, digests: list[bytes], most: float) -> None:
        self.start = start
        self.digests = digests
        self.logs: dict[int, tuple[Elements, Elements]] = {}
        self.nbytes, self.most = 0, most
        self._lock = threading.Lock()

    def note(self, number: int, old: Elements, places: Places) -> None:
        """Note the places of a piece that change now, in which it had the bits of `old`. Any thread."""
        if self.nbytes > self.most:
            return
        if (known := self.logs.get(number)) is not None:
            places = places[~np.isin(places, known[0], assume_unique=True)]
        fresh = places.astype(np.min_scalar_type(old.size)), old[places]
        with self._lock:
            self.nbytes += sum(one.nbytes for one in fresh)
        if known is not None:
            joined = [np.concatenate(pair) for pair in zip(known, fresh, strict=True)]
            order = np.argsort(joined[0], kind="stable")
            fresh = joined[0][order], joined[1][order]
        self.logs[number] = fresh


class PartEncoder:
    """Encodes the versions of one part, each against the one before.

    It keeps the digests of the last version's pieces and the logs of the open spans, at most an eighth of the part for
    each length; the versions themselves stay where the caller has them. `codec`: a name of `delta.CODECS`, or ``auto``:
    that of the fewest bytes, ``class_gap``, or ``gap8z`` without the native library. `spans`: lengths in versions of
    the merged deltas.
    """

    def __init__(self, layout: PartLayout, codec: str, spans: Sequence[int] = SPANS) -> None:
        self._layout = layout
        self.codec = codec if codec != "auto" else "class_gap" if native.library() is not None else "gap8z"
        self._lengths = spans
        self._last: Point | None = None
        self._digests: list[bytes] = []
        self._count, self._most = 0, _MOST_LOGGED * layout.nbytes
        self._spans: dict[int, _Span] = {}
        self.elements = Counter[str]()  # of the part, by `layer_group`
        self._groups: list[str] = []  # of the pieces
        for name, _, numel, start, end in layout.table:
            self.elements[layer_group(name)] += numel
            self._groups += [layer_group(name)] * len(range(start, end, layout.bucket_bytes))

    def encode(
        self, base: Point, version: Point, segments: tuple[Segment, Segment], pool: Executor
    ) -> list[EncodedDelta]:
        """Return the deltas that end at `version`: the one from `base`, and those of the spans that end here. `base`,
        `version`: where `base` is not the version of the last call, spans begin anew. `segments`: the part's bytes of
        both. They do not change during the call. `pool`: encodes the pieces.
        """
        old, new = (_arrays(self._layout, segment) for segment in segments)
        if base != self._last:
            self._count, self._digests = 0, list(pool.map(delta.digest, old))
            self._spans = {length: _Span(base, self._digests, self._most) for length in self._lengths}
        self._last = None  # after an error the next call begins anew
        pieces = list(pool.map(self._piece, range(len(old)), old, new))
        self._count, self._digests = self._count + 1, [piece.result for piece in pieces]
        found = [self._joined(base, version, pieces)]
        for length, span in self._spans.items():
            if self._count % length == 0:
                if span.nbytes <= span.most:
                    merged = list(pool.map(self._merged, [span] * len(new), range(len(new)), new))
                    found.append(self._joined(span.start, version, merged))
                self._spans[length] = _Span(version, self._digests, self._most)
        self._last = version
        return found

    def encode_from(
        self, base: Point, read: Callable[[int, memoryview], object], segment: Segment, pool: Executor
    ) -> EncodedDelta:
        """Return the delta from an older version to that of the last `encode`. `read`: copies the older bytes from a
        place on. `segment`, `pool`: as of `encode`.
        """
        assert self._last is not None, "a version was encoded"
        version, pieces = self._last, self._layout.by_shard

        def piece(number: int, new: Elements) -> _PieceDelta:
            old = np.empty_like(new)
            read(pieces[number][0], old.view(np.uint8).data)
            return self._over(old, number, new)

        return self._joined(base, version, list(pool.map(piece, range(len(pieces)), _arrays(self._layout, segment))))

    def _piece(self, number: int, old: Elements, new: Elements) -> _PieceDelta:
        known, dtype = self._digests[number], self._layout.by_shard[number][2]
        parts = delta.encode(old, new, dtype, self.codec, base_digest=known)
        result = delta.result_of(parts[0])
        if result is None:
            return _PieceDelta(parts, known, 0)
        places = np.flatnonzero(old != new)
        for span in self._spans.values():
            span.note(number, old, places)
        return _PieceDelta(parts, result, len(places))

    def _merged(self, span: _Span, number: int, new: Elements) -> _PieceDelta:
        places, bits = span.logs.get(number, (np.empty(0, np.uint8), new[:0]))
        before = new.copy()
        before[places] = bits
        return self._over(before, number, new, span.digests[number])._replace(changed=len(places))

    def _over(self, old: Elements, number: int, new: Elements, base: bytes | None = None) -> _PieceDelta:
        dtype, result = self._layout.by_shard[number][2], self._digests[number]
        return _PieceDelta(delta.encode(old, new, dtype, self.codec, base_digest=base, result_digest=result), result, 0)

    def _joined(self, start: Point, version: Point, pieces: list[_PieceDelta]) -> EncodedDelta:
        rows = [(sum(map(len, piece.parts)), piece.result) for piece in pieces]
        body: list[Part] = [np.array(rows, _TABLE).tobytes(), *(part for piece in pieces for part in piece.parts)]
        layout = bytes.fromhex(self._layout.digest)
        hasher = xxh3_128(_HEAD.pack(_MAGIC, b"", layout, *start, *version)[_DIGESTED:])
        for part in body:
            hasher.update(part)
        head = _HEAD.pack(_MAGIC, hasher.digest(), layout, *start, *version)
        changed = Counter[str]()
        for group, piece in zip(self._groups, pieces, strict=True):
            changed[group] += piece.changed
        return EncodedDelta(start, [head, *body], changed)


def layer_group(name: str) -> str:
    """Return the group in which the changes of a tensor are counted: the number of its layer; of a tensor without one
    ``embeddings``, ``head``, or ``others``, such as the last norm.
    """
    if (layer := layer_of(name)) >= 0:
        return str(layer)
    return "embeddings" if "emb" in name else "head" if "head" in name else "others"


class PartDelta:
    """The delta of a part, read. `name`: for messages. `step`: what it has to lead from and to.

    Attributes:
        start, end: the versions that it leads from and to.
        digests: of the pieces of the newer one.
        pieces: the delta of each piece; None: it has not changed.

    Raises:
        DeltaError: it is damaged, or of another format; WrongBaseError: of another layout, or between other versions.
    """

    def __init__(self, layout: PartLayout, data: bytes | memoryview, name: str, step: Step | None = None) -> None:
        if data[: len(_MAGIC)] != _MAGIC:
            raise DeltaError(f"{name} is no delta of a part, or one of another format")
        if len(data) < _HEAD.size or xxh3_128(memoryview(data)[_DIGESTED:]).digest() != data[4:_DIGESTED]:
            raise DeltaError(f"{name} is damaged: its digest is not that of its bytes")
        _, _, named, *points = _HEAD.unpack_from(data)
        if named.hex() != layout.digest:
            raise WrongBaseError(f"{name} has layout {named.hex()}, and {layout.part} has {layout.digest}")
        self.start, self.end = (points[0], points[1]), (points[2], points[3])
        if step not in (None, (self.start, self.end)):
            raise WrongBaseError("{} leads from version {}-{} to {}-{}".format(name, *points))
        table = np.frombuffer(data, _TABLE, len(layout.by_shard), _HEAD.size)
        self.digests = [bytes(result) for result in table["result"]]
        ends = [int(end) for end in np.cumsum([_HEAD.size + table.nbytes, *table["length"]])]
        pieces = [memoryview(data)[at:end] for at, end in itertools.pairwise(ends)]
        self.pieces = [piece if len(piece) > 1 else None for piece in pieces]

    @classmethod
    def read(cls, path: Path, layout: PartLayout, step: Step) -> PartDelta:
        """Read it from a file. Errors as above, also for a file that cannot be read."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DeltaError(f"{path} cannot be read: {error.strerror}") from error
        return cls(layout, data, str(path), step)

    def apply(
        self,
        layout: PartLayout,
        segment: Segment,
        pool: Executor,
        after: PartDelta | None = None,
        *,
        checked: bool = True,
    ) -> None:
        """Make the newer version of a part in place; after a DeltaError it is neither of the two. `after`: the delta
        that was applied last, whose result is not digested once more. `checked`: False: digests of the result are not
        compared, as more deltas follow.
        """

        def change(number: int, piece: Elements, delta_of: Part | None, dtype: str) -> None:
            known = None if after is None else after.digests[number]
            if delta_of is not None:
                delta.apply(piece, delta_of, dtype, piece, base_digest=known, kept=False, checked=checked)
            elif checked and known is not None and delta.digest(piece) != self.digests[number]:
                raise DeltaError(f"piece {number} of part {layout.part} has another digest than its sender's")

        dtypes = (dtype for *_, dtype in layout.by_shard)
        given = zip(_arrays(layout, segment), self.pieces, dtypes, strict=True)
        changes = [pool.submit(change, number, *one) for number, one in enumerate(given)]
        wait(changes)  # also after an error: the caller may use the segment again
        for one in changes:
            one.result()


def apply_steps(
    layout: PartLayout,
    segment: Segment,
    steps: Sequence[Step],
    file_of: Callable[[str, Step], Path],
    pool: Executor,
    *,
    each: bool = False,
) -> Iterator[Step]:
    """Yield each step, then apply its delta, from its file, to a part in place. Digests are compared before the first
    and after the last, with `each` also in between. Errors are those of the step that came last.
    """
    before: PartDelta | None = None
    for step in steps:
        yield step
        read = PartDelta.read(file_of(layout.part, step), layout, step)
        read.apply(layout, segment, pool, before, checked=each or step == steps[-1])
        before = read


def _arrays(layout: PartLayout, segment: Segment) -> list[Elements]:
    """Return the pieces of a segment as integers that hold the bits of their elements."""
    view = layout.view(segment)
    return [np.frombuffer(view[start:stop], f"<u{itemsize(dtype)}") for start, stop, dtype in layout.by_shard]


# The folder of a version in that of all deltas: the files of the deltas that end there, and what names them.


KEPT_SPANS = (1, min(SPANS))
"""Lengths of the deltas that a history keeps, besides those from a base."""
FROM_BASE_EVERY = max(SPANS)
"""Versions of a history from one that has a delta from its base to the next."""

_INDEX_FORMAT = 1


class VersionIndex(NamedTuple):
    """What leads to a version; the contents of its `protocol.parts.INDEX` and `HISTORY`."""

    full: str | None  # folder of the full version, below that of the checkpoints
    deltas: Sequence[tuple[Point, int]]  # where each begins, and bytes of all of its parts
    digest: str | None = None  # of the version, in a history; None: it has none

    def write(self, path: Path, *, durable: bool) -> None:
        deltas = [[*start, nbytes] for start, nbytes in self.deltas]
        body = {"format": _INDEX_FORMAT, "full": self.full, "deltas": deltas}
        body |= {} if self.digest is None else {"digest": self.digest}
        replace_file(path, json.dumps(body) + "\n", durable=durable)

    @classmethod
    def read(cls, path: Path) -> VersionIndex:
        """Read it; DeltaError: it is gone, damaged or of another format."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            full, digest = (None if body.get(key) is None else str(body[key]) for key in ("full", "digest"))
            deltas = [((int(attempt), int(step)), int(nbytes)) for attempt, step, nbytes in body["deltas"]]
            if body["format"] != _INDEX_FORMAT or {"..", "/"} & set(Path(full or "").parts):
                raise ValueError(f"format {body['format']}, full version in {full}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise DeltaError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        return cls(full, deltas, digest)


class Route(NamedTuple):
    """The way to a version: the deltas that begin at these versions, over the first of them or over a full one."""

    starts: tuple[Point, ...]
    full: tuple[Point, str] | None  # and its folder, see `VersionIndex`

    def steps(self, version: Point) -> list[Step]:
        """Return from where to where each delta leads, on the way to a version."""
        return list(itertools.pairwise((*self.starts, version)))


def find_route(
    version: Point,
    held: Point | None,
    full_bytes: int,
    index_of: Callable[[Point], VersionIndex | None],
    most: float | None = None,
) -> Route | None:
    """Return the route of the fewest bytes to a version, from the held version or from a full one (`full_bytes`); None
    if there is none within `most` bytes. `index_of`: returns what leads to a version, None if nothing does. `most`:
    None: the bytes of two full versions.
    """
    most = 2 * full_bytes if most is None else most
    todo: list[tuple[int, Point, Route]] = [(0, version, Route((), None))]
    done = set[Point]()
    while todo:
        nbytes, at, route = heapq.heappop(todo)
        if nbytes > most:
            break
        if at == held or route.full is not None:
            return route
        if at in done or (index := index_of(at)) is None:
            continue
        done.add(at)
        if index.full is not None:
            heapq.heappush(todo, (nbytes + full_bytes, at, Route(route.starts, (at, index.full))))
        for start, more in index.deltas:
            heapq.heappush(todo, (nbytes + more, start, Route((start, *route.starts), None)))
    return None
