"""Waiting inside an actor on one event loop: a state changes, everybody who waits looks again. Nothing is polled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from trinity_sync.errors import WaitTimeout


class Waits:
    """Base of an actor whose calls wait for its state to change."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_change(self, deadline: float) -> bool:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return False
        return True

    async def _wait_for(
        self, ready: Callable[[], bool], who: str, what: str, timeout_s: float, deadline: float | None = None
    ) -> None:
        """Until it is so. A wait that goes on with an earlier one ends at its `deadline` (`time.monotonic`)."""
        left = timeout_s if deadline is None else deadline - time.monotonic()
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(ready), left)
            except TimeoutError:
                raise WaitTimeout(who, what, timeout_s) from None
