"""Who takes part in a broadcast of weights, and when it begins: the group and its rounds, as a pure book.

1. The trainer opens a group: where its members meet, and how many explorers belong to it.
2. Each explorer joins and gets its rank (the trainer's is 0).
3. For each version the trainer and every explorer arrive; with the last one the round begins.

A member that waits too long withdraws and leaves nothing behind. One that dies takes the group with it, because a
process group cannot shrink: the trainer opens another one with those that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TRAINER = "trainer"


class RoundError(Exception):
    """A call that does not fit the group; the message says who and why."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncGroup:
    """Where a group meets.

    Attributes:
        id: counts the groups of a run.
        address, port: of the store.
        explorers: how many belong to it.
        rank: of the one that asked; the trainer's is 0.
        meta: (name, dtype, shape) of what is sent, in order; None: not told.
    """

    id: int
    address: str
    port: int
    explorers: int
    rank: int = 0
    meta: list[Any] | None = None

    @property
    def world_size(self) -> int:
        """The trainer and the explorers."""
        return 1 + self.explorers


@dataclass
class RoundBook:
    """The group of now, its members, and who has arrived for the next round."""

    group: WeightSyncGroup | None = None
    rounds: int = 0
    step: int | None = None
    failed: str | None = None
    _ranks: dict[str, int] = field(default_factory=dict)
    _arrived: dict[str, int | None] = field(default_factory=dict)

    def open(self, address: str, port: int, meta: list[Any] | None, explorers: int) -> WeightSyncGroup:
        """A group in place of the one before."""
        if explorers < 1:
            raise RoundError(f"a group needs at least 1 explorer, not {explorers}")
        number = self.group.id + 1 if self.group is not None else 1
        self.group = WeightSyncGroup(id=number, address=address, port=port, explorers=explorers, meta=meta)
        self.failed = None
        self._ranks.clear()
        self._arrived.clear()
        return self.group

    def join(self, explorer: str) -> WeightSyncGroup:
        """The group as this explorer has to enter it.

        Raises:
            RoundError: there is none, or all places are taken.
        """
        group = self.group
        if group is None:
            raise RoundError(f"there is no group for {explorer} to join")
        if explorer not in self._ranks:
            if len(self._ranks) == group.explorers:
                taken = ", ".join(self._ranks)
                raise RoundError(f"{explorer} cannot join: the group is for {group.explorers} explorer(s), {taken}")
            self._ranks[explorer] = 1 + len(self._ranks)
        return WeightSyncGroup(
            id=group.id,
            address=group.address,
            port=group.port,
            explorers=group.explorers,
            rank=self._ranks[explorer],
            meta=group.meta,
        )

    def arrive(self, module: str, step: int | None) -> int:
        """A member is ready; the number of the round that it waits for. The round begins with the last member.

        Raises:
            RoundError: the trainer came without a step, or a member of the group is gone.
        """
        if self.failed is not None:
            raise RoundError(self.failed)
        if module == TRAINER and step is None:
            raise RoundError("the trainer has to say which step it is going to send")
        self._arrived[module] = step
        waited = self.rounds + 1
        if not self.missing():
            self.step = self._arrived[TRAINER]
            self.rounds += 1
            self._arrived.clear()
        return waited

    def withdraw(self, module: str) -> None:
        """A member waits no longer."""
        self._arrived.pop(module, None)

    def missing(self) -> str:
        """Who has not arrived, as a phrase; empty: nobody."""
        expected = self.group.explorers if self.group is not None else 1
        absent = expected - len(self._arrived.keys() - {TRAINER})
        known = [name for name in self._ranks if name not in self._arrived]
        names = f" ({', '.join(known)})" if known else ""
        who = [] if TRAINER in self._arrived else ["the trainer"]
        return " and ".join(who + ([f"{absent} of {expected} explorer(s){names}"] if absent > 0 else []))

    def gone(self, module: str) -> None:
        """A process is dead. Where it belonged to the group, nobody may wait for the group any more."""
        self._arrived.pop(module, None)
        if self.group is not None and (module in self._ranks or module == TRAINER):
            self.failed = f"{module} died, so its weight sync group is over; set up another one"
