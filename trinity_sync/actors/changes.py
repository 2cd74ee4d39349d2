"""Waiting inside an actor, on its event loop, until something holds. It is looked at whenever anything has changed, so
nothing is polled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from trinity_sync.errors import WaitTimeout


class Changes:
    """Wakes all who wait. For one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def announce(self) -> None:
        """Say that something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def next(self, seconds: float) -> bool:
        """Wait for the next change, so many seconds at most; whether one came."""
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    async def wait(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], tuple[str, str]],
        seconds: float,
        deadline: float | None = None,
    ) -> None:
        """Wait for a change after which `ready` is true.

        Args:
            ready: tells whether there is nothing to wait for any more.
            describe: gives who was waited for, and for what; asked where the error has to say so.
            seconds: limit of the wait.
            deadline: `time.monotonic` at which a wait ends that goes on with an earlier one of `seconds`.

        Raises:
            WaitTimeout: it did not come.
        """
        deadline = time.monotonic() + seconds if deadline is None else deadline
        while not ready():
            if not await self.next(deadline - time.monotonic()):
                raise WaitTimeout(*describe(), seconds)
