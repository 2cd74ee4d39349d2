"""The explorer's half of a load into vLLM. A version arrives while the engine generates; then generation pauses, the
engine loads the version into its model, and generation continues.

`WorkerTarget` is for engines with our plug-in: the version arrives in every worker, and vLLM's update session loads it
layer by layer. `FileTarget` is for servers without it: the version is written to a safetensors file in shared memory,
which the server reloads and which is deleted then. The file is mapped as tensors, so versions are checked as in any
other load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.actors.rank_client import Broadcast, receivers
from trinity_sync.checkpoint.export import by_width, header, nbytes
from trinity_sync.checkpoint.reading import TensorInfo
from trinity_sync.errors import RunError, grown
from trinity_sync.integrations.vllm.control import EngineControl, OnUpdate
from trinity_sync.integrations.vllm.worker_link import WorkerClient, WorkerLink
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.arrivals import Arrival, ArrivalReport, Shapes, SharedSegment, engine_memory
from trinity_sync.sync.base import ExplorerSide, LayoutCache, LocalCopies, PartMaps, SyncMode
from trinity_sync.sync.maps import SlotMaps
from trinity_sync.sync.memory import PartCopies
from trinity_sync.sync.pieces import PIECE_BYTES, PartPieces, PieceServer, WantedPart
from trinity_sync.sync.weight_loader import LiveTensors, LoadResult, check_digest, damage, lost_lease
from trinity_sync.weights.apply import ChecksumError, Receiver
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.packing import TOGETHER, WholeTensors
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import byte_tensor, to_torch

if TYPE_CHECKING:
    from trinity_sync.integrations.vllm.server import HttpControl

_FILE = "model.safetensors"


class EngineTarget:
    """The base of both.

    After an error in the load the weights are of several versions, so the engine stays paused until another version is
    loaded completely. `on_switch`: called with each loaded version, just before generation continues. `paused_s`:
    length of the engine's last pause for a version, seconds.
    """

    def __init__(
        self,
        control: EngineControl,
        side: ExplorerSide,
        on_update: OnUpdate,
        on_switch: Callable[[Version], None] = lambda version: None,
    ) -> None:
        self._control = control
        self._side = side
        self._on_update = on_update
        self._on_switch = on_switch
        self._broken = False  # its weights are of several versions
        self.paused_s = 0.0

    @contextmanager
    def _paused(self, lease: Lease, taken: LoadResult, give_up: Callable[[], None]) -> Iterator[None]:
        """Pause generation for a load that the caller does; after it, check that the lease has lasted."""
        began = time.perf_counter()
        try:
            self._control.pause(self._on_update)
        except RunError:
            if not self._broken:
                with suppress(RunError):
                    self._control.resume()
            raise
        give_up()
        self._broken = True
        yield
        if not (taken.proves(lease) or self._side.still_leased(lease.id)):
            raise lost_lease(self._side.name, lease)
        self._on_switch(lease.version)
        self._broken = False
        self._control.resume()
        self.paused_s = time.perf_counter() - began


class WorkerTarget(EngineTarget):
    """A vLLM engine as a `WeightTarget`.

    Args:
        workers: number of processes that hold its weights (tensor times pipeline parallel).
        tensors: the tensors of a version, as the engine takes them.
        mode: the sync mode, whose `maps` are sent to the workers.
        host: address of this machine for workers on others; None: there are none.
        start_timeout_s: limit for the workers to connect, seconds.
        on_switch: as of `EngineTarget`.
        copies: of parts that workers cannot map where they are; None: of parts on other nodes.
    """

    def __init__(
        self,
        control: EngineControl,
        *,
        workers: int,
        tensors: Shapes,
        mode: SyncMode,
        side: ExplorerSide,
        verify: str,
        on_update: OnUpdate,
        start_timeout_s: float,
        on_switch: Callable[[Version], None] = lambda version: None,
        copies: LocalCopies | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(control, side, on_update, on_switch)
        self._verify = verify
        self._known: set[str] = set()
        self._checked: frozenset[str] = frozenset()
        self._copies = copies or PartCopies(side)
        self._dtypes = {name: to_torch(dtype) for name, (dtype, _) in tensors.items()}
        self._together = SharedSegment()
        self._place: str | None = None
        self._expected = Receiver(
            {name: torch.empty(shape, dtype=self._dtypes[name], device="meta") for name, (_, shape) in tensors.items()}
        )
        self._link = WorkerLink(f"vLLM of {side.name}", workers, host)
        names, layouts = receivers(side.name, workers), LayoutCache({}, side.timeout_s)
        maps = mode.maps(replace(side, agents={}, layouts=layouts))  # workers reach no agent
        self._workers_map = maps is not None
        self._sender: PartSender | None = None
        self._giver = self._link.address.key
        try:
            control.connect(self._link.address)
            self._link.wait(start_timeout_s)
            if self._link.remote and (here := mode.maps(side)) is not None:
                self._sender, maps = PartSender(self._link, here, side), SlotMaps(layouts)
            self._link.ask(
                WorkerClient.expect,
                start_timeout_s,
                self._giver,
                names,
                side.node,
                dict(tensors),
                layouts,
                maps,
                {} if self._workers_map else dict(side.settings),  # has classes that a receiver lacks
                verify,
                side.timeout_s,
            )
        except BaseException:
            self._link.close()
            raise

    def check(self, lease: Lease) -> None:
        """Check names and shapes, and make room for split tensors. Done once per set of layouts."""
        digests = frozenset(info.layout for info in lease.parts.values())
        if digests != self._checked:
            layouts = [self._side.layouts.get(info) for info in lease.parts.values()]
            self._expected.check(layouts)
            together = WholeTensors(layouts, self._dtypes).together
            self._together_bytes = together.nbytes
            self._place = self._make_room(together) if self._workers_map and self._sender is None else None
            self._checked = digests

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Have a version arrive, then load it into the model."""
        here = lease if broadcast is not None else self._copies.localize(lease)
        with self._kept(here) as go_on:
            if self._sender is not None:
                here, self._place = self._sender.send(here, self._together_bytes)
            taken = self._receive(lease, here, broadcast)
            go_on()
            try:
                with self._paused(lease, taken, give_up):
                    self._put(str(lease.version), lease.nbytes, go_on)
            except EngineDeathError:
                raise
            except RunError:
                with suppress(RunError):
                    self._let_go()
                raise
            self._let_go()
        return taken

    @property
    def workers(self) -> list[int]:
        """The pids of the workers, in the order of their ranks."""
        return self._link.workers

    def close(self) -> None:
        """Disconnect the workers and free the memory."""
        if self._sender is not None:
            self._sender.close()
        self._link.close()
        self._copies.close()
        self._together.close()

    def _make_room(self, together: PartLayout) -> str | None:
        """Return the file in which workers assemble split tensors, None without such tensors."""
        if not together.nbytes:
            self._together.close()
            return None
        return str(self._together.laid_out(together).path(0, TOGETHER))

    def _receive(self, lease: Lease, here: Lease, broadcast: Broadcast | None) -> LoadResult:
        layouts = [self._side.layouts.get(info) for info in lease.parts.values()]
        new = [layout for layout in layouts if layout.digest not in self._known]
        arrival = Arrival(replace(here, digest=None), broadcast, new, self._place)  # the digest is compared below
        arrived = self._link.ask(WorkerClient.take, grown(self._side.timeout_s, lease.nbytes), self._giver, arrival)
        self._known.update(layout.digest for layout in new)
        digest = self._prove(lease, layouts, arrived) if self._verify == "full" else None
        # a slot holds the version only during the lease; a file does not change
        moved = arrived[0].moved if self._copies.moved is None else self._copies.moved
        in_slot = lease.location is None and self._copies.moved is None and self._sender is None
        apply_s = arrived[0].apply_s + self._copies.apply_s  # one of them
        return LoadResult(moved, digest, arrived[0].reread and in_slot, apply_s)

    def _prove(self, lease: Lease, layouts: Sequence[PartLayout], arrived: Sequence[ArrivalReport]) -> str:
        """Return the version digest from all workers' tensors. Raises ChecksumError: it differs from the published one,
        or workers have different bytes of a tensor.
        """
        held: dict[str, bytes] = {}
        for one in arrived:
            if differing := [name for name, digest in one.digests.items() if held.setdefault(name, digest) != digest]:
                raise ChecksumError(f"vLLM's workers have different bytes of {listed(sorted(differing))}")
        published = {shard.name: shard for layout in layouts for shard in layout.shards}
        digest = version_digest((name, shard.dtype, shard.shape, held[name]) for name, shard in published.items())
        check_digest(lease, digest, lambda: damage(self._side.layouts, lease.version, held))
        return digest

    def _kept(self, lease: Lease) -> AbstractContextManager[Callable[[], None]]:
        """Lease the version's folder while workers read it; see `LeaseFolder`."""
        if lease.location is None or self._side.lease_folder is None:
            return nullcontext(lambda: None)
        return self._side.lease_folder(Path(lease.location), lease.version)

    def _put(self, version: str, nbytes: int, go_on: Callable[[], None]) -> None:
        try:
            self._control.start_update(version)
            go_on()
            self._control.update(version, nbytes)
            go_on()
            self._control.finish_update(version)
            self._spot_check(version)
        except EngineDeathError:
            raise
        except RunError:
            # some workers may still be in the session, and no other can begin before it ends
            with suppress(RunError):
                self._control.update(None)
            raise

    def _let_go(self) -> None:
        """Have the workers drop the version's bytes."""
        self._link.ask(WorkerClient.let_go, self._side.timeout_s, self._giver)

    def _spot_check(self, version: str) -> None:
        """Compare weights in the engine with the version."""
        shown = self._link.ask(WorkerClient.show, self._side.timeout_s, self._giver, version)
        for rank, differing in enumerate(shown):
            if differing:
                raise RunError(
                    f"worker {rank} of vLLM was given version {version}, but holds other values of {listed(differing)}"
                )


class PartSender:
    """Serves the parts of versions to workers on another machine, where worker 0 fetches them for all. `maps`: of this
    process.
    """

    def __init__(self, link: WorkerLink, maps: PartMaps, side: ExplorerSide) -> None:
        self._link, self._maps, self._side = link, maps, side
        self._stall_s = grown(side.timeout_s, PIECE_BYTES, more_s=-side.timeout_s * 3 / 4)
        key = link.address.key
        self._server = PieceServer(str(link.address.host), bytes.fromhex(key), side.name, self._stall_s)

    def send(self, lease: Lease, together: int) -> tuple[Lease, str | None]:
        """Return the lease with the parts named by their copies there, and a file there of `together` bytes."""
        wanted = []
        for layout, data, _ in self._maps.map(lease):
            held = PartPieces(lease.version, memoryview(data)[: layout.nbytes], whole=True)
            self._server.hold(0, layout.part, held)
            wanted.append(WantedPart(lease.version, 0, layout.part, layout.nbytes, None, lease.again))
        limit_s = grown(self._side.timeout_s, lease.nbytes)
        key, source = self._link.address.key, self._server.source
        fetched, *_ = self._link.ask(WorkerClient.fetch, limit_s, key, source, wanted, together, self._stall_s)
        *paths, place = fetched
        found = dict(zip((one.part for one in wanted), paths, strict=True))
        parts = {part: replace(info, path=found[part]) for part, info in lease.parts.items()}
        return replace(lease, parts=parts, location=None), place if together else None

    def close(self) -> None:
        """Serve no more."""
        self._server.close()


class FileTarget(EngineTarget):
    """A server as a `WeightTarget` that takes versions from files. vLLM may not recover from an error in the reload,
    and has to be restarted then. `control`: of the server, which is on this node and runs as the same user. `tensors`:
    the tensors of a version, with their dtypes in the file. `verify`: `sync.verify`; with ``full`` the digest is that
    of the file's tensors.
    """

    def __init__(
        self, control: HttpControl, *, tensors: Shapes, mode: SyncMode, side: ExplorerSide, verify: str
    ) -> None:
        super().__init__(control, side, "wait")
        infos = {name: TensorInfo(*described) for name, described in tensors.items()}
        self._infos = {name: infos[name] for name in by_width(infos)}
        self._server = control
        self._transport = mode.transport(side)
        self._verify = verify
        self._expected = self._into(
            {
                name: torch.empty(info.shape, dtype=to_torch(info.dtype), device="meta")
                for name, info in self._infos.items()
            }
        )

    def check(self, lease: Lease) -> None:
        """Check names and shapes. Done once per set of layouts."""
        self._expected.check(lease)

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Write a version to a file while the server generates, then have the server read it."""
        with self._file() as (folder, tensors):
            target = self._into(tensors)
            target.check(lease)
            taken = target.take(lease, broadcast, lambda: None)
            with self._paused(lease, taken, give_up):
                self._reload(folder, str(lease.version), lease.nbytes)
        return taken

    def _reload(self, folder: Path, version: str, nbytes: int) -> None:
        try:
            self._server.reload(folder, version, nbytes)
        except EngineDeathError:
            raise
        except RunError as error:
            raise RunError(
                f"{error}; it stays paused until a version is loaded completely, or it is restarted. It has to run on "
                "the explorer's node, as the same user, to read the file"
            ) from error

    def _into(self, tensors: Mapping[str, torch.Tensor]) -> LiveTensors:
        return LiveTensors(tensors, self._transport, self._side.layouts, self._verify)

    @contextmanager
    def _file(self) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        """Yield a folder with a safetensors file, and the tensors in the file."""
        begin = header(self._infos)
        size = len(begin) + sum(nbytes(info) for info in self._infos.values())
        with engine_memory(f"server-{os.getpid()}", _FILE, size) as arena:
            mapped = arena.map(0, _FILE)
            mapped[: len(begin)] = begin
            data = byte_tensor(memoryview(mapped))[len(begin) :]
            parts = data.split([nbytes(info) for info in self._infos.values()])
            tensors = {
                name: part.view(to_torch(info.dtype)).view(info.shape)
                for (name, info), part in zip(self._infos.items(), parts, strict=True)
            }
            yield arena.path(0, _FILE).parent, tensors
