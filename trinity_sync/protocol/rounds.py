"""Who takes part in a broadcast of weights, and when it begins: the group and its rounds, as a pure book.

1. The trainer opens a group: where its members meet, and how many explorers belong to it.
2. Each explorer joins and gets its rank (the trainer's is 0).
3. For each version the trainer and every explorer arrive; with the last one the round begins.

A member that waits too long withdraws and leaves nothing behind. One that dies, or is started again, takes the group
with it, because a process group cannot change its processes: the trainer opens another one with those that there are.
What a process of an earlier group, or of an earlier life, says or suffers concerns none of them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trinity_sync.weights.shards import Described

# Who takes part: a process under a name, and which of all that bore the name it is.


class RoundMember(NamedTuple):
    """A process that others hear of.

    Attributes:
        name: what it is called, such as ``"explorer-0"``; no two have it at the same time.
        life: a random word, by which those of one name differ.
    """

    name: str
    life: str

    @classmethod
    def new(cls, name: str) -> RoundMember:
        """Name a process that begins now."""
        return cls(name, secrets.token_hex(8))

    def __str__(self) -> str:
        return self.name


class Roll:
    """Knows which process bears each name now: of those that spoke and are not dead the one that was heard of last.

    After that, messages may come late, doubled and in any order.
    """

    def __init__(self) -> None:
        self._order: dict[RoundMember, int] = {}
        self._alive: dict[str, set[RoundMember]] = {}
        self._dead: set[RoundMember] = set()

    def hear(self, member: RoundMember) -> None:
        """Note that there is a member. The first time counts."""
        self._order.setdefault(member, len(self._order))

    def present(self, member: RoundMember) -> bool:
        """Return whether a member that says something is to be heard.

        False: it is dead, or a later one of its name has spoken, so what it says is old.
        """
        if member in self._dead:
            return False
        self.hear(member)
        self._alive.setdefault(member.name, set()).add(member)
        return not self._later(member)

    def gone(self, member: RoundMember) -> bool:
        """Note that a member is dead. False: there is a later one of its name, whom that does not concern."""
        self.hear(member)
        self._dead.add(member)
        self._alive.get(member.name, set()).discard(member)
        return not self._later(member)

    def is_dead(self, member: RoundMember) -> bool:
        """Return whether a member is known to be dead."""
        return member in self._dead

    def _later(self, member: RoundMember) -> bool:
        return any(self._order[other] > self._order[member] for other in self._alive.get(member.name, ()))


TRAINER = "trainer"


class RoundError(Exception):
    """A call that does not fit the group; the message says who and why."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncGroup:
    """Where a group meets.

    Attributes:
        id: counts the groups of a run.
        address, port: the address of the store in which the members meet.
        explorers: how many belong to it.
        rank: the rank of the member that asked; the trainer's is 0.
        meta: (name, dtype, shape) of what is sent, in order; None: not told.
    """

    id: int
    address: str
    port: int
    explorers: int
    rank: int = 0
    meta: list[Described] | None = None

    @property
    def world_size(self) -> int:
        """The trainer and the explorers."""
        return 1 + self.explorers


@dataclass(eq=False)
class RoundStart:
    """Before a round: either it begins, and `step` is going to be sent, or it is over before (`failed` says why)."""

    step: int | None = None
    failed: str | None = None
    arrived: dict[RoundMember, int | None] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Nobody has to wait for it any more."""
        return self.step is not None or self.failed is not None


@dataclass
class RoundBook:
    """The group of now, its members, and who has arrived for the next round.

    Programs that bring a group of their own open none; then the trainer and one explorer meet.
    """

    roll: Roll = field(default_factory=Roll)
    group: WeightSyncGroup | None = None
    failed: str | None = None
    _meeting: RoundStart = field(default_factory=RoundStart)
    # The explorers by rank, and the trainer's processes: the one that opened the group, and those that came to a round.
    _ranks: dict[RoundMember, int] = field(default_factory=dict)
    _trainers: set[RoundMember] = field(default_factory=set)
    _opener: RoundMember | None = None
    # Who opened a group before, or had a rank in it, and has no place in this one.
    _former: set[RoundMember] = field(default_factory=set)

    def open(
        self, trainer: RoundMember, address: str, port: int, meta: list[Described] | None, explorers: int
    ) -> WeightSyncGroup:
        """A group in place of the one before, whose members need not wait any more.

        Raises:
            RoundError: it has no explorers, or this trainer is dead or was started again since.
        """
        if explorers < 1:
            raise RoundError(f"a group needs at least 1 explorer, not {explorers}")
        if not self.roll.present(trainer):
            raise RoundError(f"this {trainer} is dead, or was started again since: it opens no group any more")
        number = self.group.id + 1 if self.group is not None else 1
        self._meeting.failed = f"weight sync group {number} took the place of the one before; join that"
        # Another process of the trainer that came to a round is no member of the group, and goes on.
        opener = {self._opener} if self._opener is not None else set()
        self._former = (self._former | self._ranks.keys() | opener) - {trainer}
        self.group = WeightSyncGroup(id=number, address=address, port=port, explorers=explorers, meta=meta)
        self.failed, self._meeting = None, RoundStart()
        self._ranks, self._trainers, self._opener = {}, {trainer}, trainer
        return self.group

    def joinable(self, after: int) -> bool:
        """Whether there is a group with an id above `after` that can still be used."""
        return self.group is not None and self.group.id > after and self.failed is None

    def join(self, explorer: RoundMember) -> WeightSyncGroup:
        """The group as this explorer has to enter it.

        Raises:
            RoundError: there is none, all places are taken, or this process was taken over by a later one of its name.
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
        """A member is ready; the round that it waits for. The round begins with the last member.

        An explorer that never was in a group takes a place in this one.

        Raises:
            RoundError: the trainer came without a step, a member of the group is gone, or this process belongs to
                an earlier group or was taken over by a later one of its name.
        """
        if member in self._former:
            raise RoundError(f"{member} belongs to a weight sync group that is over; join the one of now")
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
        self.withdraw(meeting, member)  # it comes last, also where it came before
        meeting.arrived[member] = step
        if not self.missing():
            *_, meeting.step = (told for one, told in meeting.arrived.items() if one.name == TRAINER)
            self._meeting = RoundStart()
        return meeting

    def withdraw(self, meeting: RoundStart, member: RoundMember) -> None:
        """A member waits no longer."""
        meeting.arrived.pop(member, None)

    def missing(self) -> str:
        """Who has not arrived, as a phrase; empty: nobody."""
        expected = self.group.explorers if self.group is not None else 1
        arrived = self._meeting.arrived
        here = [one for one in arrived if one.name != TRAINER]
        absent = expected - len(here)
        known = [str(one) for one in self._ranks if one not in arrived]
        names = f" ({', '.join(known)})" if known else ""
        who = [] if len(here) < len(arrived) else ["the trainer"]
        return " and ".join(who + ([f"{absent} of {expected} explorer(s){names}"] if absent > 0 else []))

    def gone(self, member: RoundMember) -> None:
        """A process is dead. Where it belonged to the group, nobody may wait for the group any more."""
        self.roll.gone(member)
        self._former.discard(member)
        self._meeting.arrived.pop(member, None)
        if self.group is not None and (member in self._ranks or member in self._trainers):
            self._fail(f"{member} died, so its weight sync group is over; set up another one")

    def sends(self, member: RoundMember) -> bool:
        """Whether what this trainer says it has sent is to be believed: it is neither dead nor of an earlier group."""
        return member not in self._former and not self.roll.is_dead(member)

    def _present(self, explorer: RoundMember) -> None:
        if not self.roll.present(explorer):
            raise RoundError(f"this {explorer} is dead, or was started again since: it takes part in nothing any more")
        earlier = {one for one in (*self._ranks, *self._meeting.arrived) if one.name == explorer.name} - {explorer}
        for one in earlier:
            self._meeting.arrived.pop(one, None)
        if earlier & self._ranks.keys():
            self._fail(f"{explorer} was started again, so its weight sync group is over; set up another one")

    def _fail(self, reason: str) -> None:
        self.failed = self.failed or reason
        self._meeting.failed = self.failed
        self._meeting = RoundStart()
