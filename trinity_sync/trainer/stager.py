"""One rank's share of a version: the weights copied into a slot, at once or beside the next forward and backward.

Copied lazily, a thread copies while the rank trains on, and the optimizer's step waits for what is left: until then the
weights do not change. How long the rank stood still is therefore known when the copy ends, and goes to the node agent
with the news that the part is there.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping

import torch

from trinity_sync.actors.agent import AgentClient
from trinity_sync.backends.base import Backend
from trinity_sync.errors import WaitTimeout
from trinity_sync.host.logs import log_failure
from trinity_sync.host.origin import told
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.computed import Sources
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.staging import stage


class WeightStager:
    """Stages versions of one rank.

    Args:
        backend: the engine's backend.
        layout: how the part is laid out that this rank stages.
        segments: slot -> this rank's bytes in it; empty for a rank that holds nothing of its own.
        agent: the node's agent.
        part: name of the rank's part.
        timeout_s: limit of the wait for a copy, seconds.
    """

    def __init__(
        self,
        backend: Backend,
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
        self._timeout_s = timeout_s
        self._may_be_lazy = backend.deadline == "optimizer_step"
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._copied.set()
        self._held_since: float | None = None
        if self._may_be_lazy:
            backend.before_change(self.wait_copied)

    def stage(self, version: Version, slot: int, *, lazily: bool = False) -> float:
        """Copy into the slot and tell the agent. Collective where the engine offloads.

        Args:
            version: the version that the weights are.
            slot: number of the slot.
            lazily: return at once and copy on, where the engine allows that.

        Returns:
            Seconds in which the rank stood still so far.
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
        begun = time.perf_counter() - started
        arguments = (version, slot, sources, begun)
        threading.Thread(target=self._copy, args=arguments, name=f"stage-{version.step}", daemon=True).start()
        return begun

    def wait_copied(self) -> None:
        """Wait until the weights may change. Called on the training thread.

        Raises:
            WaitTimeout: the copy takes too long.
        """
        with self._lock:
            if self._copied.is_set():
                return
            self._held_since = time.perf_counter()
        if not self._copied.wait(self._timeout_s):
            raise WaitTimeout("the snapshot", f"copy the weights of {self._part}", self._timeout_s)

    def _copy(self, version: Version, slot: int, sources: Sources, begun: float) -> None:
        error = None
        try:
            with torch.no_grad():
                stage(self._layout, sources, self._segments[slot])
        except Exception as problem:
            log_failure(f"staging version {version}", problem)
            error = told(problem)
        with self._lock:
            held = 0.0 if self._held_since is None else time.perf_counter() - self._held_since
            self._held_since = None
            self._copied.set()
        if error is None:
            self._agent.part_staged(version, slot, self._part, begun + held)
        else:
            self._agent.part_failed(version, self._part, error)
