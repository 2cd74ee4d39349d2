"""The statuses that the trainer and the explorers of a run report, as a pure book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.protocol.choices import plain
from trinity_sync.protocol.rounds import RoundMember

RUNNING, REQUIRES_SYNC, STOPPED = STATUSES = ("running", "requires_sync", "stopped")

_ALIASES = {"require_sync": REQUIRES_SYNC}  # Trinity-RFT's word


def known_status(status: object) -> str:
    """Return one of `STATUSES`, given as an enum's member, its value or its name; a `ValueError` for any other."""
    name = str(plain(status)).lower()
    name = _ALIASES.get(name, name)
    if name not in STATUSES:
        raise ValueError(f"unknown status {status!r}; one of {', '.join(STATUSES)}")
    return name


class StatusBook:
    """The trainer's status, and the number of explorers of each process per status.

    `expects_trainer=False`: there is no trainer until one reports. `explorer_died`: a running explorer died, and none
    has reported since.
    """

    def __init__(self, *, expects_trainer: bool = True) -> None:
        self._trainer = RUNNING if expects_trainer else STOPPED
        self._trainer_spoke = False
        # By process: one process may have several names.
        self._explorers: dict[str, Counter[str]] = {}
        self._explorer_spoke = self.explorer_died = False

    @property
    def trainer(self) -> str:
        """The trainer's latest status."""
        return self._trainer

    @property
    def trainer_stopped(self) -> bool:
        return self._trainer == STOPPED

    def trainer_requires_sync(self) -> bool | None:
        """Return whether the trainer waits for explorers; None: it has stopped. False if it never reported."""
        if self._trainer == STOPPED and self._trainer_spoke:
            return None
        return self._trainer == REQUIRES_SYNC

    def set_trainer(self, status: object) -> None:
        self._trainer, self._trainer_spoke = known_status(status), True

    def counts(self) -> dict[str, int]:
        """Count explorers per status."""
        return {status: sum(counts[status] for counts in self._explorers.values()) for status in STATUSES}

    @property
    def explorers_stopped(self) -> bool:
        """Whether there were explorers, and all of them are dead or stopped."""
        counts = self.counts()
        return self._explorer_spoke and not counts[RUNNING] and not counts[REQUIRES_SYNC]

    def set_explorer(self, member: RoundMember, status: str, old_status: str | None) -> None:
        """Move one explorer of a process from `old_status` (None: it is new) to `status`."""
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
        """Forget the explorers of a dead process."""
        counts = self._explorers.pop(member.life, Counter())
        self.explorer_died |= counts[RUNNING] + counts[REQUIRES_SYNC] > 0

    @contextmanager
    def requiring_sync(self, member: RoundMember) -> Iterator[None]:
        """Count an explorer of the process as requiring sync during the block; a running one of the process, if it has
        any.
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
        """Let the trainer require sync during the block; then it runs, unless it has reported another status."""
        self.set_trainer(REQUIRES_SYNC)
        try:
            yield
        finally:
            if self._trainer == REQUIRES_SYNC:
                self.set_trainer(RUNNING)
