"""One sync at one member: what it holds, and how that ends, in whatever thread and for whatever reason."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch

from trinity_sync.errors import RunError, WaitTimeout, take_back
from trinity_sync.integrations.verl.weight_sync.base import Offer, Outgoing
from trinity_sync.integrations.verl.weight_sync.link import Hub
from trinity_sync.integrations.verl.weight_sync.members import Place
from trinity_sync.integrations.verl.weight_sync.receiving import Stream

_BRIEFLY_S = 0.1


class Session:
    """One sync. A later one is another object, so what is left of an earlier one cannot reach it.

    Args:
        timeout_s: limit of the wait for a thread that is at work in it, seconds.
        device: the GPU of this member; None: it has none.

    Attributes:
        place: what this member is told; None: not yet, or it was used.
        hub, offer, outgoing: a sender's.
        streams: a receiver's.
    """

    def __init__(self, timeout_s: float, device: torch.device | None) -> None:
        self.device = device
        self.place: Place | None = None
        self.hub: Hub | None = None
        self.offer: Offer | None = None
        self.outgoing: Outgoing | None = None
        self.streams: list[Stream] = []
        self._timeout_s = timeout_s
        self._work = threading.RLock()
        self._why: str | None = None
        self._over = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Whoever uses what the session holds does so in here, one thread at a time. An error ends the sync.

        Raises:
            RunError: the sync has ended.
        """
        # A thread of its own would work on the first GPU, and be given memory there.
        with self._work, torch.cuda.device(self.device) if self.device is not None else contextlib.nullcontext():
            try:
                self._check()
                yield
                self._check()
            except BaseException as error:
                take_back(error, partial(self._close, self._why or told(error)))
                if self._why is not None:  # it is what the links failed of
                    raise RunError(f"the sync was ended: {self._why}") from error
                raise

    def end(self, why: str, *, briefly: bool = False) -> None:
        """End the sync, unless it has ended, and tell who takes part in it. In any thread.

        Args:
            why: in words, for the others.
            briefly: leave the end to the thread that is at work in it, which is interrupted; else wait for that.

        Raises:
            WaitTimeout: that thread does not end.
        """
        if self._over:
            return
        self._why = self._why or why
        if not self._work.acquire(blocking=False):
            self._interrupt()
            limit = _BRIEFLY_S if briefly else self._timeout_s
            if not self._work.acquire(timeout=limit):
                if briefly:
                    return
                raise WaitTimeout("this member", "end its part in an earlier sync", limit)
        try:
            self._close(why)
        finally:
            self._work.release()

    def finish(self) -> None:
        """Let go of everybody, after all went well. At work."""
        outgoing, self.outgoing = self.outgoing, None
        if outgoing is not None:
            outgoing.close(failed=False)
        for stream in self.streams:
            stream.close()
        if self.hub is not None:
            self.hub.close()
        self._over = True

    def _check(self) -> None:
        if self._why is not None and not self._over:
            raise RunError(f"the sync was ended: {self._why}")

    def _interrupt(self) -> None:
        for link in (self.hub, *self.streams):
            if link is not None:
                link.interrupt()

    def _close(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        with ExitStack() as parts:  # from the last to the first; each also where another one cannot be closed
            if self.offer is not None:
                parts.callback(self.offer.withdraw)
            if self.outgoing is not None:
                parts.callback(self.outgoing.close, failed=True)
            for stream in self.streams:
                parts.callback(stream.give_up, why)
            if self.hub is not None:
                parts.callback(self.hub.give_up, why)


def told(error: BaseException) -> str:
    """An error in words, for another member."""
    return f"{type(error).__name__}: {error}"
