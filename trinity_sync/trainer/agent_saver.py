"""One rank's share of full checkpoints: the snapshot, and the hand-over to the node agent.

The training thread stands still while the state is looked up and, at the optimizer's next step, for what is left of the
copy. A background thread writes the small files and the skeletons of the large ones and hands over; the node agent does
the rest. With ``checkpoint.snapshot=eager``, or where the engine's storage may change at any time, the training thread
waits for the whole copy.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trinity_sync.actors.agent import AgentClient, StatePart
from trinity_sync.actors.calls import ANSWER_S, Call
from trinity_sync.backends.base import DISTRIBUTED, Backend, Format
from trinity_sync.backends.meetings import Meeting, Meetings
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.errors import TrinityError
from trinity_sync.trainer.saver import Saver
from trinity_sync.weights.image import Extent
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.snapshot import Snapshot, StatePlan, plan
from trinity_sync.weights.staging import pin_segment, unpin_segment


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

    def _begin(self, step: int, folder: Path, meeting: Meeting) -> None:
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

    def _hand_over(self, snapshot: Snapshot, step: int, folder: Path, meeting: Meeting) -> None:
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
