"""What all saves of a rank have in common: the ranks begin them together, and a save that fails ends no training.

Whatever one rank fails of is told to the monitor, which gives the step up, and to the other ranks, which then wait for
it in no collective call. The next save begins anew.
"""

from __future__ import annotations

import mmap
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from trinity_sync.actors.agent_client import AgentClient, StatePart
from trinity_sync.actors.calls import ANSWER_S, Call
from trinity_sync.backends.base import DISTRIBUTED, Backend, Deadline, Format, SelfWritingBackend
from trinity_sync.backends.meetings import Meetings, RankMeeting
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.errors import TrinityError
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.shard_file import Extent
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.snapshot import Snapshot, StatePlan, plan
from trinity_sync.weights.staging import pin_segment, unpin_segment


class Snapshotting(Protocol):
    """A copy that may still be under way."""

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the state may change; seconds waited."""
        ...


class Saver(ABC):
    """Saves of one rank. All methods are collective.

    Args:
        deadline: when what the engine holds changes.
        coordinator: the process's coordinator.
        meetings: the rank's meetings with the others; their limit is that of all waits of a save.
        part: name of the rank's part.
        lazy: copy during the next forward and backward where the engine allows it.
    """

    def __init__(
        self, deadline: Deadline, coordinator: CheckpointCoordinator, meetings: Meetings, part: str, *, lazy: bool
    ) -> None:
        self._coordinator = coordinator
        self._meetings = meetings
        self._timeout_s = meetings.timeout_s
        self._part = part
        self._lazy = lazy and deadline == "optimizer_step"
        self._copying: Snapshotting | None = None
        self._step = -1
        self._blocked_s = 0.0

    @abstractmethod
    def prepare(self) -> None:
        """Get ready for saves, after a training step and before the first save."""

    def save(self, step: int, folder: Path) -> float:
        """Begin to save the state after `step` into the staging folder `folder`. What it fails of fails the step at the
        monitor, and is not raised.

        Returns:
            Seconds in which training stood still so far; see `blocked_s`.
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
        """Return the seconds in which training stood still for the save of `step`, or 0 where that was long ago."""
        return self._blocked_s if step == self._step else 0.0

    def finish(self) -> None:
        """Wait until the saves of this rank are in other hands, or done, and have these hurry; raises what the newest
        of them raised.
        """
        self._coordinator.wait_all()

    def _ready(self, step: int) -> None:
        """Wait until what was saved before is in other hands, or done."""
        self._wait_copied()
        self._coordinator.settle()

    @abstractmethod
    def _begin(self, step: int, folder: Path, meeting: RankMeeting) -> None:
        """Copy, and have the copy written in the background."""

    def _wait_copied(self) -> None:
        """Wait for the copy, on the training thread, before the state changes."""
        if self._copying is not None:
            self._blocked_s += self._copying.wait_until_copied(self._timeout_s)
            self._copying = None


# One rank's share of full checkpoints: the snapshot, and the hand-over to the node agent.


class AgentSaver(Saver):
    """Saves of one rank.

    Args:
        backend: the engine's backend.
        agent: the node's agent.
        coordinator, meetings, part, lazy: as for `Saver`.
        writes_metadata: this rank writes what all have in common (rank 0).
        form: format of the files.
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
        super().__init__(backend.deadline, coordinator, meetings, part, lazy=lazy)
        self._backend = backend
        self._agent = agent
        self._writes_metadata = writes_metadata
        self._format: Format = form
        self._reserved = -1
        self._reserving: Call[tuple[str, list[str]]] | None = None
        self._written: Call[None] | None = None
        self._segment: mmap.mmap | None = None
        if self._lazy:
            backend.before_change(self._wait_copied)

    def prepare(self) -> None:
        """Have the agent make the segment, so that the first save does not wait for it. Once the optimizer has its
        states.
        """
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
        self._copying = snapshot if self._lazy else None  # what is copied by then is not to be kept for the next save
        snapshot.copy(in_background=self._lazy)  # last: what comes after it shares the processor with it

    def _wait_written(self) -> None:
        """There is one segment: what was saved before has to be on the disk. The agent was asked in time (after the
        hand-over, behind the training thread), so that its answer is here already where there is nothing to wait for.
        """
        asked, self._written = self._written, None
        if asked is not None and asked.is_answered():
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
        given = StatePart(part=self._part, step=step, folder=str(folder), files=files)
        self._agent.take_state(given).result(self._timeout_s + ANSWER_S)
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
            self._reserved = 0  # there may be room for the next save
            raise
        for note in notes:
            print(note, file=sys.stderr)
        self._segment = map_segment(Path(path), planned.nbytes, writable=True)
        pin_segment(self._segment)
        return self._segment


# Saves of a rank whose backend copies and writes its training state itself (`backends.base.SelfWritingBackend`),
# instead of `agent_saver.AgentSaver`, which lays the tensors of a state out in shared memory for the node agent to
# write.


_ACTOR = "actor"


class BackendSaver(Saver):
    """Saves of one rank.

    Args:
        backend: the engine's backend.
        coordinator, meetings, part, lazy: as for `Saver`.
    """

    def __init__(
        self,
        backend: SelfWritingBackend,
        coordinator: CheckpointCoordinator,
        meetings: Meetings,
        part: str,
        *,
        lazy: bool,
    ) -> None:
        super().__init__(backend.deadline, coordinator, meetings, part, lazy=lazy)
        self._backend = backend
        if self._lazy:
            backend.before_change(self._wait_copied)

    def prepare(self) -> None:
        """Do nothing: there is no segment to be made."""

    def _begin(self, step: int, folder: Path, meeting: RankMeeting) -> None:
        self._copying, write = self._backend.begin_save(
            folder / _ACTOR, meeting, lazily=self._lazy, durable=self._coordinator.durable
        )

        def written() -> list[Path | FileTuple]:
            return [file if isinstance(file, Path) else (f"{_ACTOR}/{file[0]}", *file[1:]) for file in write()]

        self._coordinator.save_async("full", written, step, part=self._part, on_failure=meeting.give_up)
