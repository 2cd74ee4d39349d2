"""A rank's part of full saves: the ranks begin each save together, and a failed save does not end training.

An error of one rank goes to the monitor, which fails the step, and to the other ranks, so that none waits for it in a
collective call. The next save begins anew. `Member` makes the saver: `AgentSaver`, or `BackendSaver` for a backend that
writes its own files.
"""

from __future__ import annotations

import mmap
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trinity_sync.actors.agent_client import AgentClient, StatePart
from trinity_sync.actors.calls import ANSWER_S, Call
from trinity_sync.backends.base import DISTRIBUTED, Backend, Format, SelfWritingBackend
from trinity_sync.backends.meetings import Meetings, RankMeeting
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.errors import TrinityError
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.shard_file import Extent
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.snapshot import Snapshot, StatePlan, plan
from trinity_sync.weights.staging import Copying, pin_segment, unpin_segment

B = TypeVar("B", bound=Backend | SelfWritingBackend)


class Saver(ABC, Generic[B]):
    """Saves of one rank. All methods are collective."""

    def __init__(
        self, backend: B, coordinator: CheckpointCoordinator, meetings: Meetings, part: str, *, lazy: bool
    ) -> None:
        self._backend = backend
        self._coordinator = coordinator
        self._meetings = meetings
        self._timeout_s = meetings.timeout_s
        self._part = part
        self._lazy = lazy and backend.deadline == "optimizer_step"
        self._copying: Snapshot | Copying | None = None
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
        self._coordinator.wait_all()

    def _ready(self, step: int) -> None:
        """Wait until the save before is written or handed over."""
        self._wait_copied()
        self._coordinator.settle()

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
        coordinator: CheckpointCoordinator,
        meetings: Meetings,
        part: str,
        *,
        writes_metadata: bool,
        form: Format,
        lazy: bool,
    ) -> None:
        super().__init__(backend, coordinator, meetings, part, lazy=lazy)
        self._agent = agent
        self._writes_metadata = writes_metadata
        self._format: Format = form
        self._reserved = -1
        self._reserving: Call[tuple[str, list[str]]] | None = None
        self._written: Call[None] | None = None
        self._segment: mmap.mmap | None = None

    def prepare(self) -> None:
        """Let the agent make the segment before the first save. The optimizer has to have its states."""
        if self._reserved < 0:
            self._reserve(plan(self._backend.state(self._format)))

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

    def _reserve(self, planned: StatePlan) -> None:
        self._reserved = planned.nbytes
        self._reserving = self._agent.reserve_state(self._part, planned.nbytes)

    def _segment_for(self, planned: StatePlan) -> mmap.mmap:
        if self._segment is not None and len(self._segment) >= planned.nbytes:
            return self._segment
        if self._segment is not None:
            unpin_segment(self._segment)
            self._segment = None
        if self._reserved < planned.nbytes:
            self._reserve(planned)
        assert self._reserving is not None, "_reserve() asked"
        try:
            path, notes = self._reserving.result(self._timeout_s)
        except TrinityError:
            self._reserved = 0  # the next save may find room
            raise
        for note in notes:
            print(note, file=sys.stderr)
        self._segment = map_segment(Path(path), planned.nbytes, writable=True)
        pin_segment(self._segment)
        return self._segment


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
