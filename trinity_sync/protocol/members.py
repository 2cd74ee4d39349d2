"""Who takes part: a process under a name, and which of all that bore the name it is.

A process that died is started again under its name. What the old one said, and news of its death, may come late, and
must not be taken for the new one's: so each message bears the whole `Member`, and a `Roll` tells whether it counts.

No clock tells which of two processes is the later one, for two nodes have two of them. The order is that in which they
were first heard of, and a process has itself heard of as soon as it can (`hear`), which is before its successor begins.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple


class Member(NamedTuple):
    """A process that others hear of.

    Attributes:
        name: what it is called, such as ``"explorer-0"``; no two have it at the same time.
        life: a random word, by which those of one name differ.
    """

    name: str
    life: str

    @classmethod
    def new(cls, name: str) -> Member:
        """Name a process that begins now."""
        return cls(name, secrets.token_hex(8))

    def __str__(self) -> str:
        return self.name


class Roll:
    """Knows which process bears each name now: of those that spoke and are not dead the one that was heard of last.

    After that, messages may come late, doubled and in any order.
    """

    def __init__(self) -> None:
        self._order: dict[Member, int] = {}
        self._alive: dict[str, set[Member]] = {}
        self._dead: set[Member] = set()

    def hear(self, member: Member) -> None:
        """Note that there is a member. The first time counts."""
        self._order.setdefault(member, len(self._order))

    def present(self, member: Member) -> bool:
        """Return whether a member that says something is to be heard.

        False: it is dead, or a later one of its name has spoken, so what it says is old.
        """
        if member in self._dead:
            return False
        self.hear(member)
        self._alive.setdefault(member.name, set()).add(member)
        return not self._later(member)

    def gone(self, member: Member) -> bool:
        """Note that a member is dead. False: there is a later one of its name, whom that does not concern."""
        self.hear(member)
        self._dead.add(member)
        self._alive.get(member.name, set()).discard(member)
        return not self._later(member)

    def is_dead(self, member: Member) -> bool:
        """Return whether a member is known to be dead."""
        return member in self._dead

    def _later(self, member: Member) -> bool:
        return any(self._order[other] > self._order[member] for other in self._alive.get(member.name, ()))
