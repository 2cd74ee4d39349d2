"""Versions as deltas: how they are made, the cheapest way to a version, and an explorer's half.

The node agents encode each version against the one before. In mode checkpoint they write files, in the version's folder
(see `weights.part_delta`). In the other modes they keep the deltas in memory (`KeptDeltas`). A reader goes backwards
from the version that it wants, until it meets the one that it holds or a full one. It has and checks all deltas of that
way before it changes anything, and then takes the version piece by piece: old bits, the deltas one after another, new
bits. Whatever is wrong, the version is taken again in full.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from ray.exceptions import RayError

from trinity_sync.actors.agent_client import AgentClient, SharedDelta, WrittenDelta
from trinity_sync.actors.calls import Call, put, results
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout, grown
from trinity_sync.host.logs import story
from trinity_sync.protocol.parts import INDEX, PartInfo, delta_file, shard_file, version_folder
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import (
    Bucket,
    ExplorerSide,
    FindDestination,
    Places,
    Published,
    TrainerSide,
    Transport,
    commit,
    is_near,
    nodes_of,
)
from trinity_sync.weights import delta
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.layout import Cut, PartLayout
from trinity_sync.weights.part_delta import SPANS, EncodedDelta, PartDelta, Point, VersionIndex, find_route
from trinity_sync.weights.shard_file import ShardFile
from trinity_sync.weights.shards import itemsize

if TYPE_CHECKING:
    import torch

    from trinity_sync.sync.arrivals import SharedSegment

_MOST_KEPT = 1 / 8
"""Share of a part's bytes that deltas in memory may take. Those of the newest version are kept in any case."""
_LEAST_BYTES = 2**20
"""What the deltas of a part may take in any case: those of a tiny part are larger than the part."""
_FETCH_SHARE = 1 / 4
"""Share of `sync.timeout_s` in which a delta has to come, besides the time for its bytes. The rest is for the full
version in its place.
"""


Chain = Sequence[PartDelta]
"""Deltas of one part, each from where the one before ends."""


class VersionDeltas:
    """The driver's half. The agents encode each version against the one before. The slot of that one is not filled
    again until the new version is committed.

    Args:
        codec: `sync.delta.codec`. ``auto`` is ``gap8z``, the fast code, unless a store or a history keeps the bytes.
        spans: as of `PartEncoder`.
        always: also while no explorer needs a part from another node. Else a version whose deltas cannot be made is
            published in full, unless a store or a history is to have them.
    """

    def __init__(self, side: TrainerSide, codec: str, spans: tuple[int, ...] = SPANS, *, always: bool = True) -> None:
        self._side = side
        self.kept = side.versions is not None or side.base_every is not None  # by a store, by a history
        self._how = "gap8z" if codec == "auto" and not self.kept else codec, spans
        self._always = always
        self._before: tuple[Version, int] | None = None  # the last version and its slot
        self._begun = False
        self._encode_s = 0.0
        self._fault: str | None = None

    def encode(
        self, sealed: SealedVersion, folder: Path | None = None, *, pays: bool, durable: bool = False
    ) -> list[WrittenDelta] | None:
        """Have the agents encode a version against the one before, into files of `folder` or into memory. Returns none
        for the first version and if not `pays`; None if encoding failed, and the version must be published in full.
        """
        if self._before is None:
            return []
        if not pays:
            self._forget(sealed)
            return []
        self._begun = True
        given = sealed.version, sealed.slot, *self._before, None if folder is None else str(folder), *self._how
        calls = [self._side.agents[node].encode_deltas(*given, fsync=durable) for node in nodes_of(sealed.parts)]
        started = time.perf_counter()
        limit_s = grown(self._side.timeout_s, 2 * self._side.version_bytes.node)  # of both versions
        try:
            found = results(calls, limit_s, f"make the deltas of version {sealed.version}")
        except RunError as error:
            if self._always or self.kept or _is_lost(error):
                raise
            self._fault = f"version {sealed.version} is published in full: {error}"
            story.warning("%s", self._fault)
            self._forget(sealed)
            return None
        self._encode_s = time.perf_counter() - started
        return [one for of_node in found for one in of_node]

    def encode_from(
        self, base: Version, weights: Path, sealed: SealedVersion, folder: Path, *, durable: bool
    ) -> int | None:
        """Have the agents encode the version of the last `encode` against version `base`, whose files are in `weights`,
        into `folder`. Returns the bytes written; None if an agent reports an error.
        """
        given = sealed.slot, base, str(weights), str(folder), self._how
        calls = [self._side.agents[node].encode_from_base(*given, fsync=durable) for node in nodes_of(sealed.parts)]
        started = time.perf_counter()
        limit_s = grown(self._side.timeout_s, 2 * self._side.version_bytes.node)  # of both versions
        try:
            found = results(calls, limit_s, f"make the deltas from version {base}")
        except RunError as error:
            if _is_lost(error):
                raise
            self._fault = f"the history has no delta from version {base} to {sealed.version}: {error}"
            story.warning("%s", self._fault)
            return None
        self._encode_s += time.perf_counter() - started
        return sum(one.nbytes for of_node in found for one in of_node)

    def _forget(self, sealed: SealedVersion) -> None:
        """Have the agents free what they keep for deltas."""
        if self._begun:
            freeing = [self._side.agents[node].forget_deltas() for node in nodes_of(sealed.parts)]
            results(freeing, self._side.timeout_s, "free what they keep for deltas")
        self._begun = False

    def pays(self, sealed: SealedVersion) -> bool:
        """Whether an explorer, or a follower of a store, may take a delta to a version (`sync.encoding`)."""
        nodes = self._side.explorer_nodes().values()
        always = self._always or self._side.versions is not None
        return always or not all(is_near(node, sealed.parts) for node in nodes)

    def commit(self, sealed: SealedVersion, location: str | None = None) -> None:
        """Commit a version whose deltas were made."""
        commit(self._side, sealed.version, location)
        self._before = sealed.version, sealed.slot

    def report(
        self, sealed: SealedVersion, written: Sequence[WrittenDelta], more: int = 0, *, with_full: bool
    ) -> Published:
        """Return the report on a version, before its `commit`. `more`: bytes that were made for a history. `with_full`:
        it was sent in full as well.
        """
        nbytes = more + (sealed.nbytes if with_full else 0) + sum(one.nbytes for one in written)
        fault, self._fault = self._fault, None
        last = self._single(written)
        if not last:  # merged ones may be there: without a single step a version counts as full
            return Published(encoding="full", nbytes=nbytes, fault=fault)
        changed, elements = Counter[str](), Counter[str]()
        for one in last:
            changed.update(one.changed)
            elements.update(one.elements)
        ppm = {group: round(1e6 * changed[group] / count) for group, count in elements.items() if count}
        share, codec, took = changed.total() / max(1, elements.total()), last[0].codec, self._encode_s
        return Published(
            encoding="delta", nbytes=nbytes, codec=codec, changed=share, changed_ppm=ppm, encode_s=took, fault=fault
        )

    def publish(self, sealed: SealedVersion) -> Published:
        """Have the agents keep the deltas to a version where these pay, and commit it."""
        pays = self.pays(sealed)
        encoded = self.encode(sealed, pays=pays)
        if pays and self._before and encoded is not None and len(self._single(encoded)) < len(sealed.parts):
            self._fault = f"version {sealed.version} is published in full: the agents have no room for its deltas"
        made = encoded or ()
        in_full = not self.lead_to(sealed, made)
        report = self.report(sealed, made, with_full=in_full)
        self.commit(sealed)
        return replace(report, encoding="full") if in_full else report

    def lead_to(self, sealed: SealedVersion, made: Sequence[WrittenDelta]) -> bool:
        """Whether there are deltas of all parts from the version before, with fewer bytes than the version."""
        found = self._single(made)
        nbytes = sum(one.nbytes for one in found)
        return len(found) == len(sealed.parts) and nbytes < sealed.nbytes

    def _single(self, made: Sequence[WrittenDelta]) -> list[WrittenDelta]:
        """Return the deltas from the version before."""
        return [one for one in made if self._before is not None and one.start == self._before[0]]

    def share(self, sealed: SealedVersion, base: Version) -> dict[str, list[SharedDelta]] | None:
        """Return the deltas of all parts from a version that the agents keep; None: the version has to be sent in full,
        also where an agent does not answer.
        """
        try:
            return shared_deltas(self._side.agents, sealed.version, base, sealed.parts, self._side.timeout_s)
        except RunError as error:
            story.warning("version %s is sent in full: %s", sealed.version, error)
            return None


def _is_lost(error: RunError) -> bool:
    """Whether a process has died, so that the version cannot be published in full either."""
    return isinstance(error, ProcessLoss) and not isinstance(error, WaitTimeout)


class KeptDeltas:
    """The deltas of a part in Ray's object store, for the newest versions. One thread adds, any may ask.

    Args:
        nbytes: of the part.
    """

    def __init__(self, nbytes: int) -> None:
        self._full_bytes = max(nbytes, _LEAST_BYTES)
        self._most = max(_MOST_KEPT * nbytes, _LEAST_BYTES)
        self._ending: dict[Point, list[SharedDelta]] = {}

    def add(self, version: Version, one: EncodedDelta) -> int | None:
        """Keep a delta to the newest version, and drop those to old ones; return its bytes. None: there is no room."""
        data = np.frombuffer(b"".join(one.parts), np.uint8)
        try:
            shared = SharedDelta(Version(*one.start), data.nbytes, put(data))
        except RayError as error:  # such as a full disk
            story.warning("keeps no deltas, so versions travel in full: %s", error)
            self._ending.clear()
            return None
        self._ending[version] = [*self._ending.get(version, ()), shared]
        total = sum(kept.nbytes for ending in self._ending.values() for kept in ending)
        while total > self._most and len(self._ending) > 1:
            total -= sum(kept.nbytes for kept in self._ending.pop(next(iter(self._ending))))
        return data.nbytes

    def chain(self, version: Version, held: Version) -> list[SharedDelta] | None:
        """Return the deltas from a held version to another; None: there are none."""
        route = find_route(version, held, self._full_bytes, self._index)
        if route is None or not route.starts:
            return None
        found = [one for start, end in route.steps(version) for one in self._ending.get(end, ()) if one.start == start]
        return found if len(found) == len(route.starts) else None

    def _index(self, version: Point) -> VersionIndex | None:
        return VersionIndex(None, [(one.start, one.nbytes) for one in self._ending.get(version, ())])


def shared_deltas(
    agents: Mapping[str, AgentClient], version: Version, held: Version, parts: Mapping[str, PartInfo], timeout_s: float
) -> dict[str, list[SharedDelta]] | None:
    """Return the deltas that lead from version `held` to `version`, by part; None if an agent lacks one, or if they are
    not smaller than the version.
    """
    calls = [agents[node].share_deltas(version, held) for node in nodes_of(parts)]
    found = {part: one for of_node in results(calls, timeout_s * _FETCH_SHARE) for part, one in of_node.items()}
    nbytes = sum(one.nbytes for chain in found.values() for one in chain)
    return found if found.keys() == parts.keys() and nbytes < sum(info.nbytes for info in parts.values()) else None


def fetch_delta(shared: SharedDelta, who: str, timeout_s: float) -> memoryview:
    """Fetch a delta from an agent's node; each node fetches it once. Raises DeltaError on an error or a timeout: Ray
    reports no error for an object that it lost on disk.
    """
    assert shared.reference is not None, "it is handed out with its reference"
    fetching: Call[np.ndarray] = Call(shared.reference, who, f"send a delta from version {shared.start}")
    try:
        return fetching.result(grown(timeout_s, shared.nbytes, more_s=timeout_s * (_FETCH_SHARE - 1))).data
    except RunError as error:
        raise DeltaError(str(error)) from error


class Deltas(NamedTuple):
    """What an explorer needs for a version."""

    chains: Sequence[Chain]  # of the parts, by their names
    full: tuple[Version, Path] | None = None  # with which they begin, and its folder; None: with what is held


class DeltaSource(Protocol):
    """The source of deltas in a sync mode. `full`: reads whole versions."""

    full: Transport

    def find(self, lease: Lease, broadcast: Broadcast | None, held: Version | None) -> Deltas | None:
        """Return the deltas to a leased version, checked; None: it has to be taken in full. RunError: they cannot be
        read.
        """
        ...

    def whole(self, lease: Lease) -> AbstractContextManager[tuple[Transport, Lease]]:
        """Return what can read the whole version, and by which lease."""
        ...


class FolderDeltas:
    """Deltas in the folders of versions (a `DeltaSource`). `own`: reads files that only this explorer has, without a
    lease of their folder.
    """

    def __init__(self, side: ExplorerSide, full: Transport, own: Transport) -> None:
        self.full = full
        self._own = own
        self._side = side

    def find(self, lease: Lease, broadcast: Broadcast | None, held: Version | None) -> Deltas | None:
        root = Path(str(lease.location)).parent
        route = find_route(lease.version, held, lease.nbytes, lambda version: _index(root, version))
        if route is None:
            return None
        steps = route.steps(lease.version)
        layouts = [self._side.layouts.get(info) for _, info in sorted(lease.parts.items())]
        full = None if route.full is None else (Version(*route.full[0]), root.parent / route.full[1])
        chains = [[PartDelta.read(_file(root, layout, *step), layout, step) for step in steps] for layout in layouts]
        return Deltas(chains, full)

    @contextlib.contextmanager
    def whole(self, lease: Lease) -> Iterator[tuple[Transport, Lease]]:
        """Have the agents write the leased slot to a folder."""
        folder = Path(str(lease.location)) / f"full-{self._side.name}"
        agents = [self._side.agents[node] for node in nodes_of(lease.parts)]
        calls = [agent.write(lease.slot, str(folder), {}, fsync=False) for agent in agents]
        try:
            results(calls, grown(self._side.timeout_s, lease.nbytes), f"write version {lease.version} in full")
            yield self._own, replace(lease, location=str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _index(root: Path, version: Point) -> VersionIndex | None:
    with contextlib.suppress(DeltaError, OSError):  # another way may lead there
        index = VersionIndex.read(version_folder(root, version) / INDEX)
        return index if index.full is None or (root.parent / index.full).is_dir() else index._replace(full=None)
    return None


def _is_whole(lease: Lease) -> bool:
    """Whether a version lies in files, and not in a folder of deltas."""
    return lease.location is not None and Path(lease.location).name != version_folder(Path(), lease.version).name


def _file(root: Path, layout: PartLayout, start: Point, end: Point) -> Path:
    return version_folder(root, end) / delta_file(layout.part, start)


def read_chain(
    layout: PartLayout, chain: Sequence[SharedDelta], end: Version, fetch: Callable[[SharedDelta], memoryview]
) -> Chain:
    """Read deltas that agents keep, and that lead to a version."""
    ends = [*(one.start for one in chain[1:]), end]
    name = f"the delta of {layout.part} to version {end}"
    return [PartDelta(layout, fetch(one), name, (one.start, to)) for one, to in zip(chain, ends, strict=True)]


class DeltaTransport:
    """An explorer's half: takes versions over the one that its destinations hold (a `Transport`). Where these are not
    `Places`, each load begins with a full version.

    `always`: also versions of which all parts are on this node.
    """

    def __init__(self, side: ExplorerSide, source: DeltaSource, *, always: bool = True) -> None:
        self._side = side
        self._source = source
        self._always = always
        self._held: Version | None = None
        self._tried: int | None = None  # the lease of the last load
        self._buffer = np.empty(0, np.uint8)

    def buckets(
        self, lease: Lease, broadcast: Broadcast | None, find_destination: FindDestination
    ) -> Generator[Bucket, None, None]:
        held, self._held = self._held if isinstance(find_destination, Places) else None, None
        if self.in_full(lease) and (broadcast is None or broadcast.base is None):
            yield from self._source.full.buckets(lease, broadcast, find_destination)
            self._held = lease.version if _is_whole(lease) else None
            return
        again, self._tried = self._tried == lease.id, lease.id
        found = None
        try:
            if broadcast is not None or not again:
                found = self._source.find(lease, broadcast, held)
            if found is not None:
                yield from self._follow(lease, found, find_destination)
        except RunError as error:  # whatever it is, the second try does without these deltas
            raise error if isinstance(error, DeltaError) else DeltaError(str(error)) from error
        if found is None:
            story.info("takes version %s in full", lease.version)
            with self._source.whole(lease) as (source, whole):
                yield from source.buckets(whole, broadcast, find_destination)
        if found is not None or self._side.still_leased(lease.id):  # else the slot may have had another version's bytes
            self._held = lease.version

    def in_full(self, lease: Lease) -> bool:
        """Whether a version is read in full: its folder has no deltas, or nothing of it has to travel."""
        return _is_whole(lease) or (not self._always and is_near(self._side.node, lease.parts))

    def forget(self) -> None:
        """Forget what the destinations hold, as they are gone."""
        self._held = None

    def _follow(self, lease: Lease, found: Deltas, find_destination: FindDestination) -> Generator[Bucket, None, None]:
        if found.full is not None and not any(found.chains):
            at = replace(lease, location=str(found.full[1]))
            yield from self._source.full.buckets(at, None, find_destination)
            return
        layouts = [self._side.layouts.get(info) for _, info in sorted(lease.parts.items())]
        with ExitStack() as opened:
            go_on: Callable[[], None] = lambda: None  # noqa: E731
            files: list[ShardFile | None] = [None] * len(layouts)
            if found.full is not None:
                version, folder = found.full
                if self._side.lease_folder is not None:
                    go_on = opened.enter_context(self._side.lease_folder(folder, version))
                paths = [folder / shard_file(layout.part) for layout in layouts]
                files = [opened.enter_context(ShardFile(path)) for path in paths]
            for layout, file, chain in zip(layouts, files, found.chains, strict=True):
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
        full version's file, or with what the destination holds; it is empty where that is the version. `checks`: also
        a piece without changes.
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
        started = time.perf_counter()
        if file is None and not direct:
            assert isinstance(to, Places), "else the route begins with a full version"
            to.read(layout, number, "shard", buffer.data)
        bits = buffer.view(f"<u{itemsize(dtype)}")
        delta.apply_chain(bits, changes, dtype, kept=direct)
        if checks and chain and not changes and delta.digest(bits) != chain[-1].digests[number]:
            raise DeltaError(f"piece {number} of part {layout.part} is damaged: it differs from the published one")
        return here._replace(data=None if direct else buffer.data, apply_s=time.perf_counter() - started)


class DeltaCopies:
    """Copies of all parts for workers that map them, over which an explorer takes deltas. They are its `Places`."""

    def __init__(self, side: ExplorerSide, transport: DeltaTransport) -> None:
        self._side = side
        self._transport = transport
        self._segments: dict[str, SharedSegment] = {}
        self._mapped: dict[str, tuple[Path, memoryview]] = {}
        self.moved: int | None = None
        self.apply_s = 0.0

    def localize(self, lease: Lease) -> Lease:
        """Take the version, and return the lease with its parts named by the copies."""
        from trinity_sync.sync.arrivals import SharedSegment
        from trinity_sync.weights.apply import check_bytes

        if self._transport.in_full(lease):
            self.close()
            self.moved, self.apply_s = None, 0.0
            return lease
        parts = {}
        for name, info in lease.parts.items():
            layout = self._side.layouts.get(info)
            arena = self._segments.setdefault(name, SharedSegment()).laid_out(layout)
            path = arena.path(0, name)
            if name not in self._mapped or self._mapped[name][0] != path:
                self._mapped[name] = path, memoryview(arena.map(0, name))
            parts[name] = replace(info, node=self._side.node, path=str(path))
        total, self.apply_s = 0, 0.0
        for layout, number, data, digest, cut, moved, apply_s, _ in self._transport.buckets(lease, None, self):
            if data is not None:
                check_bytes(f"{cut} {number} of part {layout.part}", memoryview(data), len(data), digest)
                self._piece(layout, number, cut)[:] = data
            start, stop = layout.pieces(cut)[number]
            total += stop - start if moved is None else moved
            self.apply_s += apply_s
        self.moved = total
        return replace(lease, parts=parts, location=None)

    def close(self) -> None:
        """Free the copies."""
        self._transport.forget()
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
