"""What the trainer and the explorers of a run say they are doing, as a pure book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.protocol.choices import plain
from trinity_sync.protocol.rounds import RoundMember

RUNNING, REQUIRES_SYNC, STOPPED = STATUSES = ("running", "requires_sync", "stopped")

_ALIASES = {"require_sync": REQUIRES_SYNC}  # Trinity-RFT's word


def known_status(status: object) -> str:
    """Return one of `STATUSES`, which may be given as an enum's member, its value or its name.

    Raises:
        ValueError: it is none.
    """
    name = str(plain(status)).lower()
    name = _ALIASES.get(name, name)
    if name not in STATUSES:
        raise ValueError(f"unknown status {status!r}; one of {', '.join(STATUSES)}")
    return name


class StatusBook:
    """The trainer's status, and how many explorers of each process are in which.

    Args:
        expects_trainer: False: until a trainer has spoken, there is none.

    Attributes:
        explorer_died: an explorer is dead that had not stopped, and none has spoken since.
    """

    def __init__(self, *, expects_trainer: bool = True) -> None:
        self._trainer = RUNNING if expects_trainer else STOPPED
        self._trainer_spoke = False
        # By process: one bears several names.
        self._explorers: dict[str, Counter[str]] = {}
        self._explorer_spoke = self.explorer_died = False

    @property
    def trainer(self) -> str:
        """What the trainer said last."""
        return self._trainer

    @property
    def trainer_stopped(self) -> bool:
        """Whether no version is going to come."""
        return self._trainer == STOPPED

    def trainer_requires_sync(self) -> bool | None:
        """Return whether the trainer waits for explorers; None: it has stopped. One that has not spoken does not."""
        if self._trainer == STOPPED and self._trainer_spoke:
            return None
        return self._trainer == REQUIRES_SYNC

    def set_trainer(self, status: object) -> None:
        """Note what the trainer says."""
        self._trainer, self._trainer_spoke = known_status(status), True

    def counts(self) -> dict[str, int]:
        """Count explorers per status."""
        return {status: sum(counts[status] for counts in self._explorers.values()) for status in STATUSES}

    @property
    def explorers_stopped(self) -> bool:
        """Whether there were explorers, and none is left that is neither dead nor stopped."""
        counts = self.counts()
        return self._explorer_spoke and not counts[RUNNING] and not counts[REQUIRES_SYNC]

    def set_explorer(self, member: RoundMember, status: str, old_status: str | None) -> None:
        """Note that one explorer of a process goes from `old_status` (None: it is new) to `status`.

        Raises:
            ValueError: a status is unknown, or no explorer of the process is in the old one.
        """
        status = known_status(status)
        counts = self._explorers.setdefault(member.life, Counter())
        if old_status is not None:
            old_status = known_status(old_status)
            if counts[old_status] <= 0:
                raise ValueError(f"no explorer of {member} is {old_status}, so none can go from there to {status}")
            counts[old_status] -= 1
        counts[status] += 1
        self._explorer_spoke, self.explorer_died = True, False

    def drop(self, member: RoundMember) -> None:
        """Forget the explorers of a process that is dead."""
        counts = self._explorers.pop(member.life, Counter())
        self.explorer_died |= counts[RUNNING] + counts[REQUIRES_SYNC] > 0

    @contextmanager
    def requiring_sync(self, member: RoundMember) -> Iterator[None]:
        """For the length of the block, count an explorer of the process as requiring sync; one that runs, if it has
        said so.
        """
        counts = self._explorers.setdefault(member.life, Counter())
        runs = min(counts[RUNNING], 1)
        counts.update({RUNNING: -runs, REQUIRES_SYNC: 1})
        try:
            yield
        finally:
            counts.update({RUNNING: runs, REQUIRES_SYNC: -1})

    @contextmanager
    def trainer_requiring_sync(self) -> Iterator[None]:
        """For the length of the block, the trainer requires sync; then it runs, unless it says something else."""
        self.set_trainer(REQUIRES_SYNC)
        try:
            yield
        finally:
            if self._trainer == REQUIRES_SYNC:
                self.set_trainer(RUNNING)
