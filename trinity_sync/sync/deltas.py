"""Versions as deltas: the folder of a version, the cheapest way to it, and an explorer's half.

A version's folder has `index.json`, which names the deltas that end at the version and the folder of its full form if
there is one, and a file for each delta and part. A reader goes backwards from the version that it wants, until it meets
the one that it holds or a full one. It reads and checks all files of that way before it changes anything, and then
takes the version piece by piece: old bits, the deltas one after another, new bits. Whatever is wrong, the loader's
second try takes the full version, which the node agents write from the leased slot.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trinity_sync.actors.calls import results
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.logs import story
from trinity_sync.protocol.parts import delta_file, shard_file
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import Bucket, ExplorerSide, FindDestination, Places, Transport
from trinity_sync.weights import delta
from trinity_sync.weights.delta import DeltaError, WrongBaseError
from trinity_sync.weights.layout import Cut, PartLayout
from trinity_sync.weights.part_delta import PartDelta, Point
from trinity_sync.weights.shard_file import ShardFile
from trinity_sync.weights.shards import itemsize

if TYPE_CHECKING:
    import torch

    from trinity_sync.sync.arrivals import SharedSegment

_FORMAT = 1


def version_folder(root: Path, version: Point) -> Path:
    """Return the folder of a version below that of all deltas."""
    return root / f"{version[0]}-{version[1]}"


class VersionIndex(NamedTuple):
    """The contents of a version's folder."""

    full: str | None  # folder of the full version, below that of the checkpoints
    deltas: Sequence[tuple[Version, int]]  # where each begins, and bytes of all of its parts

    def write(self, folder: Path, *, durable: bool) -> None:
        body = {"format": _FORMAT, "full": self.full, "deltas": [[*start, nbytes] for start, nbytes in self.deltas]}
        replace_file(folder / "index.json", json.dumps(body) + "\n", durable=durable)

    @classmethod
    def read(cls, folder: Path) -> VersionIndex:
        """Read it; DeltaError: it is gone, damaged or of another format."""
        path = folder / "index.json"
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            full = None if body["full"] is None else str(body["full"])
            deltas = [(Version(int(attempt), int(step)), int(nbytes)) for attempt, step, nbytes in body["deltas"]]
            if body["format"] != _FORMAT or {"..", "/"} & set(Path(full or "").parts):
                raise ValueError(f"format {body['format']}, full version in {full}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeltaError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        return cls(full, deltas)


Chain = Sequence[PartDelta]
"""Deltas of one part, each from where the one before ends."""


class Route(NamedTuple):
    """What leads to a version: the deltas that begin at these versions, over the first of them or over a full one."""

    starts: tuple[Version, ...]
    full: tuple[Version, Path] | None


def find_route(folder: Path, version: Version, held: Version | None, full_bytes: int) -> Route | None:
    """Return the route of the fewest bytes to the version of a folder, from the held version or from a full one of so
    many bytes; None: no files lead there, or so many that to write and read the version anew costs less.
    """
    checkpoints = folder.parent.parent
    todo: list[tuple[int, Version, Route]] = [(0, version, Route((), None))]
    done = set[Version]()
    while todo:
        nbytes, at, route = heapq.heappop(todo)
        if nbytes > 2 * full_bytes:
            break
        if at == held or route.full is not None:
            return route
        if at in done:
            continue
        done.add(at)
        with contextlib.suppress(DeltaError, OSError):  # another way may lead there
            full, deltas = VersionIndex.read(version_folder(folder.parent, at))
            if full is not None and (checkpoints / full).is_dir():
                heapq.heappush(todo, (nbytes + full_bytes, at, Route(route.starts, (at, checkpoints / full))))
            for start, more in deltas:
                heapq.heappush(todo, (nbytes + more, start, Route((start, *route.starts), None)))
    return None


class DeltaTransport:
    """An explorer's half: takes versions over the one that its destinations hold (a `Transport`). Where these are not
    `Places`, each load begins with a full version. `full`: reads the folder of a full version.
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
        held, self._held = self._held if isinstance(find_destination, Places) else None, None
        again, self._tried = self._tried == lease.version, lease.version
        folder, full_bytes = Path(str(lease.location)), sum(info.nbytes for info in lease.parts.values())
        route = None if again else find_route(folder, lease.version, held, full_bytes)
        if route is None:
            story.info("asks for version %s in full", lease.version)
            yield from self._asked(lease, folder / f"full-{self._side.name}", find_destination)
        else:
            try:
                yield from self._follow(lease, route, find_destination)
            except RunError as error:  # whatever it is, the second try does without these files
                raise error if isinstance(error, DeltaError) else DeltaError(str(error)) from error
        if route is not None or self._side.still_leased(lease.id):  # else the slot may have had another version's bytes
            self._held = lease.version

    def _asked(self, lease: Lease, folder: Path, find_destination: FindDestination) -> Generator[Bucket, None, None]:
        """Have the agents write the leased slot to a folder, and read that."""
        nodes = sorted({info.node for info in lease.parts.values()})
        calls = [self._side.agents[node].write(lease.slot, str(folder), {}, fsync=False) for node in nodes]
        try:
            results(calls, self._side.timeout_s, f"write version {lease.version} in full")
            yield from self._full.buckets(replace(lease, location=str(folder)), None, find_destination)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _follow(self, lease: Lease, route: Route, find_destination: FindDestination) -> Generator[Bucket, None, None]:
        if route.full is not None and not route.starts:
            yield from self._full.buckets(replace(lease, location=str(route.full[1])), None, find_destination)
            return
        layouts = [self._side.layouts.get(info) for _, info in sorted(lease.parts.items())]
        root, ends = Path(str(lease.location)).parent, (*route.starts[1:], lease.version)
        steps = list(zip(route.starts, ends, strict=True))
        chains = [[_read(version_folder(root, end), layout, start) for start, end in steps] for layout in layouts]
        with ExitStack() as opened:
            go_on: Callable[[], None] = lambda: None  # noqa: E731
            files: list[ShardFile | None] = [None] * len(layouts)
            if route.full is not None:
                version, folder = route.full
                if self._side.lease_folder is not None:
                    go_on = opened.enter_context(self._side.lease_folder(folder, version))
                paths = [folder / shard_file(layout.part) for layout in layouts]
                files = [opened.enter_context(ShardFile(path)) for path in paths]
            for layout, file, chain in zip(layouts, files, chains, strict=True):
                if file is not None and not file.layout.lies_as(layout):
                    raise DeltaError(f"{file.path} has another layout than version {lease.version}")
                checks = lease.parts[layout.part].buckets is not None
                for number in range(len(layout.by_shard)):
                    go_on()
                    yield self._piece(layout, number, file, chain, find_destination, checks)

    def _piece(
        self, layout: PartLayout, number: int, file: ShardFile | None, chain: Chain, to: FindDestination, checks: bool
    ) -> Bucket:
        """Return a piece of the newest version, in its destination where it can be made there. The chain begins with a
        full version's file, or with what the destination holds. `checks`: also a piece without changes.
        """
        start, stop, dtype = layout.by_shard[number]
        changes = [change for one in chain if (change := one.pieces[number]) is not None]
        moved = sum(map(len, changes)) + (stop - start if file is not None else 0)
        here = Bucket(layout, number, None, None, "shard", moved)
        if not changes and file is None and not checks:
            return here
        place = to(layout, number, "shard")
        direct = place is not None and not place.is_cuda
        if len(self._buffer) < stop - start and not direct:
            self._buffer = np.empty(stop - start, np.uint8)
        buffer = place.numpy() if place is not None and direct else self._buffer[: stop - start]
        if file is not None:
            file.read(start, buffer.data)
        elif not direct:
            assert isinstance(to, Places), "else the route begins with a full version"
            to.read(layout, number, "shard", buffer.data)
        bits = buffer.view(f"<u{itemsize(dtype)}")
        for change in changes:
            delta.apply(bits, change, dtype, bits)
        if checks and not changes and delta.digest(bits) != chain[-1].digests[number]:
            raise DeltaError(f"piece {number} of part {layout.part} is damaged: it differs from the published one")
        return here if direct else here._replace(data=buffer.data)


def _read(folder: Path, layout: PartLayout, start: Version) -> PartDelta:
    path = folder / delta_file(layout.part, start)
    try:
        found = PartDelta(layout, path.read_bytes(), str(path))
    except OSError as error:
        raise DeltaError(f"{path} cannot be read: {error.strerror}") from error
    if (found.start, version_folder(folder.parent, found.end)) != (start, folder):
        raise WrongBaseError(f"{path} leads from version {Version(*found.start)} to {Version(*found.end)}")
    return found


class DeltaCopies:
    """Copies of all parts for workers that map them, over which an explorer takes deltas. They are its `Places`."""

    def __init__(self, side: ExplorerSide, transport: Transport) -> None:
        self._side = side
        self._transport = transport
        self._segments: dict[str, SharedSegment] = {}
        self._mapped: dict[str, tuple[Path, memoryview]] = {}
        self.moved: int | None = None

    def localize(self, lease: Lease) -> Lease:
        """Take the version, and return the lease with its parts named by the copies."""
        from trinity_sync.sync.arrivals import SharedSegment
        from trinity_sync.weights.apply import check_bytes

        parts = {}
        for name, info in lease.parts.items():
            layout = self._side.layouts.get(info)
            arena = self._segments.setdefault(name, SharedSegment()).laid_out(layout)
            path = arena.path(0, name)
            if name not in self._mapped or self._mapped[name][0] != path:
                self._mapped[name] = path, memoryview(arena.map(0, name))
            parts[name] = replace(info, node=self._side.node, path=str(path))
        total = 0
        for layout, number, data, digest, cut, moved in self._transport.buckets(lease, None, self):
            if data is not None:
                check_bytes(f"{cut} {number} of part {layout.part}", memoryview(data), len(data), digest)
                self._piece(layout, number, cut)[:] = data
            start, stop = layout.pieces(cut)[number]
            total += stop - start if moved is None else moved
        self.moved = total
        return replace(lease, parts=parts, location=None)

    def close(self) -> None:
        """Free the copies."""
        self._mapped.clear()
        for segment in self._segments.values():
            segment.close()

    def __call__(self, layout: PartLayout, number: int, cut: Cut) -> torch.Tensor:
        from trinity_sync.weights.tensors import byte_tensor

        return byte_tensor(self._piece(layout, number, cut))

    def read(self, layout: PartLayout, number: int, cut: Cut, into: memoryview) -> None:
        into[:] = self._piece(layout, number, cut)

    def _piece(self, layout: PartLayout, number: int, cut: Cut) -> memoryview:
        start, stop = layout.pieces(cut)[number]
        return self._mapped[layout.part][1][start:stop]
