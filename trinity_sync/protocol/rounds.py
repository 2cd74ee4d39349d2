"""The members and the start of a broadcast of weights: the group and its rounds, as a pure book.

1. The trainer opens a group: its meeting place and its number of explorers.
2. Each explorer joins and gets its rank (the trainer's is 0).
3. For each version the trainer and every explorer arrive; with the last one the round begins.

A member that times out withdraws and leaves nothing behind. A member that dies or restarts ends the group, because a
process group cannot change its processes; the trainer then opens another one with the present explorers. Messages from
processes of an earlier group, or from the earlier process of a restarted member, are ignored.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trinity_sync.weights.shards import Described


class RoundMember(NamedTuple):
    """A process under a name, such as ``"explorer-0"``; `life` is a random word that tells its processes apart."""

    name: str
    life: str

    @classmethod
    def new(cls, name: str) -> RoundMember:
        """Name the process that starts now."""
        return cls(name, secrets.token_hex(8))

    def __str__(self) -> str:
        return self.name


class Roll:
    """Knows the present process of each name: the live one that was heard of last.

    Messages may come late, repeated and in any order.
    """

    def __init__(self) -> None:
        self._order: dict[RoundMember, int] = {}
        self._alive: dict[str, set[RoundMember]] = {}
        self._dead: set[RoundMember] = set()

    def hear(self, member: RoundMember) -> None:
        """Note that there is a member. The first time counts."""
        self._order.setdefault(member, len(self._order))

    def present(self, member: RoundMember) -> bool:
        """Return whether a member's messages count. False: it is dead, or a later one of its name has spoken."""
        if member in self._dead:
            return False
        self.hear(member)
        self._alive.setdefault(member.name, set()).add(member)
        return not self._later(member)

    def gone(self, member: RoundMember) -> bool:
        """Note that a member is dead. False: a later one of its name is present and not affected."""
        self.hear(member)
        self._dead.add(member)
        self._alive.get(member.name, set()).discard(member)
        return not self._later(member)

    def is_dead(self, member: RoundMember) -> bool:
        return member in self._dead

    def _later(self, member: RoundMember) -> bool:
        return any(self._order[other] > self._order[member] for other in self._alive.get(member.name, ()))


TRAINER = "trainer"


class RoundError(Exception):
    """A call that does not fit the group; the message says who and why."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncGroup:
    """The meeting place of a group."""

    id: int  # counts the groups of a run
    address: str  # of the store in which the members meet
    port: int
    explorers: int  # their number
    rank: int = 0  # of the member that asked; the trainer's is 0
    meta: list[Described] | None = None  # (name, dtype, shape) of the tensors, in order; None: unknown

    @property
    def world_size(self) -> int:
        return 1 + self.explorers


@dataclass(eq=False)
class RoundStart:
    """The time before a round: it ends with the `step` that is going to be sent, or with an error in `failed`."""

    step: int | None = None
    failed: str | None = None
    arrived: dict[RoundMember, int | None] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.step is not None or self.failed is not None


@dataclass
class RoundBook:
    """The current group, its members, and those that have arrived for the next round.

    Programs with a process group of their own open none here; then the trainer and one explorer meet.
    """

    roll: Roll = field(default_factory=Roll)
    group: WeightSyncGroup | None = None
    failed: str | None = None
    _meeting: RoundStart = field(default_factory=RoundStart)
    # Ranks of the explorers, and the trainer's processes: the opener of the group, and those that came to a round.
    _ranks: dict[RoundMember, int] = field(default_factory=dict)
    _trainers: set[RoundMember] = field(default_factory=set)
    _opener: RoundMember | None = None
    # Openers and explorers of earlier groups that are not in this one.
    _former: set[RoundMember] = field(default_factory=set)

    def open(
        self, trainer: RoundMember, address: str, port: int, meta: list[Described] | None, explorers: int
    ) -> WeightSyncGroup:
        """Open a group in place of the current one, whose waiting members get an error. Raises RoundError: it has no
        explorers, or this trainer process is dead or was replaced.
        """
        if explorers < 1:
            raise RoundError(f"a group needs at least 1 explorer, not {explorers}")
        if not self.roll.present(trainer):
            raise RoundError(f"this {trainer} is dead or was restarted, so it cannot open a group")
        number = self.group.id + 1 if self.group is not None else 1
        self._meeting.failed = f"weight sync group {number} took the place of the one before; join that"
        # Other processes of the trainer that came to a round are not members of the group, and continue.
        opener = {self._opener} if self._opener is not None else set()
        self._former = (self._former | self._ranks.keys() | opener) - {trainer}
        self.group = WeightSyncGroup(id=number, address=address, port=port, explorers=explorers, meta=meta)
        self.failed, self._meeting = None, RoundStart()
        self._ranks, self._trainers, self._opener = {}, {trainer}, trainer
        return self.group

    def joinable(self, after: int) -> bool:
        """Return whether there is a usable group with an id above `after`."""
        return self.group is not None and self.group.id > after and self.failed is None

    def join(self, explorer: RoundMember) -> WeightSyncGroup:
        """Return the group as this explorer has to enter it. Raises RoundError: there is none, all places are taken, or
        a later process of this name has replaced this one.
        """
        group = self.group
        if group is None:
            raise RoundError(f"there is no group for {explorer} to join")
        self._present(explorer)
        if self.failed is not None:
            raise RoundError(self.failed)
        if explorer not in self._ranks:
            if len(self._ranks) == group.explorers:
                taken = ", ".join(map(str, self._ranks))
                raise RoundError(f"{explorer} cannot join: the group is for {group.explorers} explorer(s), {taken}")
            self._ranks[explorer] = 1 + len(self._ranks)
            self._former.discard(explorer)
        return replace(group, rank=self._ranks[explorer])

    def arrive(self, member: RoundMember, step: int | None) -> RoundStart:
        """Note that a member is ready, and return its round. The round begins with the last member.

        An explorer that was in no earlier group takes a place in this one. Raises RoundError: the trainer came without
        a step, a member of the group is gone, this process belongs to an earlier group, or a later process of its name
        has replaced it.
        """
        if member in self._former:
            raise RoundError(f"{member} belongs to a weight sync group that is over; join the current one")
        if member.name == TRAINER:
            if step is None:
                raise RoundError("the trainer has to say which step it is going to send")
            if self.roll.is_dead(member):
                raise RoundError(f"this {member} is dead")
        elif self.group is not None:
            self.join(member)
        else:
            self._present(member)
        if self.failed is not None:
            raise RoundError(self.failed)
        if member.name == TRAINER:
            self._trainers.add(member)
        meeting = self._meeting
        self.withdraw(meeting, member)  # a repeated arrival moves to the end
        meeting.arrived[member] = step
        if not self.missing():
            *_, meeting.step = (sent for one, sent in meeting.arrived.items() if one.name == TRAINER)
            self._meeting = RoundStart()
        return meeting

    def withdraw(self, meeting: RoundStart, member: RoundMember) -> None:
        meeting.arrived.pop(member, None)

    def missing(self) -> str:
        """Name the members that have not arrived, as a phrase; empty: all are here."""
        expected = self.group.explorers if self.group is not None else 1
        arrived = self._meeting.arrived
        here = [one for one in arrived if one.name != TRAINER]
        absent = expected - len(here)
        known = [str(one) for one in self._ranks if one not in arrived]
        names = f" ({', '.join(known)})" if known else ""
        who = [] if len(here) < len(arrived) else ["the trainer"]
        return " and ".join(who + ([f"{absent} of {expected} explorer(s){names}"] if absent > 0 else []))

    def gone(self, member: RoundMember) -> None:
        """Note that a process is dead. If it was a member, the group is over."""
        self.roll.gone(member)
        self._former.discard(member)
        self._meeting.arrived.pop(member, None)
        if self.group is not None and (member in self._ranks or member in self._trainers):
            self._fail(f"{member} died, so its weight sync group is over; set up another one")

    def sends(self, member: RoundMember) -> bool:
        """Return whether to believe this trainer's report of a transfer: it is neither dead nor of an earlier group."""
        return member not in self._former and not self.roll.is_dead(member)

    def _present(self, explorer: RoundMember) -> None:
        if not self.roll.present(explorer):
            raise RoundError(f"this {explorer} is dead or was restarted, so it cannot take part")
        earlier = {one for one in (*self._ranks, *self._meeting.arrived) if one.name == explorer.name} - {explorer}
        for one in earlier:
            self._meeting.arrived.pop(one, None)
        if earlier & self._ranks.keys():
            self._fail(f"{explorer} was restarted, so its weight sync group is over; set up another one")

    def _fail(self, reason: str) -> None:
        self.failed = self.failed or reason
        self._meeting.failed = self.failed
        self._meeting = RoundStart()
