"""The node agent: one process per node that owns the slots, so that staged versions outlive the trainer's ranks.

It computes bucket and version digests, writes shard files, serves parts to the agents of other nodes, and brings their
parts to the explorers of its own node (`pieces`), which map the slots. It loads no torch, so it starts in a second.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
import ray

from trinity_sync.actors.agent_client import (
    AgentClient,
    Coordinator,
    FolderCoordinators,
    SharedDelta,
    Slots,
    StatePart,
    WrittenDelta,
)
from trinity_sync.actors.calls import Call, put, this_process
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import RunError, WaitTimeout, grown
from trinity_sync.host.hardware import peak_memory
from trinity_sync.host.logs import log_failure, own_log, story
from trinity_sync.host.threads import PATIENCE, BackgroundWork, in_background
from trinity_sync.protocol.parts import FileTuple, PartInfo, delta_file, shard_file
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.deltas import KeptDeltas
from trinity_sync.sync.memory_reads import open_reads
from trinity_sync.sync.pieces import (
    PIECE_BYTES,
    BroughtPart,
    BroughtParts,
    NodeChain,
    PartFetcher,
    PartPieces,
    PieceFetcher,
    PieceServer,
    PieceSource,
    WantedPart,
)
from trinity_sync.tracking import units
from trinity_sync.weights.digests import RowDigests, RowPlan, bucket_digests
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.part_delta import EncodedDelta, PartEncoder
from trinity_sync.weights.shard_file import DigestedFile, ShardFile, write_image, write_shard_file
from trinity_sync.weights.slots import SlotArena, remove_stale
from trinity_sync.weights.tensor_rows import RowProcesses

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_STALL_S = 15.0
"""Longest wait for another node to send or take something; at most a quarter of `sync.timeout_s`."""
_ROW_PROCESSES = 8
"""At most: so many digest rows faster than ranks stage them."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of an agent."""

    run_key: str  # name of the run's folder in shared memory, unique among the runs of the node
    slots: int
    root: str  # where shared memory is mounted (`sync.shm_dir`)
    fallback: str  # folder for mapped files where `root` is too small
    verify: str  # ``full``, ``bucket`` or ``off``
    nodes: int  # that have parts
    threads: int  # for digests and writes; also the number of processes that digest rows
    durable: bool = True  # fsync the files of full checkpoints (`checkpoint.fsync`)
    save_timeout_s: float = 1800.0  # until a part of a full checkpoint may be written
    log_dir: str | None = None  # None: Ray's own logs
    log_name: str = "node-agent"
    transport: str = "auto"  # of parts from other nodes (`sync.transport`): ``nixl``, ``tcp``, ``ray``; else as it can
    secret: bytes | None = field(default=None, repr=False)  # of the run's agents; None: ``ray``
    sync_timeout_s: float = 60.0  # for a part from another node; a `WaitLimit` grows with its bytes
    brings: Mapping[str, int] = field(default_factory=dict)  # parts that its explorers read, of all nodes -> bytes


class NodeAgent:
    """The agent's body, an asyncio Ray actor.

    Args:
        config: see `AgentConfig`.
        synchronizer: the run's synchronizer, to which it reports; None: it has no parts, and brings those of others.
        lead: the agent that computes version digests; None: this one does.
    """

    def __init__(
        self, config: AgentConfig, synchronizer: SynchronizerClient | None, lead: AgentClient | None = None
    ) -> None:
        own_log(config.log_dir, config.log_name)
        self._config = config
        self._reports_to = synchronizer
        self._lead = lead
        self._node = ray.get_runtime_context().get_node_id()
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="digest")
        self._tasks = ThreadPoolExecutor(4, thread_name_prefix="agent")
        # Each rank of the node may wait here for a disk, without delaying quick tasks.
        self._waits = ThreadPoolExecutor(256, thread_name_prefix="wait")
        self._layouts: dict[str, PartLayout] = {}
        self._rows_plan: RowPlan | None = None
        self._row_processes = RowProcesses(min(config.threads, _ROW_PROCESSES))
        self._arena: SlotArena | None = None
        self._maps: dict[tuple[int, str], mmap.mmap] = {}
        self._encoders: dict[tuple[str, str, tuple[int, ...]], PartEncoder] = {}  # by part, codec and spans
        self._kept: dict[str, KeptDeltas] = {}
        self._staged: dict[Version, dict[str, float]] = {}
        self._rows: dict[Version, list[RowDigests]] = {}
        self._contributed: dict[Version, set[str]] = {}
        self._tensors: dict[Version, dict[str, bytes]] = {}
        stall_s = min(_STALL_S, config.sync_timeout_s / 4)  # besides the time for a piece
        stall_s = grown(config.sync_timeout_s, PIECE_BYTES, more_s=stall_s - config.sync_timeout_s)
        who = f"the agent of node {self._node}"
        self._server = PieceServer(ray.util.get_node_ip_address(), config.secret, who, stall_s)
        if config.transport == "nixl":
            in_background(open_reads, "nixl")  # takes seconds
        self._brought = BroughtParts(self._fetchers(stall_s), self._make_slots)
        # By slot and part: the version there, and the nodes that take it.
        self._filled: dict[tuple[int, str], Version] = {}
        self._chains: dict[tuple[int, str], NodeChain] = {}
        # By part: the newest version that other nodes have asked for, and its copy in Ray's object store.
        self._shared: dict[str, tuple[Version, asyncio.Future[ray.ObjectRef]]] = {}
        self._states = StateSlots(
            config.run_key,
            config.root,
            Path(config.fallback),
            timeout_s=config.save_timeout_s,
        )
        self._coordinators: FolderCoordinators[Coordinator] | None = None
        # This call ends with this process; the synchronizer watches it.
        self._lifeline: Call[None] | None = None

    @property
    def _synchronizer(self) -> SynchronizerClient:
        assert self._reports_to is not None, "an agent without parts has nothing to report"
        return self._reports_to

    async def register(
        self,
        layouts: Mapping[str, PartLayout],
        make_coordinators: Callable[[], FolderCoordinators[Coordinator]] | None = None,
    ) -> Slots:
        """Make the slots for this node's parts.

        Args:
            layouts: by part; empty where the node's ranks hold replicas only.
        """
        self._layouts, self._encoders, self._kept = dict(layouts), {}, {}
        if make_coordinators is not None:
            self._coordinators = await self._run(make_coordinators)
        self._lifeline = self._synchronizer.lifeline()
        self._synchronizer.watch(this_process(f"the agent of node {self._node}"), [self._lifeline.reference])
        return await self._run(self._create)

    def _create(self) -> Slots:
        self._rows_plan = RowPlan(list(self._layouts.values())) if self._config.verify == "full" else None
        remove_stale(self._config.root)
        sizes = {part: layout.nbytes for part, layout in self._layouts.items()}
        self._arena = SlotArena.create(
            self._config.run_key,
            self._config.slots,
            sizes,
            root=self._config.root,
            fallback=Path(self._config.fallback),
        )
        slots = range(self._config.slots)
        self._maps = {(slot, part): self._arena.map(slot, part) for slot in slots for part in sizes}
        paths = {slot: {part: str(self._arena.path(slot, part)) for part in sizes} for slot in slots}
        room = f"{units.size(sum(sizes.values()))} for {', '.join(sizes) or 'no part'}"
        story.info("up for node %s: %d slots of %s", self._node, self._config.slots, room)
        for note in self._arena.notes:
            story.warning("%s", note)
        return Slots(paths=paths, notes=list(self._arena.notes))

    async def part_staged(self, version: Version, slot: int, part: str, blocked_s: float = 0.0) -> None:
        """Record that a rank has filled its segment, which blocked it for `blocked_s` seconds. With the last rank, the
        digests of this node are computed and reported.
        """
        self._filled[slot, part] = version
        if (chain := self._chains.pop((slot, part), None)) is not None:
            chain.held.end(f"its slot has version {version} now")
        staged = self._staged.setdefault(version, {})
        staged[part] = blocked_s
        if staged.keys() != self._layouts.keys():
            return
        del self._staged[version]
        started = time.perf_counter()
        try:
            parts, rows = await self._run(self._digest, slot, staged)
            took = time.perf_counter() - started
            # At once: the synchronizer takes the parts and the digest in any order.
            reported = self._synchronizer.staged(version, parts).reference
            if self._lead is None:
                await self.contribute(version, self._node, rows)
            else:
                await self._lead.contribute(version, self._node, rows).reference
            await reported
            size = units.size(sum(info.nbytes for info in parts.values()))
            story.info("took version %s into slot %d: %s, digested in %s", version, slot, size, units.seconds(took))
        except Exception as error:
            log_failure(f"version {version}", error)
            await self._synchronizer.failed(version, f"{type(error).__name__}: {error}").reference

    async def part_failed(self, version: Version, part: str, error: str) -> None:
        """Record that a rank could not fill its segment."""
        self._staged.pop(version, None)
        story.error("version %s failed: %s: %s", version, part, error)
        await self._synchronizer.failed(version, f"{part}: {error}").reference

    def _digest(self, slot: int, blocked: dict[str, float]) -> tuple[dict[str, PartInfo], RowDigests | None]:
        assert self._arena is not None
        started = time.perf_counter()
        parts = {}
        for part, layout in self._layouts.items():
            bucketed = self._config.verify == "bucket"
            buckets = bucket_digests(self._maps[slot, part], layout, self._pool) if bucketed else None
            parts[part] = PartInfo(
                part=part,
                node=self._node,
                path=str(self._arena.path(slot, part)),
                nbytes=layout.nbytes,
                layout=layout.digest,
                buckets=buckets,
                blocked_s=blocked[part],
            )
        rows = None
        if self._config.verify == "full":
            assert self._rows_plan is not None
            paths = [info.path for info in parts.values()]
            segments = [self._maps[slot, part] for part in self._layouts]
            rows = self._rows_plan.digest(segments, self._pool, (self._row_processes, paths))
        digest_s = time.perf_counter() - started
        return {part: replace(info, digest_s=digest_s) for part, info in parts.items()}, rows

    async def contribute(self, version: Version, node: str, rows: RowDigests | None) -> None:
        """Take the row digests of a node (None: not computed), as the lead agent. With the last node, the version's
        digest is computed and reported.
        """
        nodes = self._contributed.setdefault(version, set())
        if node in nodes:
            return
        nodes.add(node)
        if rows is not None:
            self._rows.setdefault(version, []).append(rows)
        if len(nodes) < self._config.nodes:
            return
        del self._contributed[version]
        collected = self._rows.pop(version, [])
        try:
            digest = await self._run(self._version_digest, version, collected) if collected else None
            await self._synchronizer.digested(version, digest).reference
        except Exception as error:
            log_failure(f"the digest of version {version}", error)
            await self._synchronizer.failed(version, f"{type(error).__name__}: {error}").reference

    def _version_digest(self, version: Version, collected: list[RowDigests]) -> str:
        first, *others = collected
        rows = first.merge(others) if others else first
        tensors = self._tensors[version] = rows.tensor_digests()
        while len(self._tensors) > self._config.slots:  # older versions cannot be read any more
            del self._tensors[next(iter(self._tensors))]
        return rows.version_digest(tensors)

    async def tensor_digests(self, version: Version) -> dict[str, bytes]:
        """Return the 16-byte digests of a version's tensors, by name, so that readers can name damaged tensors. Empty
        where the version is in no slot, and on all agents but the lead.
        """
        return self._tensors.get(version, {})

    async def layout(self, part: str) -> PartLayout:
        """Return how a part is laid out."""
        return self._layouts[part]

    # -- parts between nodes

    async def reserve(self) -> None:
        """Make the slots for parts of other nodes, before a load with its shorter limits needs them."""
        for part, nbytes in self._config.brings.items():
            if part not in self._layouts:
                await self._wait(self._brought.reserve, part, nbytes)

    async def bring(self, wanted: WantedPart) -> BroughtPart:
        """Bring a part of a leased version here from another node, once for all explorers of this one."""
        path = await asyncio.wrap_future(await self._wait(self._brought.bring, wanted))
        return BroughtPart(path, self._brought.take_errors())

    def _fetchers(self, stall_s: float) -> list[PartFetcher]:
        config, found = self._config, list[PartFetcher]()
        if config.transport != "ray" and config.secret is not None:
            found.append(PieceFetcher(self._server, config.secret, stall_s, reads=config.transport == "nixl"))
        if config.transport != "tcp":
            found.append(ObjectFetcher(config.sync_timeout_s))
        return found

    def _make_slots(self, part: str, nbytes: int) -> SlotArena:
        config = self._config
        remove_stale(config.root)
        key, fallback = f"{config.run_key}-{self._node}-{part}", Path(config.fallback)
        return SlotArena.create(key, config.slots, {part: nbytes}, root=config.root, fallback=fallback)

    async def source(
        self, version: Version, slot: int, part: str, asker: PieceSource, failed: Sequence[PieceSource]
    ) -> PieceSource:
        """Return the node from which another one takes a part of a leased version; see `NodeChain.source`."""
        if self._filled.get((slot, part)) != version:
            raise RunError(f"slot {slot} of {part} has no longer version {version}: the lease on it has expired")
        chain = self._chains.get((slot, part))
        if chain is None:
            memory = memoryview(self._maps[slot, part])[: self._layouts[part].nbytes]
            chain = self._chains[slot, part] = NodeChain(PartPieces(version, memory, whole=True), self._server.source)
            self._server.hold(slot, part, chain.held)
        return chain.source(asker, failed)

    async def share(self, version: Version, slot: int, part: str) -> list[ray.ObjectRef]:
        """Return [reference to a copy of a staged part in Ray's object store], for readers on other nodes that have a
        lease on the version. One copy per version, so each node fetches it once for all of its explorers.
        """
        shared, copying = self._shared.get(part, (None, None))
        if shared != version or copying is None:
            copying = asyncio.ensure_future(self._run(self._put, slot, part))
            self._shared[part] = version, copying
        try:
            return [await asyncio.shield(copying)]
        except Exception:
            self._shared.pop(part, None)
            raise

    def _put(self, slot: int, part: str) -> ray.ObjectRef:
        return put(np.frombuffer(self._maps[slot, part], dtype=np.uint8)[: self._layouts[part].nbytes])

    async def write(self, slot: int, folder: str, metadata: Mapping[str, str], *, fsync: bool) -> list[FileTuple]:
        """Write this node's parts of a slot as shard files below `folder`; return (path relative to `folder`, bytes,
        xxh3_128 hex) of each file.
        """
        return await self._of_each_part(lambda part: self._write_part(slot, part, Path(folder), metadata, fsync))

    async def _of_each_part(self, work: Callable[[str], T]) -> list[T]:
        """Do the work for all parts. An error is raised once all have ended, for the caller then deletes the folder."""
        done = await asyncio.gather(*(self._run(work, part) for part in self._layouts), return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                raise one
        return [one for one in done if not isinstance(one, BaseException)]

    def _write_part(
        self, slot: int, part: str, folder: Path, metadata: Mapping[str, str], fsync: bool, name: str | None = None
    ) -> FileTuple:
        relative = shard_file(part) if name is None else name.format(part)
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        segment = self._maps[slot, part]
        return relative, *write_shard_file(folder / relative, self._layouts[part], segment, metadata, fsync=fsync)

    async def encode_deltas(
        self,
        version: Version,
        slot: int,
        base: Version,
        base_slot: int,
        folder: str | None,
        codec: str,
        spans: tuple[int, ...],
        *,
        fsync: bool = False,
    ) -> list[WrittenDelta]:
        """Make the deltas of this node's parts that end at a version, see `PartEncoder.encode`: in files, or without a
        folder in memory, without those for which there is no room. Nobody fills the slots of both versions meanwhile.
        """
        encoders, all_kept = self._encoders, self._kept  # of this call, also after `forget_deltas`

        def encode(part: str) -> list[WrittenDelta]:
            layout = self._layouts[part]
            encoder = encoders.setdefault((part, codec, spans), PartEncoder(layout, codec, spans))
            kept = all_kept.setdefault(part, KeptDeltas(layout.nbytes))
            segments = self._maps[base_slot, part], self._maps[slot, part]
            found = []
            for one in encoder.encode(base, version, segments, self._pool):
                nbytes = kept.add(version, one) if folder is None else self._write_delta(part, one, folder, fsync)
                if nbytes is not None:
                    start = Version(*one.start)
                    found.append(WrittenDelta(part, start, nbytes, encoder.codec, one.changed, encoder.elements))
            return found

        return [one for of_part in await self._of_each_part(encode) for one in of_part]

    async def encode_from_base(
        self, slot: int, base: Version, weights: str, folder: str, how: tuple[str, tuple[int, ...]], *, fsync: bool
    ) -> list[WrittenDelta]:
        """Make the deltas of this node's parts from a version in files, `weights`, to that of the last `encode_deltas`,
        in files. `how`: its codec and spans.
        """
        encoders = self._encoders

        def encode(part: str) -> WrittenDelta:
            layout, encoder = self._layouts[part], encoders[part, *how]
            with ShardFile(Path(weights) / shard_file(part)) as file:  # not mapped: a bad disk would end this process
                if not file.layout.lies_as(layout):
                    raise RunError(f"{file.path} has another layout than this run's versions")
                one = encoder.encode_from(base, file.read, self._maps[slot, part], self._pool)
            nbytes = self._write_delta(part, one, folder, fsync)
            return WrittenDelta(part, base, nbytes, encoder.codec, one.changed, encoder.elements)

        return await self._of_each_part(encode)

    async def forget_deltas(self) -> None:
        """Free the deltas, and what the next ones would have been made from. Those that are being made are not handed
        out: their slots may be filled before they are complete.
        """
        self._encoders, self._kept = {}, {}

    def _write_delta(self, part: str, one: EncodedDelta, folder: str, fsync: bool) -> int:
        with DigestedFile(Path(folder) / delta_file(part, one.start), durable=fsync) as file:
            for piece in one.parts:
                file.write(piece)
            nbytes, _ = file.finish()
        return nbytes

    async def share_deltas(self, version: Version, held: Version) -> dict[str, list[SharedDelta]]:
        """Return the deltas that lead from one version to another, by part, without the parts that have none."""
        found = {part: kept.chain(version, held) for part, kept in self._kept.items()}
        return {part: chain for part, chain in found.items() if chain is not None}

    # -- full checkpoints

    async def save_published(self, step: int, folder: str, part: str, lease: Lease) -> None:
        """Write this node's parts of a leased version into a full checkpoint's staging folder, and report `part`."""
        assert self._coordinators is not None, "register() brought them"
        coordinator, durable = self._coordinators.of(folder), self._is_durable(folder)
        loop = asyncio.get_running_loop()

        def write() -> list[FileTuple]:
            files = [
                self._write_part(lease.slot, part, Path(folder), {}, durable, "explorer/{}.safetensors")
                for part in self._layouts
            ]
            released = asyncio.run_coroutine_threadsafe(self._release(lease), loop)
            if not released.result(self._config.save_timeout_s):
                raise RunError(
                    f"the lease on version {lease.version} expired before it was written; raise sync.lease_s, or lower "
                    "sync.min_rate_mbps"
                )
            return files

        try:
            await self._wait(partial(coordinator.save_sync, write, step, part=part, queues=True))
        finally:  # also where `write` was not called
            await self._release(lease)

    async def _release(self, lease: Lease) -> bool:
        return bool(await self._synchronizer.release(lease.id).reference)

    async def restore_published(self, version: Version, slot: int, folder: str) -> None:
        """Fill a slot from the files of `save_published`, and report its parts as if their ranks had staged them."""
        await self._run(self._read_into, slot, Path(folder))
        for part in self._layouts:
            await self.part_staged(version, slot, part)

    def _read_into(self, slot: int, folder: Path) -> None:
        for part, layout in self._layouts.items():
            with ShardFile(folder / f"{part}.safetensors") as file:
                if not file.layout.lies_as(layout):
                    raise RunError(f"{file.path} has another layout than this run's versions")
                file.read(0, memoryview(self._maps[slot, part])[: layout.nbytes])

    async def reserve_state(self, part: str, nbytes: int) -> tuple[str, list[str]]:
        """Return the file for a rank's training state, and notes for the user; see `StateSlots.reserve`."""
        return await self._wait(self._states.reserve, part, nbytes)

    async def take_state(self, given: StatePart) -> None:
        """Take over a rank's part of a full checkpoint; returns when the part no longer depends on the rank."""
        if self._coordinators is None:
            raise RunError(
                f"the agent of node {self._node} has no checkpoint coordinator, so it cannot save {given.part}"
            )
        coordinator = self._coordinators.of(given.folder)
        await self._wait(partial(self._states.take, given, coordinator, durable=self._is_durable(given.folder)))
        files = units.plural(len(given.files), "file")
        story.info("took over the state of %s of step %d: %s", given.part, given.step, files)

    def _is_durable(self, folder: str) -> bool:
        return self._config.durable and not (self._coordinators is not None and self._coordinators.is_memory(folder))

    async def wait_state_written(self, part: str, timeout_s: float, hurry: bool = False) -> None:
        """Wait until a part's state segment may be used again; `hurry`: training waits for it."""
        await self._wait(partial(self._states.wait_written, part, timeout_s, hurry=hurry))

    async def memory(self) -> dict[str, int]:
        """Return the peak resident bytes of this process, shared slots included."""
        return {"peak_rss": peak_memory(), "pid": os.getpid()}

    async def close(self) -> None:
        """Free the shared memory. May be called again."""
        await self._run(self._states.close)
        await self._run(self._row_processes.close)
        self._server.close()
        await self._run(self._brought.close)
        if self._arena is not None:
            self._chains.clear()
            self._shared.clear()
            self._kept.clear()
            self._maps.clear()
            await self._run(self._arena.close)

    async def _run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tasks, function, *args)

    async def _wait(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._waits, function, *args)


class ObjectFetcher:
    """Parts as Ray's objects (a `PartFetcher`): each node fetches them from the owner's. `timeout_s`: for a part."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def bring(self, wanted: WantedPart, into: PartPieces, tell: Callable[[str], None]) -> None:
        owner, limit_s = wanted.owner, grown(self._timeout_s, wanted.nbytes)
        assert owner is not None, "a part of another node has an owner"
        [shared] = owner.share(wanted.version, wanted.slot, wanted.part).result(limit_s)
        coming: Call[np.ndarray] = Call(shared, owner.who, f"send {wanted}")
        into.fill(coming.result(limit_s).data)


class StateSlots:
    """Segments for the training state of a node's ranks, one per rank, and the writers of their files.

    Args:
        run_key, root, fallback: arguments of `SlotArena.create`.
        timeout_s: timeout of the wait until a part may be written, seconds.
    """

    def __init__(self, run_key: str, root: str, fallback: Path, *, timeout_s: float) -> None:
        self._run_key, self._root, self._fallback = run_key, root, fallback
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._arenas: dict[str, SlotArena] = {}
        self._sizes: dict[str, int] = {}
        self._writes: dict[str, tuple[Future[None], BackgroundWork]] = {}
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="state")

    def reserve(self, part: str, nbytes: int) -> tuple[str, list[str]]:
        """Return the file of a part's segment, at least `nbytes` long, and notes for the user. It is reused.

        Raises:
            SegmentError: there is not enough memory.
        """
        with self._lock:
            arena = self._arenas.get(part)
            if arena is not None and self._sizes[part] >= nbytes:
                return str(arena.path(0, part)), []
            if arena is not None:
                if not self._idle(part):
                    raise RunError(f"the state of {part} grew to {nbytes} bytes while it was being written")
                self._arenas.pop(part).close()
            arena = SlotArena.create(
                f"{self._run_key}-state-{part}", 1, {part: nbytes}, root=self._root, fallback=self._fallback
            )
            self._arenas[part], self._sizes[part] = arena, nbytes
            return str(arena.path(0, part)), list(arena.notes)

    def take(self, given: StatePart, coordinator: Coordinator, *, durable: bool) -> None:
        """Write a part's files in the background; returns when the monitor has let the write begin. `durable`: fsync
        them.
        """
        begun = threading.Event()
        with self._lock:
            if not self._idle(given.part):
                raise RunError(f"{given.part} of an earlier step is still being written")
            work = BackgroundWork(PATIENCE * self._timeout_s)
            future = self._threads.submit(self._write, given, coordinator, durable, begun, work)
            self._writes[given.part] = future, work
        future.add_done_callback(lambda _: begun.set())
        if not begun.wait(self._timeout_s):
            raise WaitTimeout(
                "the checkpoint monitor", f"give {given.part} of step {given.step} its turn", self._timeout_s
            )
        if future.done() and (error := future.exception()) is not None:
            raise RunError(f"{given.part} of step {given.step} was not written: {error}") from error

    def wait_written(self, part: str, timeout_s: float, *, hurry: bool) -> None:
        """Wait until the segment of a part may be used again; errors of its files were reported to the monitor."""
        if part not in self._writes:
            return
        future, work = self._writes[part]
        if hurry:
            work.hurry()
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout_s):
            raise WaitTimeout("the node agent", f"write {part}", timeout_s)

    def close(self) -> None:
        """Free the memory."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    def _idle(self, part: str) -> bool:
        return part not in self._writes or self._writes[part][0].done()

    def _write(
        self,
        given: StatePart,
        coordinator: Coordinator,
        durable: bool,
        begun: threading.Event,
        work: BackgroundWork,
    ) -> None:
        segment = self._arenas[given.part].map(0, given.part) if given.part in self._arenas else b""

        def write() -> list[FileTuple]:
            begun.set()
            with work:
                return [
                    (path, *write_image(Path(given.folder) / path, extents, segment, durable=durable))
                    for path, extents in given.files
                ]

        coordinator.save_sync(write, given.step, part=given.part, queues=True)
