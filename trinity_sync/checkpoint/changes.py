"""Waiting on an event loop until something holds, which is looked at whenever anything has changed."""

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
        """Something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, ready: Callable[[], bool], describe: Callable[[], tuple[str, str]], seconds: float) -> None:
        """Wait for a change after which `ready` is true.

        Args:
            describe: who and what was waited for, for the error.
            seconds: at most.

        Raises:
            WaitTimeout: it did not come.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                who, what = describe()
                raise WaitTimeout(who, what, seconds) from None
