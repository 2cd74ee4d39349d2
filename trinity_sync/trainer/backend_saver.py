"""Saves of a rank whose backend copies and writes its training state itself (`backends.base.SelfWritingBackend`),
instead of `agent_saver.AgentSaver`, which lays the tensors of a state out in shared memory for the node agent to write.

The training thread stands still while the save is planned and, at the optimizer's next step, for what is left of the
copy; a background thread of each rank writes. With ``checkpoint.snapshot=eager``, or where the engine's storage may
change at any time, the training thread waits for the whole copy.
"""

from __future__ import annotations

from pathlib import Path

from trinity_sync.backends.base import SelfWritingBackend
from trinity_sync.backends.meetings import Meeting, Meetings
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.trainer.saver import Saver

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

    def _begin(self, step: int, folder: Path, meeting: Meeting) -> None:
        self._copying, write = self._backend.begin_save(
            folder / _ACTOR, meeting, lazily=self._lazy, durable=self._coordinator.durable
        )

        def written() -> list[Path | FileTuple]:
            return [file if isinstance(file, Path) else (f"{_ACTOR}/{file[0]}", *file[1:]) for file in write()]

        self._coordinator.save_async("full", written, step, part=self._part, on_failure=meeting.give_up)
