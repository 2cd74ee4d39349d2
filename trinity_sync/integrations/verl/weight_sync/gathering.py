"""The trainer's tensors, of which each is gathered from all its ranks, with a limit to each wait for them.

A collective call of verl's that hangs cannot be ended from outside, so a thread of its own makes it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

from trinity_sync.errors import RunError, WaitTimeout

T = TypeVar("T")

_GRACE_S = 1.0
"""By then a thread has ended that has nothing left to do."""


class Gathering(Generic[T]):
    """What an engine of verl's yields, one by one. No item is asked for before the one before was used.

    All ranks go through all of it, or their peers would wait for them: `finish` does so after an error.

    Args:
        items: the engine's generator.
        what: is gathered, for errors, such as ``"version 7"``.
        timeout_s: limit of the wait for each item, seconds.
    """

    def __init__(self, items: Iterable[T], what: str, timeout_s: float) -> None:
        self._items = iter(items)
        self._what = what
        self._timeout_s = timeout_s
        self._count = 0
        self._over = False
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[T] | Exception | None] = SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._gather, args=(device,), name="gather weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is gathered any more.

        Raises:
            RunError: a wait for an item was given up, and it has still not come.
            WaitTimeout: there is still more to come.
        """
        self._thread.join(_GRACE_S if self._over else self._timeout_s)
        if self._thread.is_alive() and self._over:
            raise RunError(f"a gather of {self._what} still hangs in the trainer; restart its ranks")
        if self._thread.is_alive():
            raise WaitTimeout("the trainer's ranks", f"end the gathers of {self._what}", self._timeout_s)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            RunError: the engine failed, as where another rank is gone.
            WaitTimeout: it did not come.
        """
        if self._over:
            raise StopIteration
        self._asked.put(True)
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except Empty:
            self._over = True
            raise WaitTimeout(
                "the trainer's ranks", f"gather tensor {self._count} of {self._what}", self._timeout_s
            ) from None
        if isinstance(answer, tuple):
            self._count += 1
            return answer[0]
        self._over = True
        self._thread.join()  # it has nothing left to do
        if answer is None:
            raise StopIteration
        raise RunError(
            f"tensor {self._count} of {self._what} could not be gathered from the trainer's ranks, of which one may be "
            f"gone: {type(answer).__name__}: {answer}"
        ) from answer

    def finish(self) -> None:
        """Go through what is left."""
        for _ in self:
            pass

    def close(self) -> None:
        """Ask for nothing more, so that the thread ends."""
        self._over = True
        self._asked.put(False)

    def _gather(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.no_grad():
            while self._asked.get():
                answer = self._next()
                self._answers.put(answer)
                if not isinstance(answer, tuple):
                    return
                del answer  # the caller alone holds it

    def _next(self) -> tuple[T] | Exception | None:
        try:
            return (next(self._items),)
        except StopIteration:
            return None
        except Exception as error:
            return error
