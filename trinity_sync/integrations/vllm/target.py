"""The explorer's half of a load into vLLM. A version arrives in every worker while the engine generates; then
generation pauses, vLLM's update session loads it into the model layer by layer, and generation continues.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from trinity_sync.actors.explorer_client import EngineDied
from trinity_sync.actors.rank_client import Broadcast, receivers
from trinity_sync.errors import RunError
from trinity_sync.host.logs import story
from trinity_sync.integrations.vllm.arrivals import Arrival, Arrived, Shapes
from trinity_sync.integrations.vllm.control import EngineControl, OnUpdate
from trinity_sync.integrations.vllm.worker_link import WorkerLink
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import ExplorerSide
from trinity_sync.sync.memory import fetch
from trinity_sync.sync.weight_loader import LoadResult, check_digest, damage, lost_lease
from trinity_sync.weights.apply import ChecksumError, Receiver
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.packing import TOGETHER, WholeTensors
from trinity_sync.weights.shards import listed
from trinity_sync.weights.slots import DEFAULT_ROOT, SlotArena, remove_stale
from trinity_sync.weights.tensors import to_torch


class WorkerTarget:
    """A vLLM engine as a `WeightTarget`.

    After an error in the update session the weights are of several versions, so the engine stays paused until another
    version is loaded completely.

    Args:
        workers: number of processes that hold its weights (tensor times pipeline parallel).
        tensors: the tensors of a version, as the engine takes them.
        start_timeout_s: limit for the workers to connect, seconds.
        on_switch: called with each loaded version, just before generation continues.

    Attributes:
        paused_s: length of the engine's last pause for a version, seconds.
    """

    def __init__(
        self,
        control: EngineControl,
        *,
        workers: int,
        tensors: Shapes,
        side: ExplorerSide,
        verify: str,
        on_update: OnUpdate,
        start_timeout_s: float,
        on_switch: Callable[[Version], None] = lambda version: None,
    ) -> None:
        self._control = control
        self._on_switch = on_switch
        self._side = side
        self._on_update = on_update
        self._verify = verify
        self._known: set[str] = set()
        self._checked: frozenset[str] = frozenset()
        self._copies = _PartCopies(side)
        self._dtypes = {name: to_torch(dtype) for name, (dtype, _) in tensors.items()}
        self._together = SharedSegment()
        self._place: str | None = None
        self._broken = False  # its weights are of several versions
        self.paused_s = 0.0
        self._expected = Receiver(
            {name: torch.empty(shape, dtype=self._dtypes[name], device="meta") for name, (_, shape) in tensors.items()}
        )
        self._link = WorkerLink(f"vLLM of {side.name}", workers)
        names = receivers(side.name, workers)
        told = (side.node, dict(tensors), dict(side.settings), verify, side.timeout_s)
        try:
            control.connect(self._link.address)
            self._link.wait(start_timeout_s)
            self._workers_map = all(self._link.ask("expect", lambda rank: (names[rank], *told), start_timeout_s))
        except BaseException:
            self._link.close()
            raise

    def check(self, lease: Lease) -> None:
        """Check names and shapes, and make room for split tensors. Done once per set of layouts."""
        digests = frozenset(info.layout for info in lease.parts.values())
        if digests != self._checked:
            layouts = [self._side.layouts.get(info) for info in lease.parts.values()]
            self._expected.check(layouts)
            self._place = self._make_room(layouts) if self._workers_map else None
            self._checked = digests

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Have a version arrive, then load it into the model."""
        with self._kept(lease) as go_on:
            taken = self._receive(lease, broadcast)
            go_on()
            self._put(lease, taken, give_up, go_on)
            self._let_go()
        return taken

    @property
    def workers(self) -> list[int]:
        """The pids of the workers, in the order of their ranks."""
        return self._link.workers

    def close(self) -> None:
        """Disconnect the workers and free the memory."""
        self._link.close()
        self._copies.close()
        self._together.close()

    def _make_room(self, layouts: Sequence[PartLayout]) -> str | None:
        """Return the file in which workers assemble split tensors, None without such tensors."""
        together = WholeTensors(layouts, self._dtypes).together
        if not together.nbytes:
            self._together.close()
            return None
        return str(self._together.laid_out(together).path(0, TOGETHER))

    def _receive(self, lease: Lease, broadcast: Broadcast | None) -> LoadResult:
        layouts = [self._side.layouts.get(info) for info in lease.parts.values()]
        new = [layout for layout in layouts if layout.digest not in self._known]
        here = lease if broadcast is not None or lease.location is not None else self._copies.of(lease)
        arrival = Arrival(replace(here, digest=None), broadcast, new, self._place)  # the digest is compared below
        answers = self._link.ask("take the version", lambda rank: (arrival,), self._side.timeout_s)
        self._known.update(layout.digest for layout in new)
        arrived = [cast(Arrived, answer) for answer in answers]
        digest = self._prove(lease, layouts, arrived) if self._verify == "full" else None
        # a slot holds the version only during the lease; a file does not change
        return LoadResult(arrived[0].moved, digest, reread=arrived[0].reread and lease.location is None)

    def _prove(self, lease: Lease, layouts: Sequence[PartLayout], arrived: Sequence[Arrived]) -> str:
        """Return the version digest from all workers' tensors.

        Raises:
            ChecksumError: it differs from the published one, or workers have different bytes of a tensor.
        """
        held: dict[str, bytes] = {}
        for one in arrived:
            if differing := [name for name, digest in one.digests.items() if held.setdefault(name, digest) != digest]:
                raise ChecksumError(f"vLLM's workers have different bytes of {listed(sorted(differing))}")
        published = {shard.name: shard for layout in layouts for shard in layout.shards}
        digest = version_digest((name, shard.dtype, shard.shape, held[name]) for name, shard in published.items())
        check_digest(lease, digest, lambda: damage(self._side.layouts, lease.version, held))
        return digest

    def _kept(self, lease: Lease) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Lease the version's folder while workers read it; see `LeaseFolder`."""
        if lease.location is None or self._side.lease_folder is None:
            return nullcontext(lambda: None)
        return self._side.lease_folder(Path(lease.location), lease.version)

    def _put(self, lease: Lease, taken: LoadResult, give_up: Callable[[], None], go_on: Callable[[], None]) -> None:
        control, version = self._control, str(lease.version)
        began = time.perf_counter()
        try:
            control.pause(self._on_update)
        except RunError:
            if not self._broken:
                with contextlib.suppress(RunError):
                    control.resume()
            raise
        give_up()
        self._broken = True
        try:
            control.start_update(version)
            go_on()
            control.update(version)
            go_on()
            control.finish_update(version)
            self._spot_check(version)
            if not (taken.proves(lease) or self._side.still_leased(lease.id)):
                raise lost_lease(self._side.name, lease)
        except EngineDied:
            raise
        except RunError as error:
            # some workers may still be in the session, and no other can begin before it ends
            with contextlib.suppress(RunError):
                control.update(None)
            with contextlib.suppress(RunError):
                self._let_go()
            raise error
        self._on_switch(lease.version)
        self._broken = False
        control.resume()
        self.paused_s = time.perf_counter() - began

    def _let_go(self) -> None:
        """Have the workers drop the version's bytes."""
        self._link.ask("let go", lambda rank: (), self._side.timeout_s)

    def _spot_check(self, version: str) -> None:
        """Compare weights in the engine with the version."""
        for rank, differing in enumerate(self._link.ask("show", lambda rank: (version,), self._side.timeout_s)):
            if differing:
                names = listed(cast(list[str], differing))
                raise RunError(f"worker {rank} of vLLM was given version {version}, but holds other values of {names}")


class _PartCopies:
    """Parts of other nodes, each copied to a file of this node that each version replaces."""

    def __init__(self, side: ExplorerSide) -> None:
        self._side = side
        self._folder: Path | None = None

    def of(self, lease: Lease) -> Lease:
        """Return the lease with parts of other nodes named by their copies."""
        return replace(lease, parts={name: self._here(lease, info) for name, info in lease.parts.items()})

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _here(self, lease: Lease, info: PartInfo) -> PartInfo:
        if info.node == self._side.node:
            return info
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trinity-parts-"))
        path = self._folder / info.part
        coming = path.with_suffix(".coming")
        # a late worker may still read the earlier copy
        coming.write_bytes(fetch(self._side.agents[info.node], lease, info, self._side.timeout_s))
        coming.replace(path)
        return replace(info, node=self._side.node, path=str(path))


class SharedSegment:
    """A segment of shared memory that vLLM's workers map, replaced when the layout changes. `close` deletes it; that of
    a killed process is deleted when the next one is made.
    """

    def __init__(self) -> None:
        self._arena: SlotArena | None = None
        self._layout: PartLayout | None = None

    def laid_out(self, layout: PartLayout) -> SlotArena:
        """Return an arena of one slot with the layout's part.

        Raises:
            SegmentError: there is no room for it.
        """
        if self._arena is None or self._layout != layout:
            self.close()
            elsewhere = Path(tempfile.gettempdir())
            for root in (DEFAULT_ROOT, elsewhere):
                remove_stale(root)  # of killed programs
            key = f"vllm-{secrets.token_hex(8)}"
            self._arena = SlotArena.create(key, 1, {layout.part: layout.nbytes}, fallback=elsewhere)
            for note in self._arena.notes:
                story.warning("%s", note)
            self._layout = layout
        return self._arena

    def close(self) -> None:
        """Free the memory; it lasts until all workers have unmapped it."""
        if self._arena is not None:
            self._arena.close()
        self._arena = None
