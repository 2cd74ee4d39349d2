"""A trainer rank's part in versions and checkpoints, the same for every engine.

Collective methods say so: they are called on all ranks, in the same order.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import ray
import torch

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import this_process
from trinity_sync.actors.rank_client import Broadcast, RankInfo
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.backends.base import Backend, EngineView, SelfWritingBackend, View
from trinity_sync.backends.meetings import Meetings
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.folder.lock import writer_of
from trinity_sync.config import build
from trinity_sync.errors import WaitTimeout, grown
from trinity_sync.host.hardware import peak_memory
from trinity_sync.host.logs import log_failure, story
from trinity_sync.host.origin import error_text
from trinity_sync.protocol.parts import part_name
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.base import SyncMode
from trinity_sync.tracking import units
from trinity_sync.trainer.saver import AgentSaver, BackendSaver
from trinity_sync.trainer.worker_spec import WorkerSpec
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.staging import Sources, pin_segment, stage


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
        make_coordinator: Callable[..., CheckpointCoordinator],
        timeout_s: float,
    ) -> None:
        """Connect to the node's agent, its slots, the synchronizer and the checkpoint monitor. `timeout_s`: limit of
        the waits for a background save, seconds.
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
            timeout_s=synchronizer.timeout_s,
        )
        coordinator = make_coordinator(node_id=ray.get_runtime_context().get_node_id(), job_id=f"rank-{self._rank}")
        meetings = Meetings.of_default_group(timeout_s)
        if self._spec.backend.writes_own_files:
            backend = cast("SelfWritingBackend", self._backend)
            self._saver = BackendSaver(backend, coordinator, meetings, self._part, lazy=self._spec.lazy_snapshot)
            return
        self._saver = AgentSaver(
            cast("Backend", self._backend),
            agent,
            coordinator,
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
    its own. `timeout_s`: limit of the wait for a copy, seconds.
    """

    def __init__(
        self,
        backend: EngineView,
        layout: PartLayout,
        segments: Mapping[int, mmap.mmap],
        agent: AgentClient,
        part: str,
        *,
        timeout_s: float,
    ) -> None:
        self._backend = backend
        self._layout = layout
        self._segments = segments
        self._agent = agent
        self._part = part
        self._timeout_s = grown(timeout_s, layout.nbytes)
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
        self._copied.clear()
        blocked = time.perf_counter() - started
        arguments = (version, slot, sources, blocked)
        threading.Thread(target=self._copy, args=arguments, name=f"stage-{version.step}", daemon=True).start()
        return blocked

    def wait_copied(self) -> None:
        """Wait until the weights may change. Called on the training thread."""
        with self._lock:
            if self._copied.is_set():
                return
            self._blocked_since = time.perf_counter()
        if not self._copied.wait(self._timeout_s):
            raise WaitTimeout("the snapshot", f"copy the weights of {self._part}", self._timeout_s)

    def _copy(self, version: Version, slot: int, sources: Sources, blocked: float) -> None:
        error = None
        try:
            with torch.no_grad():
                stage(self._layout, sources, self._segments[slot])
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
