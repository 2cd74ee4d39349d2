"""Who takes part: a process under a name, and which of all that bore the name it is.

A process that died is started again under its name. What the old one said, and news of its death, may come late, and
must not be taken for the new one's: so each message bears the whole `Member`, and a `Roll` tells whether it counts.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple


class Member(NamedTuple):
    """A process.

    Attributes:
        name: what it is called, such as ``"explorer-0"``; no two have it at the same time.
        life: when it began, nanoseconds, and a random word. Of two of one name the later one is the one that counts.
    """

    name: str
    life: tuple[int, str]

    @classmethod
    def new(cls, name: str) -> Member:
        """A process that begins now."""
        return cls(name, (time.time_ns(), secrets.token_hex(8)))

    def __str__(self) -> str:
        return self.name


class Roll:
    """Which process bears each name now: the latest that spoke and is not dead. Messages may come late, doubled and in
    any order.
    """

    def __init__(self) -> None:
        self._alive: dict[str, set[Member]] = {}
        self._dead: set[Member] = set()

    def present(self, member: Member) -> bool:
        """A member says something. False: it is dead, or one of its name began after it, so what it says is old."""
        if member in self._dead:
            return False
        self._alive.setdefault(member.name, set()).add(member)
        return not self.over(member)

    def gone(self, member: Member) -> bool:
        """A member is dead. False: there is a later one of its name, whom that does not concern."""
        later = self._later(member)
        self._dead.add(member)
        self._alive.get(member.name, set()).discard(member)
        return not later

    def over(self, member: Member) -> bool:
        """Whether it is known that this one is dead, or that a later one of its name began."""
        return member in self._dead or self._later(member)

    def _later(self, member: Member) -> bool:
        return any(other > member for other in self._alive.get(member.name, ()))
