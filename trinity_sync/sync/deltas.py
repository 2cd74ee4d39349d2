"""Versions as deltas: the folder of a version, the cheapest way from one version to another, and an explorer's half.

A version's folder has `index.json`, the deltas that end at the version, and the name of its full form where there is
one. A reader goes backwards from the version that it wants, until it meets the one that it holds or a full one. It
reads and checks all files of that way before it changes anything, and then takes the version piece by piece: old bits,
the deltas one after another, new bits. Whatever is wrong with the way, the loader's second try takes the full version,
which the node agents write from the leased slot.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from trinity_sync.actors.agent_client import DeltaFile, WrittenDelta
from trinity_sync.actors.calls import results
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.logs import story
from trinity_sync.protocol.parts import shard_file
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Bucket, ExplorerSide, FindDestination, Places, Transport
from trinity_sync.weights import delta
from trinity_sync.weights.delta import DeltaError, WrongBaseError
from trinity_sync.weights.layout import Cut, PartLayout
from trinity_sync.weights.part_delta import PartDelta
from trinity_sync.weights.shard_file import ShardFile
from trinity_sync.weights.shards import itemsize

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from trinity_sync.sync.arrivals import SharedSegment

_INDEX = "index.json"
_FORMAT = 1


def version_folder(root: Path, version: Version) -> Path:
    """Return the folder of a version below that of all deltas."""
    return root / f"{version.attempt}-{version.step}"


def folder_version(folder: Path) -> Version | None:
    """Return the version of a folder; None: it is not one of `version_folder`."""
    attempt, _, step = folder.name.partition("-")
    return Version(int(attempt), int(step)) if attempt.isdecimal() and step.isdecimal() else None


class Way(NamedTuple):
    """One delta of all parts: where it begins, and its files by part."""

    start: Version
    folder: Path
    files: Mapping[str, DeltaFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())


def ways_of(written: Sequence[WrittenDelta], folder: Path, parts: set[str]) -> list[Way]:
    """Return the deltas of a version that all parts have."""
    found: dict[tuple[int, int], dict[str, DeltaFile]] = {}
    for one in written:
        found.setdefault(one.start, {})[one.file.part] = one.file
    return [Way(Version(*start), folder, files) for start, files in found.items() if files.keys() == parts]


@dataclass(frozen=True)
class VersionIndex:
    """What a version's folder says: the deltas that end there and, where the version was also written in full, the path
    of that folder below the checkpoints'.
    """

    ways: Sequence[Way]
    full: str | None

    @classmethod
    def read(cls, folder: Path) -> VersionIndex:
        """Read it; DeltaError: it is gone or damaged."""
        try:
            found = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            if found["format"] != _FORMAT:
                raise DeltaError(f"{folder / _INDEX} has format {found['format']}; this program reads {_FORMAT}")
            ways = [
                Way(
                    Version(*one["from"]), folder, {part: DeltaFile(part, *file) for part, file in one["files"].items()}
                )
                for one in found["deltas"]
            ]
            named = [file.name for way in ways for file in way.files.values()]
            if any(Path(name).name != name for name in named) or ".." in Path(found["full"] or "").parts:
                raise ValueError("it names files of other folders")
            return cls(ways, found["full"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeltaError(f"{folder / _INDEX} cannot be read: {type(error).__name__}: {error}") from error

    def write(self, folder: Path, *, durable: bool) -> None:
        deltas = [
            {"from": way.start, "files": {part: file[1:4] for part, file in way.files.items()}} for way in self.ways
        ]
        found = {"format": _FORMAT, "full": self.full, "deltas": deltas}
        replace_file(folder / _INDEX, json.dumps(found) + "\n", durable=durable)


class Route(NamedTuple):
    """What leads to a version: deltas in order, on the held version or on a full one."""

    ways: Sequence[Way]
    full: tuple[Version, Path] | None


def find_route(folder: Path, version: Version, held: Version | None, full_bytes: int) -> Route | None:
    """Return the route of the fewest bytes to the version of a folder; None: no files lead there.

    Args:
        held: where a route may begin beside full versions; None: the reader holds none.
        full_bytes: size of a full version.
    """
    todo: list[tuple[int, int, Version, Route]] = [(0, 0, version, Route((), None))]
    done, count = set[Version](), 0
    while todo:
        nbytes, _, at, route = heapq.heappop(todo)
        if at == held or route.full is not None:
            return route
        if at in done:
            continue
        done.add(at)
        with contextlib.suppress(DeltaError):  # removed, or damaged: another way may lead there
            index = VersionIndex.read(version_folder(folder.parent, at))
            before = [(way.nbytes, way.start, Route((way, *route.ways), None)) for way in index.ways]
            if index.full is not None and (folder.parent.parent / index.full).is_dir():
                before.append((full_bytes, at, Route(route.ways, (at, folder.parent.parent / index.full))))
            for more, start, found in before:
                count += 1
                heapq.heappush(todo, (nbytes + more, count, start, found))
    return None


class DeltaTransport:
    """An explorer's half: takes versions over the version that its destinations hold (a `Transport`).

    Where the destinations are not `Places`, whose bits can be read back, each load begins with a full version.

    Args:
        full: reads the folder of a full version.
    """

    def __init__(self, side: ExplorerSide, full: Transport) -> None:
        self._side = side
        self._full = full
        self._held: Version | None = None
        self._tried: Version | None = None
        self._buffer = np.empty(0, np.uint8)

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        assert lease.location is not None, "each version has a folder"
        held, self._held = self._held if isinstance(find_destination, Places) else None, None
        again, self._tried = self._tried == lease.version, lease.version
        folder, full_bytes = Path(lease.location), sum(info.nbytes for info in lease.parts.values())
        route = None if again else find_route(folder, lease.version, held, full_bytes)
        if route is None:
            story.info("asks for version %s in full", lease.version)
            yield from self._asked(lease, find_destination)
        else:
            try:
                yield from self._follow(lease, route, find_destination)
            except RunError as error:  # whatever it is, the second try does without these files
                raise error if isinstance(error, DeltaError) else DeltaError(str(error)) from error
        self._held = lease.version

    def _follow(self, lease: Lease, route: Route, find_destination: FindDestination) -> Generator[Bucket, None, None]:
        if route.full is not None and not route.ways:
            yield from self._full.buckets(replace(lease, location=str(route.full[1])), None, find_destination)
            return
        layouts = {name: self._side.layouts.get(info) for name, info in sorted(lease.parts.items())}
        deltas = {name: [_read(way, layout) for way in route.ways] for name, layout in layouts.items()}
        with ExitStack() as opened:
            go_on: Callable[[], None] = _nothing
            files: dict[str, ShardFile] = {}
            if route.full is not None:
                version, folder = route.full
                if self._side.lease_folder is not None:
                    go_on = opened.enter_context(self._side.lease_folder(folder, version))
                for name, layout in layouts.items():
                    files[name] = opened.enter_context(ShardFile(folder / shard_file(name)))
                    if not files[name].layout.lies_as(layout):
                        raise DeltaError(f"{files[name].path} has another layout than version {lease.version}")
            for name, layout in layouts.items():
                checks = lease.parts[name].buckets is not None
                source = _Source(find_destination, files.get(name), deltas[name], self._room)
                for number in range(len(layout.by_shard)):
                    go_on()
                    yield source.piece(layout, number, checks=checks)

    def _room(self, nbytes: int) -> NDArray[np.uint8]:
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def _asked(self, lease: Lease, find_destination: FindDestination) -> Generator[Bucket, None, None]:
        """Have the agents write the leased slot, and read that."""
        folder = Path(str(lease.location)) / f"full-{self._side.name}"
        nodes = sorted({info.node for info in lease.parts.values()})
        calls = [self._side.agents[node].write(lease.slot, str(folder), {}, fsync=False) for node in nodes]
        try:
            results(calls, self._side.timeout_s, f"write version {lease.version} in full")
            here = replace(lease, location=str(folder))
            yield from self._full.buckets(here, None, find_destination)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _read(way: Way, layout: PartLayout) -> PartDelta:
    """Read the delta of a part, and check that it is the one that was written."""
    file = way.files[layout.part]
    path = way.folder / file.name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DeltaError(f"{path} cannot be read: {error.strerror}") from error
    if (len(data), xxh3_128_hexdigest(data)) != (file.nbytes, file.digest):
        raise DeltaError(f"{path} is damaged: it has other bytes than were written")
    found = PartDelta(layout, data)
    if found.start != way.start:
        raise WrongBaseError(f"{path} is a delta of version {Version(*found.start)} instead of {way.start}")
    return found


class _Source:
    """The pieces of one part: from its file of a full version, or from the destinations.

    Args:
        room: returns memory for a piece that cannot be made in its destination.
    """

    def __init__(
        self,
        places: FindDestination,
        file: ShardFile | None,
        deltas: Sequence[PartDelta],
        room: Callable[[int], NDArray[np.uint8]],
    ) -> None:
        self._places = places
        self._file = file
        self._deltas = deltas
        self._room = room

    def piece(self, layout: PartLayout, number: int, *, checks: bool) -> Bucket:
        """Return a piece of the newest version, in its destination where it can be made there.

        Args:
            checks: compare also a piece that no delta changes.
        """
        start, stop, dtype = layout.by_shard[number]
        changes = [change for one in self._deltas if (change := one.piece(number)) is not None]
        moved = sum(map(len, changes)) + (stop - start if self._file is not None else 0)
        here = Bucket(layout, number, None, None, "shard", moved)
        if not changes and self._file is None and not checks:
            return here
        place = self._places(layout, number, "shard")
        direct = place is not None and not place.is_cuda
        buffer = place.numpy() if place is not None and direct else self._room(stop - start)
        if self._file is not None:
            self._file.read(start, buffer.data)
        elif not direct:
            assert isinstance(self._places, Places), "a route without a full version begins at what they hold"
            self._places.read(layout, number, "shard", buffer.data)
        bits = buffer.view(f"<u{itemsize(dtype)}")
        for change in changes:
            delta.apply(bits, change, dtype, bits)
        if checks and not changes and delta.digest(bits) != self._deltas[-1].digests[number]:
            raise DeltaError(f"piece {number} of part {layout.part} is damaged: it differs from the published one")
        return here if direct else here._replace(data=buffer.data)


def _nothing() -> None:
    """Renew nothing, where the folder needs no lease."""


class DeltaCopies:
    """Copies of all parts for workers that map them, over which an explorer takes deltas; see `SyncMode.copies`."""

    def __init__(self, side: ExplorerSide, transport: DeltaTransport) -> None:
        self._side = side
        self._transport = transport
        self._segments: dict[str, SharedSegment] = {}

    def localize(self, lease: Lease) -> Lease:
        """Take the version, and return the lease with its parts named by the copies."""
        from trinity_sync.sync.arrivals import SharedSegment
        from trinity_sync.weights.apply import check_bytes

        maps = {}
        for name, info in lease.parts.items():
            layout = self._side.layouts.get(info)
            arena = self._segments.setdefault(name, SharedSegment()).laid_out(layout)
            maps[name] = arena.map(0, layout.part), str(arena.path(0, layout.part))
        places = _CopyPlaces({name: memoryview(mapped) for name, (mapped, _) in maps.items()})
        for bucket in self._transport.buckets(lease, None, places):
            if bucket.data is not None:
                data = memoryview(bucket.data)
                check_bytes(
                    f"{bucket.cut} {bucket.number} of part {bucket.layout.part}", data, len(data), bucket.digest
                )
                places.bytes(bucket.layout, bucket.number, bucket.cut)[:] = data
        parts = {name: replace(info, node=self._side.node, path=maps[name][1]) for name, info in lease.parts.items()}
        return replace(lease, parts=parts, location=None)

    def close(self) -> None:
        """Free the copies."""
        for segment in self._segments.values():
            segment.close()


class _CopyPlaces:
    """Segments as destinations."""

    def __init__(self, segments: Mapping[str, memoryview]) -> None:
        self._segments = segments

    def bytes(self, layout: PartLayout, number: int, cut: Cut) -> memoryview:
        start, stop = layout.pieces(cut)[number]
        return self._segments[layout.part][start:stop]

    def __call__(self, layout: PartLayout, number: int, cut: Cut) -> torch.Tensor:
        from trinity_sync.weights.tensors import byte_tensor

        return byte_tensor(self.bytes(layout, number, cut))

    def read(self, layout: PartLayout, number: int, cut: Cut, into: memoryview) -> None:
        into[:] = self.bytes(layout, number, cut)
