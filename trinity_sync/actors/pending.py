"""What a call to another process is to who waits for it, however it gets there. Without Ray.

Two things carry calls: Ray, to its actors (`calls`), and a connection, to an actor in a local process (`local`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

from trinity_sync.errors import RunError

T_co = TypeVar("T_co", covariant=True)
P = TypeVar("P", bound="Pending[Any]")

# Who is asked ends its own waits at the limit that it is given, and its word of what it waited for says more than ours:
# so much longer is waited for that.
ANSWER_S = 5.0


class MemberDied(RunError):  # noqa: N818 - it says what happened, as WaitTimeout does
    """A process that was waited for is gone.

    Args:
        who: the process's name, such as ``"trainer rank 1"``.
        what: what it was to do.
        why: why it is gone, as far as that is known.
    """

    def __init__(self, who: str, what: str, why: str = "") -> None:
        super().__init__(who, what, why)
        self.who, self.what, self.why = who, what, why

    def __str__(self) -> str:
        told = f"{self.who} died while it was to {self.what}"
        return f"{told} ({self.why})" if self.why else told


class Pending(ABC, Generic[T_co]):
    """A call to another process that is under way.

    Args:
        who: who was asked, such as ``"trainer rank 1"``.
        what: what it is to do, such as ``"train step 12"``.
    """

    def __init__(self, who: str, what: str) -> None:
        self.who, self.what = who, what

    @abstractmethod
    def result(self, timeout_s: float) -> T_co:
        """Wait for the answer.

        Raises:
            MemberDied: the process that was asked has ended.
            WaitTimeout: it did not answer in time.
            TrinityError: what it raised, with its name.
        """

    @abstractmethod
    async def answer(self, timeout_s: float) -> T_co:
        """As `result`, on an event loop."""

    @abstractmethod
    def is_answered(self) -> bool:
        """Tell whether it has ended well by now."""

    @abstractmethod
    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait until it has ended, well or not, or the time is over; tell whether it has.

        Raises:
            RunError: the wait itself was broken off.
        """

    @property
    @abstractmethod
    def owned(self) -> Sequence[object]:
        """What the process that is asked can tell the end of this one by, as another argument of a call to it; see
        `hosting.Host.outlived`.
        """


class Transport(ABC):
    """How calls get to an actor."""

    @abstractmethod
    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Pending[Any]:
        """Begin a call.

        Args:
            who: what errors call the actor.
            what: what it is to do, for errors.
            method: name of the actor's method.
            args, kwargs: its arguments.
        """

    @abstractmethod
    def caller(self) -> tuple[str, str]:
        """Name the calling process, unlike all others that call the actor: (its node, itself)."""


def ended(calls: Collection[P], timeout_s: float = 0.0) -> list[P]:
    """Wait until all of the calls have ended, well or not, or the time is over; return those that have.

    Args:
        timeout_s: seconds; 0 does not wait.

    Raises:
        RunError: the wait itself was broken off.
    """
    deadline = time.monotonic() + timeout_s
    return [call for call in calls if call.has_ended(max(0.0, deadline - time.monotonic()))]
