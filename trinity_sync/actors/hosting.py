"""What the body of an actor has to know of what hosts it. Without Ray, whose own is `ray_host`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Host(Protocol):
    """What hosts an actor."""

    @property
    def restarted(self) -> bool:
        """Whether the actor's process was killed, and this one goes on in its place."""
        ...

    def call_id(self) -> str:
        """Return the id of the call that is being answered: the same one when it is repeated after a restart."""
        ...

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for the end of the process that made a call.

        Args:
            owned: `Pending.owned` of another call of that process, which is answered when nobody waits here any more.

        Returns:
            True: the process is gone. False: it has its answer.
        """
        ...
