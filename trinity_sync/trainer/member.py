"""A trainer rank's part in versions and checkpoints, the same for every engine.

Collective methods say so: they are called on all ranks, in the same order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar, cast

import ray
import torch
import torch.distributed as dist
from ray.experimental import internal_kv

from trinity_sync.actors.agent_client import AgentClient, FolderCoordinators, StatePart
from trinity_sync.actors.calls import ANSWER_S, Call, this_process
from trinity_sync.actors.rank_client import Broadcast, RankInfo
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.backends.base import DISTRIBUTED, Backend, EngineView, Format, SelfWritingBackend, View
from trinity_sync.backends.meetings import Meetings, RankMeeting
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.folder.lock import writer_of
from trinity_sync.config import build
from trinity_sync.errors import TrinityError, WaitTimeout, grown
from trinity_sync.host.hardware import peak_memory
from trinity_sync.host.logs import log_failure, story
from trinity_sync.host.origin import error_text
from trinity_sync.host.threads import in_background
from trinity_sync.protocol.parts import FileTuple, part_name
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.base import SyncMode
from trinity_sync.tracking import units
from trinity_sync.trainer.worker_spec import WorkerSpec
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import Extent
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.snapshot import Snapshot, StatePlan, plan
from trinity_sync.weights.staging import Sources, TensorCopy, enqueued, pin_segment, stage, unpin_segment


class Member:
    """Stages versions and saves checkpoints. A worker inherits it, and calls `hold` when its engine is up."""

    def hold(self, spec: WorkerSpec, backend: View, rank: int) -> RankInfo:
        """Take the view of an engine that is up; return the facts of this rank."""
        self._spec = spec
        self._sync = build("sync", spec.sync, SyncMode)  # type: ignore[type-abstract]
        self._segments: dict[int, mmap.mmap] = {}
        self._saver: AgentSaver | BackendSaver
        self._stager: WeightStager
        self._backend = backend
        self._rank = rank
        shards = backend.shards()
        self._part = part_name(rank)
        self._layout = PartLayout.build(self._part, shards, spec.bucket_bytes)
        story.info("up: %s, holds %s of the weights", spec.backend.strategy, units.size(self._layout.nbytes))
        return RankInfo(
            rank=rank,
            part=self._part,
            layout=self._layout if shards else None,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            saved={name: saved[:2] for name, saved in backend.saved().items()} if rank == 0 else None,
        )

    def attach(
        self,
        agent: AgentClient,
        paths: dict[int, str],
        synchronizer: SynchronizerClient,
        make_coordinators: Callable[..., FolderCoordinators[CheckpointCoordinator]],
        save_timeout_s: float,
    ) -> None:
        """Connect to the node's agent, its slots, the synchronizer and the checkpoint monitor. `save_timeout_s`: limit
        of the waits for a background save, seconds.
        """
        # The call ends when this process dies. A death in a free run may interrupt no other call.
        self._lifeline = synchronizer.lifeline()
        synchronizer.watch(this_process(f"trainer rank {self._rank}"), [self._lifeline.reference])
        self._segments = {
            slot: map_segment(Path(path), self._layout.nbytes, writable=True) for slot, path in paths.items()
        }
        for segment in self._segments.values():
            pin_segment(segment)
        self._stager = WeightStager(
            self._backend,
            self._layout,
            self._segments,
            agent,
            self._part,
            sync_timeout_s=synchronizer.timeout_s,
        )
        coordinators = make_coordinators(node_id=ray.get_runtime_context().get_node_id(), job_id=f"rank-{self._rank}")
        meetings = Meetings.of_default_group(save_timeout_s)
        if self._spec.backend.writes_own_files:
            backend = cast("SelfWritingBackend", self._backend)
            self._saver = BackendSaver(backend, coordinators, meetings, self._part, lazy=self._spec.lazy_snapshot)
            return
        self._saver = AgentSaver(
            cast("Backend", self._backend),
            agent,
            coordinators,
            meetings,
            self._part,
            writes_metadata=self._rank == 0,
            form=self._spec.checkpoint_format,
            lazy=self._spec.lazy_snapshot,
        )

    # -- versions

    def stage(self, version: Version, slot: int, lazily: bool = False) -> float:
        """Copy this rank's shards into the slot and report to the agent; see `WeightStager.stage`. Collective if the
        engine offloads. Returns seconds in which the trainer was blocked so far.
        """
        blocked = self._stager.stage(version, slot, lazily=lazily)
        how = "began to stage" if lazily else "staged"
        story.info("%s version %s into slot %d: blocked %s", how, version, slot, units.seconds(blocked))
        return blocked

    def send(self, broadcast: Broadcast) -> int:
        """Send this rank's staged part to the explorers of a broadcast; return the bytes sent."""
        return self._sync.send(broadcast, self._part, self._layout, self._segments[broadcast.slot])

    # -- checkpoints

    def save(self, step: int, folder: str) -> float:
        """Begin to save the training state into `folder`, part ``rank-…`` of the step. Collective. Errors fail the step
        at the monitor; nothing is raised. Returns seconds for which the trainer was blocked so far.
        """
        blocked = self._saver.save(step, Path(folder))
        story.info("began to save step %d: stood still %s", step, units.seconds(blocked))
        return blocked

    def save_blocked(self, step: int) -> float:
        """Return the seconds for which the save of `step` blocked training, including the wait of the optimizer's
        step.
        """
        return self._saver.blocked_s(step)

    def load(self, folder: str) -> None:
        """Restore the training state from a full checkpoint's folder. Collective."""
        started = time.perf_counter()
        self._backend.load(Path(folder) / "actor")
        story.info("restored %s in %s", folder, units.seconds(time.perf_counter() - started))

    def writer_of(self, folder: str) -> str | None:
        """Return the writer of a checkpoint folder, to show whether this rank sees the driver's folder."""
        return writer_of(Path(folder))

    def finish_saves(self) -> None:
        """Wait until this rank's saves are written or handed over, without yielding to training; raise the first
        error.
        """
        self._saver.finish()

    def memory(self) -> dict[str, int]:
        """Return the peak resident bytes of this process."""
        return {"peak_rss": peak_memory(), "pid": os.getpid()}


# Copying a rank's part of a version into a slot: at once, or during the next forward and backward.


class WeightStager:
    """Stages versions of one rank. `segments`: slot -> this rank's bytes in it; empty for a rank that holds nothing of
    its own. `sync_timeout_s`: limit of the wait for a copy, seconds.
    """

    def __init__(
        self,
        backend: EngineView,
        layout: PartLayout,
        segments: Mapping[int, mmap.mmap],
        agent: AgentClient,
        part: str,
        *,
        sync_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._layout = layout
        self._segments = segments
        self._agent = agent
        self._part = part
        self._sync_timeout_s = grown(sync_timeout_s, layout.nbytes)
        self._may_be_lazy = backend.deadline == "optimizer_step"
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._copied.set()
        self._blocked_since: float | None = None
        if self._may_be_lazy:
            backend.before_change(self.wait_copied)

    def stage(self, version: Version, slot: int, *, lazily: bool = False) -> float:
        """Copy into the slot and report to the agent. Collective if the engine offloads. Returns seconds in which the
        rank was blocked so far.
        """
        started = time.perf_counter()
        self.wait_copied()
        sources = self._backend.sources()
        if not self._segments:
            return time.perf_counter() - started
        if not (lazily and self._may_be_lazy):
            stage(self._layout, sources, self._segments[slot])
            blocked = time.perf_counter() - started
            self._agent.part_staged(version, slot, self._part, blocked)
            return blocked
        after = enqueued()
        blocked = time.perf_counter() - started
        arguments = (version, slot, sources, after, blocked)
        copying = threading.Thread(target=self._copy, args=arguments, name=f"stage-{version.step}", daemon=True)
        self._copied.clear()
        try:
            copying.start()
        except RuntimeError:  # the limit of threads is reached
            self._copied.set()
            raise
        return blocked

    def wait_copied(self) -> None:
        """Wait until the weights may change. Called on the training thread."""
        with self._lock:
            if self._copied.is_set():
                return
            self._blocked_since = time.perf_counter()
        if not self._copied.wait(self._sync_timeout_s):
            raise WaitTimeout("the snapshot", f"copy the weights of {self._part}", self._sync_timeout_s)

    def _copy(
        self, version: Version, slot: int, sources: Sources, after: torch.cuda.Event | None, blocked: float
    ) -> None:
        error = None
        try:
            with torch.no_grad():
                stage(self._layout, sources, self._segments[slot], after)
        except Exception as problem:
            log_failure(f"staging version {version}", problem)
            error = error_text(problem)
        with self._lock:
            if self._blocked_since is not None:
                blocked += time.perf_counter() - self._blocked_since
            self._blocked_since = None
            self._copied.set()
        if error is None:
            self._agent.part_staged(version, slot, self._part, blocked)
        else:
            self._agent.part_failed(version, self._part, error)


# The process group of the trainer's ranks. In verl's way the driver chooses a free port, which rank 0 opens up to a
# minute later, after its imports; if another program takes the port meanwhile, the run fails. Here rank 0 opens any
# free port, and the others read its address from Ray's key-value store.


_POLL_S = 0.05


def join_group(backend: str, timeout_s: float) -> None:
    """Make the default process group, and set its address in the environment, where verl reads it. All ranks call it,
    in actors of a `TrainerGroup`. `timeout_s`: limit of the wait for rank 0, and of the group's collectives, seconds.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout_s)
    key = f"trinity-sync/{os.environ['WG_PREFIX']}"  # of this group only
    if rank == 0:
        host = ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, ranks, is_master=True, timeout=limit, wait_for_workers=False)
        internal_kv._internal_kv_put(key, f"{host} {store.port}")
    else:
        host, port = _wait_for_address(key, timeout_s)
        store = dist.TCPStore(host, port, ranks, is_master=False, timeout=limit, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(store.port))
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    finally:
        if rank == 0:
            internal_kv._internal_kv_del(key)


def _wait_for_address(key: str, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while (found := internal_kv._internal_kv_get(key)) is None:
        if time.monotonic() > deadline:
            raise WaitTimeout("trainer rank 0", "open a port for the other ranks (backend.timeout_s)", timeout_s)
        time.sleep(_POLL_S)
    host, port = found.decode().split()
    return host, int(port)


# A rank's part of full saves: the ranks begin each save together, and a failed save does not end training. An error of
# one rank goes to the monitor, which fails the step, and to the other ranks, so that none waits for it in a collective
# call. The next save begins anew. `AgentSaver` is for most backends, `BackendSaver` for one that writes its own files.


B = TypeVar("B", bound=Backend | SelfWritingBackend)


class Saver(ABC, Generic[B]):
    """Saves of one rank. All methods are collective."""

    def __init__(
        self,
        backend: B,
        coordinators: FolderCoordinators[CheckpointCoordinator],
        meetings: Meetings,
        part: str,
        *,
        lazy: bool,
    ) -> None:
        self._backend = backend
        self._coordinators = coordinators
        self._coordinator = coordinators.checkpoints  # of the newest save
        self._meetings = meetings
        self._timeout_s = meetings.timeout_s
        self._part = part
        self._lazy = lazy and backend.deadline == "optimizer_step"
        self._copying: Snapshot | TensorCopy | None = None
        self._step = -1
        self._blocked_s = 0.0
        if self._lazy:
            backend.before_change(self._wait_copied)

    def prepare(self) -> None:
        """Prepare for saves, after a training step and before the first save."""

    def save(self, step: int, folder: Path) -> float:
        """Begin to save the state after `step` into the staging folder `folder`. Errors fail the step at the monitor;
        nothing is raised. Returns seconds for which training was blocked so far; see `blocked_s`.
        """
        started = time.perf_counter()
        self._coordinator = self._coordinators.of(folder)
        try:
            meeting = self._meetings.begin(f"step {step}", lambda: self._ready(step))
            try:
                self._begin(step, folder, meeting)
            except Exception as error:
                meeting.give_up(error)
                raise
        except Exception as error:
            self._coordinator.fail(step, self._part, error)
        self._step, self._blocked_s = step, time.perf_counter() - started
        return self._blocked_s

    def blocked_s(self, step: int) -> float:
        """Return the seconds for which the newest save blocked training; 0 for an older step."""
        return self._blocked_s if step == self._step else 0.0

    def finish(self) -> None:
        """Wait until this rank's saves are written or handed over, without yielding to training any more; raise the
        error of the newest save.
        """
        for coordinator in self._coordinators.all():
            coordinator.wait_all()

    def _ready(self, step: int) -> None:
        """Wait until the save before is written or handed over."""
        self._wait_copied()
        for coordinator in self._coordinators.all():
            coordinator.settle()

    @abstractmethod
    def _begin(self, step: int, folder: Path, meeting: RankMeeting) -> None:
        """Copy the state, and write it in the background."""

    def _wait_copied(self) -> None:
        """Block the training thread until the state may change."""
        if self._copying is not None:
            self._blocked_s += self._copying.wait_until_copied(self._timeout_s)
            self._copying = None


class AgentSaver(Saver[Backend]):
    """Saves through shared memory: the rank copies its state into a segment of the node agent, which writes the
    files.
    """

    def __init__(
        self,
        backend: Backend,
        agent: AgentClient,
        coordinators: FolderCoordinators[CheckpointCoordinator],
        meetings: Meetings,
        part: str,
        *,
        writes_metadata: bool,
        form: Format,
        lazy: bool,
    ) -> None:
        super().__init__(backend, coordinators, meetings, part, lazy=lazy)
        self._agent = agent
        self._writes_metadata = writes_metadata
        self._format: Format = form
        self._reserved = -1
        self._reserving: Call[tuple[str, list[str]]] | None = None
        self._written: Call[None] | None = None
        self._segment: mmap.mmap | None = None
        self._mapping: Future[None] | None = None

    def prepare(self) -> None:
        """Let the agent make the segment before the first save, and map and page-lock it in the background. The
        optimizer has to have its states.
        """
        if self._reserved < 0:
            nbytes = plan(self._backend.state(self._format)).nbytes
            self._reserve(nbytes)
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

            def map_state() -> None:
                if device is not None:
                    torch.cuda.set_device(device)  # of this thread
                self._map(nbytes)

            with contextlib.suppress(RuntimeError):  # the limit of threads is reached: the first save maps it
                self._mapping = in_background(map_state, "map-state")

    def finish(self) -> None:
        super().finish()
        self._written = self._ask_written(hurry=True)

    def _ready(self, step: int) -> None:
        super()._ready(step)
        self._wait_written()

    def _begin(self, step: int, folder: Path, meeting: RankMeeting) -> None:
        planned = plan(self._backend.state(self._format))
        snapshot = Snapshot(planned, self._segment_for(planned), f"the state of step {step}")
        self._coordinator.save_async(
            "full",
            lambda: self._hand_over(snapshot, step, folder, meeting),
            step,
            part=self._part,
            hands_over=True,
            on_failure=meeting.give_up,
        )
        self._copying = snapshot if self._lazy else None  # a complete copy is not kept for the next save
        snapshot.copy(in_background=self._lazy)  # last, as it competes for the processor with the code after it

    def _wait_written(self) -> None:
        """Wait until the agent has written the save before: there is one segment. The agent was asked in the background
        after the hand-over, so its answer is usually here.
        """
        answer, self._written = self._written, None
        if answer is not None and answer.is_answered():
            return
        self._ask_written(hurry=True).result(self._timeout_s + ANSWER_S)

    def _ask_written(self, *, hurry: bool) -> Call[None]:
        return self._agent.wait_state_written(self._part, self._timeout_s, hurry=hurry)

    def _hand_over(self, snapshot: Snapshot, step: int, folder: Path, meeting: RankMeeting) -> None:
        names = snapshot.names
        target = folder / "actor"
        target.mkdir(parents=True, exist_ok=True)
        files: list[tuple[str, Sequence[Extent]]] = [
            (str(Path(image.path).relative_to(folder)), image.extents)
            for image in snapshot.file_images(target, self._timeout_s, names - {DISTRIBUTED})
        ]
        if DISTRIBUTED in names:
            copied = partial(snapshot.copied, timeout_s=self._timeout_s)
            written = self._backend.write_distributed(snapshot.live(DISTRIBUTED), copied, target / DISTRIBUTED, meeting)
            files += [(str(path.relative_to(folder)), ()) for path in written]
        if self._writes_metadata:
            files += [(str(path.relative_to(folder)), ()) for path in self._backend.write_metadata(target)]
        state = StatePart(part=self._part, step=step, folder=str(folder), files=files)
        self._agent.take_state(state).result(self._timeout_s + ANSWER_S)
        self._written = self._ask_written(hurry=False)

    def _reserve(self, nbytes: int) -> None:
        self._reserved = nbytes
        self._reserving = self._agent.reserve_state(self._part, nbytes)

    def _segment_for(self, planned: StatePlan) -> mmap.mmap:
        if self._mapping is not None:
            limit = self._timeout_s + ANSWER_S
            if not wait([self._mapping], limit).done:
                raise WaitTimeout("the node agent", "make room for the training state", limit)
            error, self._mapping = self._mapping.exception(), None
            if isinstance(error, WaitTimeout) and self._reserving is not None and not self._reserving.has_ended():
                raise error
        self._map(planned.nbytes)
        assert self._segment is not None, "_map() made it"
        return self._segment

    def _map(self, nbytes: int) -> None:
        if self._segment is not None and len(self._segment) >= nbytes:
            return
        if self._segment is not None:
            unpin_segment(self._segment)
            self._segment = None
        if self._reserved < nbytes:
            self._reserve(nbytes)
        assert self._reserving is not None, "_reserve() asked"
        try:
            path, notes = self._reserving.result(self._timeout_s)
        except TrinityError:
            self._reserved = 0  # the next save may find room
            raise
        for note in notes:
            print(note, file=sys.stderr)
        # to page-lock the pages brings them in place, without the interpreter's lock
        self._segment = map_segment(Path(path), nbytes, writable=True, populate=not torch.cuda.is_available())
        if not pin_segment(self._segment) and torch.cuda.is_available():  # the driver refuses it, as for a file
            self._segment = map_segment(Path(path), nbytes, writable=True)


_ACTOR = "actor"


class BackendSaver(Saver[SelfWritingBackend]):
    """Saves of a backend that copies and writes its own files (`SelfWritingBackend`)."""

    def _begin(self, step: int, folder: Path, meeting: RankMeeting) -> None:
        self._copying, write = self._backend.begin_save(
            folder / _ACTOR, meeting, lazily=self._lazy, durable=self._coordinator.durable
        )

        def written() -> list[Path | FileTuple]:
            return [file if isinstance(file, Path) else (f"{_ACTOR}/{file[0]}", *file[1:]) for file in write()]

        self._coordinator.save_async("full", written, step, part=self._part, on_failure=meeting.give_up)
